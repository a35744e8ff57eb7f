"""The methods that are measured on one loaded base: plain decoding, drafts, baselines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from clover_jax.data.prompts import (
    BadPrompt,
    Prompt,
    read_prompts_and_mistakes,
    shipped_prompts,
)
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.models import Models, check_names, load
from clover_jax.decoding.programs import Placement
from clover_jax.decoding.race import with_attention, with_fastest_tree
from clover_jax.decoding.requests import Request
from clover_jax.decoding.row_settings import GenerationSettings, sampling_for
from clover_jax.decoding.row_stream import source_size
from clover_jax.decoding.spec import NO_DRAFT
from clover_jax.decoding.tree_config import AUTO
from clover_jax.drafters.registry import TRAINING_FREE
from clover_jax.errors import UserError
from clover_jax.evaluation.options import VANILLA, DraftChoice, Options
from clover_jax.evaluation.plan import Plan
from clover_jax.runtime.progress import say


@dataclasses.dataclass(frozen=True)
class Method:
    """Plain decoding, or a draft with its tree; a baseline is a draft without training.

    name: VANILLA or the draft's. source: where the draft was found; None for plain decoding.
    """

    name: str
    models: Models
    source: str | None = None

    @property
    def depth(self) -> int:
        """Drafted tokens on the longest path; 0 for plain decoding."""
        return self.models.tree.depth

    @property
    def is_trained(self) -> bool:
        """Whether it has a head with weights."""
        head = self.models.head
        return head is not None and head.config.kind not in TRAINING_FREE


def load_methods(
    options: Options,
    settings: GenerationSettings,
    prompts: Sequence[Prompt | BadPrompt] | None = None,
) -> list[Method]:
    """Load the base once, then every draft and every baseline; plain decoding comes first.

    prompts: what will be decoded; None for the prompts in the base's folder.
    A draft with the tree "auto" gets the fastest one at `batch_size`, or the one that its rows were
    begun with. Raises UserError for what is missing, broken or does not fit the base.
    """
    drafts = []
    for choice in options.draft_choices:
        # To choose a tree needs the draft, which is loaded with its own tree first.
        tree = None if choice.tree == AUTO else choice.tree
        spec = dataclasses.replace(options.spec, draft=choice.source, tree=tree)
        check_names(spec)  # before the base, which takes longer
        drafts.append((choice, spec))
    baselines = choose_baselines(options, settings)

    # Copies are drafts, so plain decoding has none.
    plain = load(dataclasses.replace(options.spec, copy=0))
    plain = with_attention(plain, options.spec.attention, options.batch_size)
    methods = [Method(VANILLA, plain)]
    for choice, spec in drafts:
        models = load(spec, plain)  # shares the base's weights
        if choice.tree == AUTO:
            if prompts is None:
                shipped = shipped_prompts(plain.base.directory, "--prompts=FILE")
                prompts = read_prompts_and_mistakes(shipped)
            # Where rows of an earlier run are kept, their tree is used again.
            rows = None if options.overwrite else options.rows_path(choice.name)
            rules = sampling_for(settings, []), settings.warping
            drafting = models
            models = with_fastest_tree(models, prompts, options.batch_size, *rules, resumed=rows)
            # A draft is there to be measured: the report shows by how much it does not pay.
            if models.draft is None:
                say(f"{choice.name} is measured with {drafting.tree.name} nevertheless")
                models = drafting
        methods.append(Method(choice.name, models, choice.source))

    # Baselines have their own trees: --tree and --copy are for the drafts. Only lookup reads other
    # texts.
    for choice in baselines:
        spec = dataclasses.replace(options.spec, draft=choice.source, copy=0)
        if choice.source != "lookup":
            spec = dataclasses.replace(spec, copy_from=None)
        methods.append(Method(choice.name, load(spec, plain), choice.source))
    return methods


def choose_baselines(options: Options, settings: GenerationSettings) -> list[DraftChoice]:
    """Return the baselines to measure: all training-free drafts, or those of `--baselines`.

    Raises UserError for another name.
    """
    names = [name.strip() for name in (options.baselines or "").split(",")]
    names = list(dict.fromkeys(filter(None, names)))
    if names == [NO_DRAFT]:
        return []
    for name in names:
        if name not in TRAINING_FREE:
            raise UserError(
                f"--baselines: {name!r} is not a training-free draft; they are "
                f"{', '.join(TRAINING_FREE)}, or {NO_DRAFT} alone"
            )

    # They have no distribution to sample from, which is a mistake only where they were named.
    if options.baselines is None and settings.draft_sampling != "sampled":
        names = list(TRAINING_FREE)
    # A draft of the user replaces the baseline of that name.
    given = {word for draft in options.draft_choices for word in (draft.name, draft.source)}
    return [DraftChoice(name, name) for name in names if name not in given]


def sizes_on(mesh: Mesh | None, batch_sizes: Sequence[int]) -> list[int]:
    """Return the batch sizes of engines, rounded up to equal rows per device, each once.

    Example: 1, 2 and 3 rows on two devices that split rows are 2, 2 and 4: [2, 4].
    """
    return list(dict.fromkeys(map(Placement(mesh).whole_rows, batch_sizes)))


def make_engines(methods: Sequence[Method], plan: Plan) -> dict[int, dict[str, Engine]]:
    """Return batch size -> an engine for each method by name; nothing compiles yet.

    Raises UserError where a tree does not suit its head or the rules of sampling.
    """
    rooms = {method.name: source_size(method.models, plan.prompts) for method in methods}
    return {
        size: {
            method.name: method.models.engine(
                size, plan.sampling, seed=plan.seed, source_size=rooms[method.name]
            )
            for method in methods
        }
        for size in plan.batch_sizes
    }


def warm_up(method: Method, engine: Engine, longest: int) -> None:
    """Compile every program that rows of up to `longest` positions may need.

    Buffers come in buckets: one pass in each, and one that grows through all of them.
    """
    context, depth = engine.config.base.max_position_embeddings, method.depth
    requests: list[Request] = []
    size = 0
    while size < engine.buffer_size(min(longest, context)):
        size = engine.buffer_size(size - depth + 1 if size else 1)
        # One token of prompt, and a limit that fills the buffer up to the tree's depth, which steps
        # may write beyond a row's end.
        limit = min(size - depth, context)
        requests.append(Request(len(requests), [0], max(limit - 1, 1)))

    # Alone a request starts in its bucket; together they grow from one bucket to the next.
    models = method.models
    for together in [*([request] for request in requests), requests]:
        for progress in engine.stream(models.base.params, models.draft_params, together):
            progress.stop()
