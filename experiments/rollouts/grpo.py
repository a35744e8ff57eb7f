"""Policy-gradient training of a base towards an aim that Python checks, with our rollouts.

    python -m experiments.rollouts.grpo --flagfile=experiments/rollouts/parses.flags --draft=lookup

Each update samples --group completions of --prompts_per_update prompts from the current base and
rewards each as --aim says (aims.py). The advantages of a group are its rewards less their mean,
over their deviation (GRPO, arXiv 2402.03300, without its KL term; each batch is used once, so no
ratio is clipped). The base follows their gradient by Adam. The draft, if any, is the one it began
with, or learns from the rollouts (--adapt): it changes speed, not the distribution of texts.

--output gets updates.jsonl (reward, tau, seconds), curve.png, and state.msgpack, the base and the
optimizer after the last update. A run that is started again goes on from there: however it was
killed, its rows are those of a run that was not, but for their seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.serialization import from_bytes, to_bytes

from clover_jax import api, cli
from clover_jax.cli.command_flags import define_settings, settings_from
from clover_jax.errors import UserError
from clover_jax.field_types import setting
from clover_jax.models.decoder import Decoder, base_logits, packed_mask
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.files import atomic_file
from clover_jax.runtime.row_writer import RowWriter
from experiments.rollouts.aims import AIMS, rewards_of
from experiments.rollouts.curves import draw


@dataclasses.dataclass(frozen=True)
class RolloutOptions:
    """The flags of this example."""

    base: str = setting("builtin:tiny", "the base to train")
    draft: str = setting("none", "draft of the rollouts: a head's folder, lookup, or none")
    adapt: bool = setting(False, "let the head learn from the rollouts")
    adapt_every: int | None = setting(
        None, "forwards between its steps, for rows that are the same to the bit [5 % of seconds]"
    )
    aim: str = setting("parses", "what is rewarded", choices=tuple(AIMS))
    prompts: str | None = setting(None, "rows with a prompt [prompts.jsonl of the base]")
    updates: int = setting(40, "updates of the base", least=1)
    prompts_per_update: int = setting(4, "prompts of an update", least=1)
    group: int = setting(8, "completions of a prompt", least=2)
    max_new_tokens: int = setting(64, "tokens of a completion at most", least=2)
    batch_size: int = setting(16, "rows decoded at once", least=1)
    learning_rate: float = setting(3e-5, "of Adam")
    seed: int = setting(0, "of prompts and samples")
    output: str = setting("runs/rollouts", "folder for the curve, the figures and the base")


def as_batch(samples: api.Samples, width: int) -> dict[str, np.ndarray]:
    """Return prompts and completions one after another in rows of `width` tokens."""
    rows = len(samples.tokens)
    tokens, is_new = np.zeros((rows, width), np.int32), np.zeros((rows, width), bool)
    segments = np.zeros((rows, width), np.int32)
    for row, prompt in enumerate(samples.prompt_ids):
        end = len(prompt) + int(samples.lengths[row])
        tokens[row, :end] = [*prompt, *samples.tokens[row, : samples.lengths[row]]]
        is_new[row, len(prompt) : end] = True
        segments[row, :end] = 1
    return {"tokens": tokens, "is_new": is_new, "segments": segments}


def make_update(config, optimizer):
    """Return the learner's compiled step; it consumes params and state."""

    def loss(params, batch, advantages):
        tokens, segments = batch["tokens"], batch["segments"]
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        output = Decoder(config).apply({"params": params}, tokens, positions, packed_mask(segments))
        scores = jax.nn.log_softmax(base_logits(config, params, output.hidden["post_norm"])[:, :-1])
        taken = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
        counted = batch["is_new"][:, 1:]
        return -(taken * counted * advantages[:, None]).sum() / counted.sum()

    def update(params, state, batch, advantages):
        gradient = jax.grad(loss)(params, batch, advantages)
        changes, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, changes), state

    return jax.jit(update, donate_argnums=(0, 1))


