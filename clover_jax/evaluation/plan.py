"""What an evaluation decodes, and in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from clover_jax.data.prompts import BadPrompt, Prompt
from clover_jax.decoding.requests import Request
from clover_jax.decoding.sampling import SamplingConfig
from clover_jax.evaluation.legs import LegKey
from clover_jax.evaluation.methods import Method
from clover_jax.evaluation.tasks import Tasks
from clover_jax.generation.settings import GenerationSettings


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is decoded: all tasks, `repeats` times at every batch size.

    longest: positions that the longest row may need.
    batch_sizes: rows that are really decoded at once, which on a mesh may be more than was asked.
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

    def request(self, prompt: Prompt, prompt_ids: Sequence[int], turn: int = 0) -> Request:
        """Return the request of a turn of a row, with the row's own settings."""
        own = self.settings.for_row(prompt)
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
        values = {name: getattr(own, name) for name in names}
        return Request(prompt.index, prompt_ids, turn=turn, **values)

    def legs(self, methods: Sequence[Method]) -> Iterator[LegKey]:
        """Yield the keys of all legs in the order in which they run.

        Who begins changes from turn to turn.
        """
        turn = 0
        names = [method.name for method in methods]
        for batch_size in self.batch_sizes:
            for task in self.tasks:
                for repeat in range(self.repeats):
                    first = turn % len(names)
                    for name in names[first:] + names[:first]:
                        yield LegKey(batch_size, task, repeat, name)
                    turn += 1
