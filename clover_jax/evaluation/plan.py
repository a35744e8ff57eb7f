"""The plan of a run: its prompts by task, and the order of its passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from clover_jax.data.prompts import BadPrompt, Prompt
from clover_jax.decoding.requests import Request
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.evaluation.timed_passes import PassKey
from clover_jax.generation.settings import GenerationSettings

MT_BENCH = "mt_bench"
# Spec-Bench holds MT-bench's eight categories beside its other five tasks and counts them as one.
_MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)

Tasks = dict[str, list[Prompt | BadPrompt]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run that decodes all tasks `repeats` times at every batch size.

    longest: positions that the longest row may need.
    batch_sizes: rows that are decoded at once; on a mesh this may be more than the flag says.
    """

    tasks: Tasks
    settings: GenerationSettings
    sampling: SamplingConfig
    seed: int
    repeats: int
    batch_sizes: Sequence[int]
    longest: int

    @property
    def prompts(self) -> list[Prompt | BadPrompt]:
        """All rows, task by task."""
        return [prompt for rows in self.tasks.values() for prompt in rows]

    @property
    def is_equality_expected(self) -> bool:
        """Whether a draft must emit plain decoding's very tokens.

        Children drawn from the draft give the right distribution by other draws, and Medusa's rule
        gives another distribution.
        """
        return self.sampling.verify != "typical" and self.sampling.draft_sampling == "topk"

    def request(self, index: int, prompt_ids: Sequence[int], turn: int = 0) -> Request:
        """Return the request of a turn of a row, with its own settings; index: in the input."""
        prompt = next(prompt for prompt in self.prompts if prompt.index == index)
        assert isinstance(prompt, Prompt)  # a row that cannot be read has no turn
        own = self.settings.for_row(prompt)
        return Request(
            index, prompt_ids, own.max_new_tokens, params=own.warping, seed=own.seed, turn=turn
        )

    def passes(self, methods: Iterable[str]) -> Iterator[PassKey]:
        """Yield the keys of all timed passes of the methods named, in the order in which they run.

        The first method changes from round to round.
        """
        # A method that always begins would always meet a cold cache.
        names, round_number = list(methods), 0
        for batch_size in self.batch_sizes:
            for task in self.tasks:
                for repeat in range(self.repeats):
                    # Counted over all tasks and sizes: each method begins about as often.
                    first = round_number % len(names)
                    for name in names[first:] + names[:first]:
                        yield PassKey(batch_size, task, repeat, name)
                    round_number += 1


def group_by_task(
    prompts: Sequence[Prompt | BadPrompt], source: str, limit: int | None = None
) -> Tasks:
    """Return task -> its rows, tasks and rows in input order.

    A row without a category, or one that cannot be read, belongs to the task named by the stem of
    `source`. MT-bench's categories are one task where a file has others besides.
    limit: rows of each task at most.
    """
    # Rows without a category are named after their file.
    stem = Path(source).name.partition(".")[0] or "prompts"
    categories = [getattr(prompt, "category", None) for prompt in prompts]
    # `>` is a proper superset: Spec-Bench has other categories too, MT-bench's own file has none.
    is_mixed = set(categories) - {None} > _MT_BENCH_CATEGORIES

    tasks: Tasks = {}
    for prompt, category in zip(prompts, categories, strict=True):
        is_part = is_mixed and category in _MT_BENCH_CATEGORIES
        rows = tasks.setdefault(MT_BENCH if is_part else category or stem, [])
        if limit is None or len(rows) < limit:
            rows.append(prompt)
    return tasks