def define_flags(flags) -> None:
    """Define this command's flags."""
    define_settings(flags, RolloutOptions)


def main(flags) -> int:
    """Train, write a row an update, and go on where an earlier run stopped."""
    options = settings_from(flags, RolloutOptions)
    folder = Path(options.output)
    with CompileClock() as clock:
        train(options, folder, clock)
    draw({options.draft: [folder]}, options.base, folder / "curve.png")
    return 0


def train(options: RolloutOptions, folder: Path, clock: CompileClock) -> None:
    """Make the updates that `folder` has not; each is a row, then the state after it."""
    models = api.load_base(options.base, dtype="float32")
    if options.draft != "none":
        models = api.load_draft(models, options.draft)
    sampler = api.Sampler(
        models,
        batch_size=options.batch_size,
        adapt=options.adapt,
        adapt_every=options.adapt_every,
    )
    adapter = sampler.adapter
    source = Path(options.prompts) if options.prompts else models.base.directory / "prompts.jsonl"
    text = source.read_text()
    prompts = [json.loads(line)["prompt"] for line in text.splitlines()]
    width = options.max_new_tokens + max(len(models.tokenizer(text).input_ids) for text in prompts)

    optimizer = optax.adam(options.learning_rate)
    params = jax.tree.map(jnp.copy, models.base.params)  # the learner's own: it donates them
    state, done, saved = optimizer.init(params), 0, folder / "state.msgpack"
    update = make_update(models.base.config, optimizer)
    if saved.is_file():
        like = 0, params, state, adapter and adapter.state
        done, params, state, learned = from_bytes(like, saved.read_bytes())
        params, state = jax.tree.map(jnp.asarray, (params, state))
        if adapter is not None:
            adapter.restore(learned)

    # A killed run may have written the row of an update whose state it had not.
    path, settings = folder / "updates.jsonl", dataclasses.asdict(options)
    for name in ("updates", "output"):
        del settings[name]
    digest = hashlib.sha256(text.encode()).hexdigest()
    with RowWriter(path, settings=settings, prompts_hash=digest, most=done) as rows:
        if rows.finished != done:
            raise UserError(f"{path} has {rows.finished} rows; {saved} is of update {done}")
        for number in range(done, options.updates):
            began = clock.now()
            rng = np.random.default_rng((options.seed, number))
            places = rng.choice(len(prompts), options.prompts_per_update, replace=False)
            chosen = [prompts[place] for place in places]
            sampler.update_base(params)
            samples = sampler.sample(
                chosen,
                n=options.group,
                max_new_tokens=options.max_new_tokens,
                seed=options.seed * 100_003 + number,
            )
            sampled = clock.now()

            rewards = rewards_of(AIMS[options.aim], samples, chosen, models.tokenizer)
            spread = rewards.std(axis=1, keepdims=True)
            advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (spread + 1e-4)
            batch = as_batch(samples, width)
            params, state = update(params, state, batch, advantages.reshape(-1))
            jax.block_until_ready(params)
            row = {
                "index": number,
                "update": number + 1,
                "reward": round(float(rewards.mean()), 4),
                "tau": samples.tau,
                "tokens": int(samples.lengths.sum()),
                "rollout_seconds": round(sampled - began, 3),
                "update_seconds": round(clock.now() - sampled, 3),
            }
            if adapter is not None:
                row |= {"head_steps": adapter.state.steps, "taken_back": adapter.state.taken_back}
                row |= {
                    "decode_seconds": round(adapter.decoded, 3),
                    "learn_seconds": round(adapter.spent, 3),
                }
            print(json.dumps(row), flush=True)
            rows.append(row)
            after = number + 1, params, state, adapter and adapter.state
            with atomic_file(saved) as unfinished:
                unfinished.write_bytes(to_bytes(after))


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
