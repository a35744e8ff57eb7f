"""Measure how a head follows a base that a run of grpo.py has moved.

    python -m experiments.rollouts.following --run=runs/docstrings --draft=runs/clover_lr

A fixed and an adapting head sample the same prompts of the base before and after it moved,
alternately with plain decoding and lookup. What the adapting head gains on the base that did not
move is more training; the rest is following.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.serialization import msgpack_restore

from clover_jax import api, cli
from clover_jax.cli.command_flags import define_settings, settings_from
from clover_jax.field_types import setting
from clover_jax.runtime.compile_clock import CompileClock


@dataclasses.dataclass(frozen=True)
class FollowingOptions:
    """The flags of this command."""

    run: str = setting("runs/docstrings", "folder of the run that moved the base")
    base: str = setting("builtin:tiny", "the base before it moved")
    draft: str = setting("runs/clover_lr", "the head, of the base before it moved")
    tree: str | None = setting(None, "the head's tree [its own]")
    batch_size: int = setting(16, "rows decoded at once", least=1)
    rounds: int = setting(20, "rollouts of 4 prompts x 8 x 64 tokens in each way", least=1)
    seed: int = setting(0, "of prompts and samples")


def define_flags(flags) -> None:
    """Define this command's flags."""
    define_settings(flags, FollowingOptions)


def main(flags) -> int:
    """Print each round's tau and seconds; of the second half, mean taus and median seconds."""
    options = settings_from(flags, FollowingOptions)
    plain = api.load_base(options.base, dtype="float32")
    # tau tells how well the head fits the base.
    models = api.load_draft(plain, options.draft, options.tree, allow_base_mismatch=True)
    size = options.batch_size
    text = (models.base.directory / "prompts.jsonl").read_text()
    prompts = [json.loads(line)["prompt"] for line in text.splitlines()]
    state = msgpack_restore((Path(options.run) / "state.msgpack").read_bytes())
    moved = jax.tree.map(jnp.asarray, state["1"])  # after the number of its update
    samplers = {
        "none": api.Sampler(plain, batch_size=size),
        "lookup": api.Sampler(api.load_draft(plain, "lookup", "copy:4"), batch_size=size),
        "before": api.Sampler(models, batch_size=size),
        "before_adapting": api.Sampler(models, batch_size=size, adapt=True),
        "fixed": api.Sampler(models, batch_size=size),
        "adapting": api.Sampler(models, batch_size=size, adapt=True),
    }
    for name in ("none", "lookup", "fixed", "adapting"):
        samplers[name].update_base(moved)
    adapter, rows = samplers["adapting"].adapter, []
    assert adapter is not None

    with CompileClock() as clock:
        for number in range(options.rounds):
            rng = np.random.default_rng((options.seed, number))
            chosen = [prompts[place] for place in rng.choice(len(prompts), 4, replace=False)]
            row: dict[str, float | int] = {"round": number + 1}
            for name, sampler in samplers.items():
                began = clock.now()
                tau = sampler.sample(chosen, n=8, max_new_tokens=64, seed=number).tau or 1.0
                row |= {name: tau, f"{name}_seconds": round(clock.now() - began, 3)}
            row |= {"steps": adapter.state.steps, "taken_back": adapter.state.taken_back}
            row["share"] = round(adapter.spent / adapter.decoded, 4)
            rows.append(row)
            print(json.dumps(row), flush=True)

    half, of_half = rows[len(rows) // 2 :], {}
    for name in samplers:
        of_half[name] = round(statistics.mean(row[name] for row in half), 4)
        seconds = [row[f"{name}_seconds"] for row in half]
        of_half[f"{name}_seconds"] = round(statistics.median(seconds), 3)
    lost, gained = (of_half[name] - of_half["fixed"] for name in ("before", "adapting"))
    print(json.dumps(of_half | {"regained": round(gained / lost, 2), "share": row["share"]}))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
