"""Measure how a head follows a base that a run of grpo.py has moved.

    python -m experiments.rollouts.following --run=runs/docstrings --draft=runs/clover_lr

A fixed and an adapting head sample the same prompts of the base before and after it moved,
alternately. How the adapting head gains on the base that did not move tells what is more training,
and what is following.
"""

from __future__ import annotations

import dataclasses
import json
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
    rounds: int = setting(20, "rollouts of 4 prompts x 8 x 64 tokens by each head", least=1)
    seed: int = setting(0, "of prompts and samples")


def define_flags(flags) -> None:
    """Define this command's flags."""
    define_settings(flags, FollowingOptions)


def main(flags) -> int:
    """Print tau and seconds of each round, then what the second half of the rounds amounts to."""
    options = settings_from(flags, FollowingOptions)
    models = api.load_draft(api.load_base(options.base, dtype="float32"), options.draft)
    text = (models.base.directory / "prompts.jsonl").read_text()
    prompts = [json.loads(line)["prompt"] for line in text.splitlines()]
    state = msgpack_restore((Path(options.run) / "state.msgpack").read_bytes())
    moved = jax.tree.map(jnp.asarray, state["1"])  # after the number of its update
    samplers = {
        "before": api.Sampler(models, batch_size=16),
        "before_adapting": api.Sampler(models, batch_size=16, adapt=True),
        "fixed": api.Sampler(models, batch_size=16),
        "adapting": api.Sampler(models, batch_size=16, adapt=True),
    }
    for name in ("fixed", "adapting"):
        samplers[name].update_base(moved)
    adapter, taus = samplers["adapting"].adapter, []
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
            taus.append([row[name] for name in samplers])
            print(json.dumps(row), flush=True)

    means = dict(zip(samplers, np.mean(taus[len(taus) // 2 :], axis=0).round(4), strict=True))
    lost, gained = means["before"] - means["fixed"], means["adapting"] - means["fixed"]
    print(json.dumps(means | {"regained": round(gained / lost, 2), "share": row["share"]}))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
