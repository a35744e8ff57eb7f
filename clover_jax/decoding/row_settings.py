"""How rows are decoded: the settings of a single row, and the flags of `generate`."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from clover_jax.data.prompts import BadPrompt, Prompt
from clover_jax.decoding.grammars import form_text
from clover_jax.decoding.sampling_config import (
    DRAFT_SAMPLINGS,
    VERIFICATIONS,
    SamplingConfig,
    SamplingParams,
)
from clover_jax.decoding.spec import AUTO_TREE, NO_DRAFT, ModelSpec
from clover_jax.errors import UserError
from clover_jax.field_types import check_settings, check_types, setting

_ROW_OPTIONS = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "logit_bias", "seed"),
    *("min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *(
        "structured_outputs",
        "stop",
        "stop_token_ids",
        "skip_special_tokens",
        "include_stop_str_in_output",
    ),
)

ADAPT = (
    "FOLDER: let the head learn from the texts that it drafts, for 5 % of the seconds; it is kept "
    "there, and another run goes on from it"
)

# The units of streamed text: see `RowState`.
Grain = Literal["chunk", "forward", "copy"]

_text = functools.partial(setting, group="text")
_sampling = functools.partial(setting, group="sampling")


@dataclasses.dataclass(frozen=True)
class GenerationSettings(SamplingParams):
    """The settings of a row.

    seed: None derives it from the run's seed and the row's index.
    stop: may be a single string, or None. One that is a special token ends the text as an
        end-of-sequence token does, since such a token has no text.
    stop_token_ids: tokens that end the text.
    include_stop_str_in_output: whether the text contains the stop string, or the token, that ended
        it.
    skip_special_tokens: whether special tokens have no text.
    min_new_tokens: tokens before an end-of-sequence token is allowed; stop strings still are.
    logit_bias: pairs of a token id and a number to add to its logit; may be a mapping too.
    structured_outputs: what the text must match, {"json": schema} for example, as JSON text; may be
        a mapping too (`grammars.form_text`).
    """

    max_new_tokens: int = _text(128, "maximum number of tokens of a turn", least=1)
    stop: str | tuple[str, ...] | None = _text(
        (), "stop string: the text ends before it; may be repeated", repeated=True
    )
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = _text(False, "continue after an end-of-sequence token")
    context_overflow: str = _text(
        "error",
        "what to do with prompts longer than the context",
        choices=("error", "truncate_left", "skip"),
    )
    verify: str | None = _sampling(
        None,
        "how drafted tokens are accepted [greedy at temperature 0, else lossless]: lossless text "
        "has the distribution of plain sampling; typical is Medusa's rule and is not lossless",
        choices=VERIFICATIONS,
    )
    draft_sampling: str = _sampling(
        "auto",
        "children by probability (topk), or drawn from the draft (sampled), which accepts more; "
        "auto draws for heads with weights and static trees without copies",
        choices=DRAFT_SAMPLINGS,
    )
    seed: int | None = None
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    structured_outputs: str | None = None

    def __post_init__(self):
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        stop = [] if stop is None else stop
        # The class is frozen; this is how it sets its own fields.
        object.__setattr__(self, "stop", tuple(stop) if isinstance(stop, list) else stop)
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        object.__setattr__(self, "structured_outputs", form_text(self.structured_outputs))

        # Types first, since the other checks compare values.
        check_types(type(self), vars(self))
        super().__post_init__()
        check_settings(self)
        if self.temperature > 0 and self.verify == "greedy":
            raise UserError(
                f"temperature {self.temperature:g} asks for sampling, which verify=greedy does not "
                "do; use verify=lossless, or temperature 0"
            )

        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise UserError(
                f"min_new_tokens ({self.min_new_tokens}) must lie in 0 .. max_new_tokens "
                f"({self.max_new_tokens})"
            )
        assert isinstance(self.stop, tuple)  # as set above
        # `check_types` has checked that it is a tuple, not what is in it.
        if not all(isinstance(text, str) for text in self.stop):
            raise UserError(f"stop must be strings, not {self.stop!r}")
        if "" in self.stop:
            raise UserError("a stop string is empty; give at least one character")

    @property
    def warping(self) -> SamplingParams:
        fields = dataclasses.fields(SamplingParams)
        return SamplingParams(*(getattr(self, field.name) for field in fields))

    def for_row(self, prompt: Prompt) -> GenerationSettings:
        """Return the settings, the row's own taking precedence.

        Raises UserError, naming the row, for invalid ones.
        """
        # None in a row leaves the command's value.
        own = {name: getattr(prompt, name) for name in _ROW_OPTIONS}
        given = {name: value for name, value in own.items() if value is not None}
        try:
            return dataclasses.replace(self, **given)
        except UserError as error:
            raise UserError(f"{prompt.source}: {error}") from error


def _pairs(biases: Any) -> tuple[tuple[int, float], ...]:
    given = biases.items() if isinstance(biases, Mapping) else biases
    if not isinstance(given, str) and isinstance(given, Iterable):
        pairs = [tuple(pair) if isinstance(pair, list) else pair for pair in given]
        if all(
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], numbers.Integral)
            and isinstance(pair[1], numbers.Real)
            for pair in pairs
        ):
            return tuple(pairs)
    raise UserError(
        f"logit_bias must be {{token id: number, ...}}, or pairs of these, not {biases!r}"
    )


def sampling_for(
    settings: GenerationSettings, prompts: Iterable[Prompt | BadPrompt]
) -> SamplingConfig:
    """Return the cheapest sampling rules that can decode all of these rows.

    An engine whose rows are all greedy reduces logits to their argmax; top-k and top-p cost a sort.
    """
    # The command's settings always count: the search for a tree uses them alone.
    rows = [settings]
    for prompt in prompts:
        try:
            rows.append(settings.for_row(prompt) if isinstance(prompt, Prompt) else settings)
        except UserError:
            continue  # the row fails when its turn comes

    # Greedy verification reads no distribution, so one row that samples decides for all.
    draws = settings.draft_sampling == "sampled" or any(row.temperature > 0 for row in rows)
    verify = settings.verify or ("lossless" if draws else "greedy")
    is_auto = settings.draft_sampling == "auto"
    return SamplingConfig(
        verify=verify,
        draft_sampling="topk" if is_auto and verify != "lossless" else settings.draft_sampling,
        truncate=any(row.cuts for row in rows),
        biased=any(row.min_new_tokens > 0 or row.logit_bias for row in rows),
        penalized=any(row.penalizes for row in rows),
        masked=any(row.structured_outputs is not None for row in rows),
    )


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """The flags of `generate` in addition to `ModelSpec` and `GenerationSettings`."""

    spec: ModelSpec
    seed: int
    prompt: str | None = setting(None, "text to continue")
    prompts: str | None = setting(
        None, "FILE,FILE: prompt rows, .jsonl (also compressed); - is standard input"
    )
    batch_size: int = setting(8, "rows decoded at once, with --prompts", least=1)
    output: str | None = setting(None, "file for the rows [stdout, with --prompts]")
    overwrite: bool = setting(False, "replace the rows in --output [resume them]")
    strict: bool = setting(False, "stop at the first row that fails")
    adapt: str | None = setting(None, ADAPT, group="draft")

    def __post_init__(self):
        if self.searches_tree and self.spec.draft == NO_DRAFT:
            raise UserError("--tree=auto chooses a tree for a draft; give --draft=DIR")
        if self.searches_tree and self.spec.copy:
            raise UserError(
                f"--copy={self.spec.copy}: --tree=auto tries copies itself; leave --copy out, or "
                "name a tree"
            )
        if self.prompt is not None and self.prompts is not None:
            raise UserError("--prompt and --prompts exclude each other; give one of them")
        if self.path is None:
            if self.overwrite:
                raise UserError("--overwrite is for --output=FILE, which is missing")
            return

        # The rows must not replace the prompts, and must be readable when the run is resumed.
        inputs = filter(None, (self.prompts or "").split(","))
        if self.path.resolve() in [Path(path).expanduser().resolve() for path in inputs]:
            raise UserError(f"--output={self.output} is a file of prompts; give another name")
        # /dev/stdout looks like a file if it is redirected to one; /dev/shm has real files.
        is_device = Path("/dev") in self.path.parents and Path("/dev/shm") not in self.path.parents
        is_file = self.path.is_file() or self.path.is_dir() or not self.path.exists()
        if is_device or not is_file:
            raise UserError(
                f"--output={self.output} is not a regular file, which a stopped run needs to "
                "resume; leave --output out to print the rows on stdout"
            )

    @property
    def searches_tree(self) -> bool:
        return self.spec.tree == AUTO_TREE

    @property
    def path(self) -> Path | None:
        return None if self.output is None else Path(self.output).expanduser()

    @property
    def begun(self) -> Path | None:
        """The row file that this run resumes, if it resumes one."""
        return None if self.overwrite else self.path

    @property
    def is_live(self) -> bool:
        return self.prompts is None
