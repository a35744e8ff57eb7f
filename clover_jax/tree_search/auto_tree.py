"""`--tree=auto`: measure this machine and this head, and decode with the fastest tree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.config import DrafterConfig
from clover_jax.data.prompt_encoding import encode_prompt
from clover_jax.data.prompts import SHIPPED_PROMPTS, Prompt, read_prompts, text_prompt
from clover_jax.decoding.sampling_config import SamplingConfig, SamplingParams
from clover_jax.decoding.tree_config import DEFAULT_DEPTH, CopyTree, Tree, TreeConfig, parse_tree
from clover_jax.errors import UserError
from clover_jax.loading.identity import identity_of
from clover_jax.loading.models import Models
from clover_jax.runtime.distributed import process_count
from clover_jax.runtime.progress import passing_note, say
from clover_jax.storage.json_files import read_json_object
from clover_jax.storage.row_writer import manifest_path
from clover_jax.timing.loops import steps_at_once
from clover_jax.tree_search.calibration import measure_ranks
from clover_jax.tree_search.costs import measure_costs
from clover_jax.tree_search.disk_cache import machine, remembered, timing_key
from clover_jax.tree_search.tree_choice import CostTable, choose_tree, describe_prospects, finalists
from clover_jax.tree_search.tree_trial import (
    ROUNDS,
    Prompts,
    Trial,
    describe,
    fastest,
    measure_trials,
    share_out,
    speed_up,
)

MOST_PROMPTS, NEW_TOKENS = 16, 64
CONTEXT = 256  # committed positions at which costs are measured
ROUND_SECONDS = 4.0  # of plain decoding, about, for each round of a trial
LEAST_A_ROUND = 2  # prompts, however slow they are
# For a base that brings no prompts: different kinds of text, none of them long.
SHIPPED = (
    "The history of the city begins with",
    "def read_lines(path):\n    ",
    "Question: Why is the sky blue?\nAnswer:",
    "Dear Sir or Madam,\n\nI am writing to",
    "1. Preheat the oven to 200 degrees.\n2.",
    "The theorem follows from the fact that",
    '{"name": "Ada", "born": 1815, "field":',
    "Once upon a time there was a",
)


def check_one_process() -> None:
    """Raise UserError where several processes would measure: each could choose another tree."""
    if process_count() > 1:
        raise UserError(
            f"--tree=auto measures in one process, and here are {process_count()}; give a "
            "tree, such as the one that it chose there"
        )


def with_auto_tree(
    models: Models,
    sampling: SamplingConfig,
    warping: SamplingParams,
    batch_size: int,
    calibration: str | None,
    rows: Path | None = None,
) -> Models:
    """Return the models with the tree of most tokens a second, or without the draft.

    calibration: a file of prompt rows; None takes the base's own, else the shipped ones.
    rows: a row file to resume, if it was begun: the tree is then its own.
    Measurements are kept on disk; the choice is explained on stderr.
    Raises UserError for prompts that cannot be used.
    """
    # Another update or machine may choose another tree, which would be refused beside these rows.
    begun = None if rows is None else _tree_of(rows)
    if begun is not None:
        say(f"{rows} was begun with the tree {begun.name}")
        return models.with_tree(begun) if begun.num_nodes else models.plain()

    # Parts of a step and the head's ranks select the trees for a trial.
    prompts = _prompts(models, calibration)
    with passing_note("measuring which trees may pay"):
        costs = _costs(models, batch_size)
        ranks = _ranks(models, prompts, warping)
    by_rank = sampling.draft_sampling == "topk"
    choice = choose_tree(costs, ranks, gaps=by_rank)
    say("\n".join(describe_prospects(choice, costs)))
    assert models.head is not None  # only a head's tree is searched
    only_copies = models.head.config.kind == "lookup"
    trees = finalists(choice, by_rank=by_rank, only_copies=only_copies)
    if not trees:
        say("no tree comes near paying: plain decoding")
        return models.plain()

    # Whole runs decide between them: parts leave out the host, and the places where steps begin.
    ways = [models.plain(), *(models.with_tree(tree) for tree in trees)]
    rounds = share_out(prompts, rows_a_round(len(prompts), batch_size, costs.plain))
    with passing_note(f"trying {len(trees)} trees"):
        of_plain, *trials = _trials(ways, rounds, sampling, warping, batch_size)
    num_prompts = len({tuple(prompt) for prompts in rounds for prompt in prompts})
    lines = describe([_name(tree) for tree in trees], trials, of_plain, num_prompts)
    say("\n".join(lines))
    best = fastest([speed_up(trial, of_plain) for trial in trials])
    return ways[0 if best is None else best + 1]


def _tree_of(rows: Path) -> Tree | None:
    """Return the tree that a row file was begun with; None where it has no rows, or names none."""
    if not (rows.is_file() and rows.stat().st_size):
        return None
    try:
        return parse_tree(read_json_object(manifest_path(rows))["settings"]["tree"])
    except (UserError, KeyError, TypeError, AttributeError):
        return None  # `RowWriter` reports what is wrong with the manifest


def _name(tree: Tree) -> str:
    if isinstance(tree, CopyTree):
        drafted = f"{_name(tree.drafted)}, and " if tree.drafted.num_nodes else ""
        return f"{drafted}{tree.copies} copies"
    if not isinstance(tree, TreeConfig):
        return tree.name
    # Static trees of a trial are all called auto; their shapes tell them apart.
    widths = ", ".join(str(len(level.parent)) for level in tree.levels())
    return f"{tree.num_nodes} nodes, {widths} by level"


def _prompts(models: Models, calibration: str | None) -> list[list[int]]:
    # The user's rows, else the base's own, else the shipped texts.
    own = models.base.directory / SHIPPED_PROMPTS
    if calibration is not None:
        rows: list[Prompt] = read_prompts(Path(calibration).expanduser())
    elif own.is_file():
        rows = read_prompts(own)
    elif models.tokenizer is None:
        raise UserError(
            "--tree=auto measures on texts, for which the base has no tokenizer files; give rows "
            "of prompt_ids with --calibration=FILE"
        )
    else:
        rows = [text_prompt(text) for text in SHIPPED]

    # A prompt too long for NEW_TOKENS more would end early and spoil the rates.
    vocabulary = models.base.config.vocab_size
    ids = [encode_prompt(row, models.tokenizer, vocabulary) for row in rows[:MOST_PROMPTS]]
    longest = models.base.config.max_position_embeddings - NEW_TOKENS
    kept = [prompt for prompt in ids if 0 < len(prompt) <= longest]
    if not kept:
        raise UserError(
            f"--tree=auto: every prompt to measure with has more than {longest} tokens, the base's "
            f"context less {NEW_TOKENS}; give shorter ones with --calibration=FILE"
        )
    return kept


def _costs(models: Models, batch_size: int) -> CostTable:
    context = min(CONTEXT, models.base.config.max_position_embeddings // 2)
    # Steps in a loop and steps that the host starts take different times, and so do kernels.
    how = {"in loops of": steps_at_once(), "attention": models.attention}
    key = timing_key(models, batch_size, context) | how
    measured = remembered(
        "costs", key, lambda: measure_costs(models, batch_size, context).to_dict()
    )
    return CostTable.from_dict(measured)


def ranked_depth(head: DrafterConfig) -> int:
    """Return the largest depth of the trees that are considered.

    A recurrent head drafts deeper than it was trained; EAGLE-1 is trained for one position.
    """
    return head.max_depth or max(head.num_positions, DEFAULT_DEPTH)


def _ranks(models: Models, prompts: list[list[int]], warping: SamplingParams) -> np.ndarray:
    assert models.head is not None  # ranks are a head's
    depth = ranked_depth(models.head.config)
    # Ranks depend on no tree, so one measurement serves every one.
    identity = identity_of(models)
    key: dict[str, Any] = {
        **{name: value for name, value in identity.items() if not name.startswith("tree")},
        "prompts": prompts,
        "depth": depth,
        **warping.to_dict(),
    }

    def measure() -> dict[str, Any]:
        ranks = measure_ranks(models, prompts, NEW_TOKENS, depth, warping)
        return {"ranks": ranks.tolist()}

    ranks = remembered("ranks", key, measure)["ranks"]
    return np.array(ranks, int).reshape(-1, depth)


def _trials(
    ways: Sequence[Models],
    rounds: Sequence[Prompts],
    sampling: SamplingConfig,
    warping: SamplingParams,
    batch_size: int,
) -> list[Trial]:
    """Time each round's prompts in every way, alternating, or read the cached result."""
    # The last way has a draft; the first is plain decoding.
    key = machine(ways[-1].mesh) | {
        "models": identity_of(ways[-1]),
        "trees": [models.tree.to_dict() for models in ways],
        "rounds": rounds,
        "settings": sampling.to_dict() | warping.to_dict(),
        "batch_size": batch_size,
    }

    def measure() -> dict[str, Any]:
        trials = measure_trials(ways, rounds, NEW_TOKENS, sampling, warping, batch_size)
        return {"trials": [trial.to_dict() for trial in trials]}

    trials = remembered("trials", key, measure)["trials"]
    return [Trial.from_dict(trial) for trial in trials]


def rows_a_round(num_prompts: int, batch_size: int, plain_seconds: float) -> int:
    """Return how many prompts each round of a trial decodes.

    plain_seconds: of a step of plain decoding. Where that is slow a round has fewer prompts, but
    at least LEAST_A_ROUND; a large batch decodes prompts more than once, so no slot stays empty.

    Example: 16 prompts are 4 a round at batch 1 and 5 ms a step, and 2 a round at 100 ms.
    """
    # All prompts are spread over the rounds; fewer where steps are slow, but one for each slot.
    in_time = max(int(ROUND_SECONDS / (plain_seconds * NEW_TOKENS)) * batch_size, LEAST_A_ROUND)
    return max(min(-(-num_prompts // ROUNDS), in_time), batch_size)
