"""Prompts by task: the category that a row gives, or the name of its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clover_jax.data.prompts import BadPrompt, Prompt

MT_BENCH = "mt_bench"
# Spec-Bench holds MT-bench's eight categories beside its other five tasks and counts them as one.
_MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)

Tasks = dict[str, list[Prompt | BadPrompt]]


def group_by_task(
    prompts: Sequence[Prompt | BadPrompt], source: str, limit: int | None = None
) -> Tasks:
    """Return task -> its rows, tasks and rows in input order.

    A row without a category, or one that cannot be read, belongs to the task named by the stem of
    `source`. MT-bench's categories are one task where a file has others besides.
    limit: rows of each task at most.
    """
    stem = Path(source).name.partition(".")[0] or "prompts"
    categories = [getattr(prompt, "category", None) for prompt in prompts]
    is_mixed = set(categories) - {None} > _MT_BENCH_CATEGORIES
    tasks: Tasks = {}
    for prompt, category in zip(prompts, categories, strict=True):
        is_part = is_mixed and category in _MT_BENCH_CATEGORIES
        rows = tasks.setdefault(MT_BENCH if is_part else category or stem, [])
        if limit is None or len(rows) < limit:
            rows.append(prompt)
    return tasks
