"""Which rows belong to which task."""

from clover_jax.data.prompts import BadPrompt, parse_prompt
from clover_jax.evaluation.plan import group_by_task

MT_BENCH = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem"]


def rows(*categories):
    return [
        parse_prompt({"prompt": "a", "category": category}, index, f"f:{index}")
        for index, category in enumerate(categories)
    ]


def shape(tasks):
    return {task: [prompt.index for prompt in prompts] for task, prompts in tasks.items()}


def test_tasks_and_rows_keep_their_order():
    assert shape(group_by_task(rows("b", "a", "b"), "x.jsonl")) == {"b": [0, 2], "a": [1]}


def test_rows_without_a_category_are_named_after_their_file():
    prompts = [*rows(None, None), BadPrompt(2, "f:2", "bad")]
    assert shape(group_by_task(prompts, "dir/HumanEval.jsonl.gz")) == {"HumanEval": [0, 1, 2]}


def test_mt_bench_is_one_task_only_beside_others():
    all_eight = [*MT_BENCH, "humanities"]
    assert list(group_by_task(rows(*all_eight), "f")) == all_eight
    mixed = group_by_task(rows(*all_eight, "qa"), "f")
    assert shape(mixed) == {"mt_bench": list(range(8)), "qa": [8]}
    assert list(group_by_task(rows("math", "qa"), "f")) == ["math", "qa"]


def test_a_limit_holds_for_each_task():
    limited = group_by_task(rows("a", "a", "b", "a"), "f", limit=2)
    assert shape(limited) == {"a": [0, 1], "b": [2]}
