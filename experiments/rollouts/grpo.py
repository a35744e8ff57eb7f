"""Policy-gradient training of a base towards an aim that Python checks, with our rollouts.

    python -m experiments.rollouts.grpo --flagfile=experiments/rollouts/parses.flags --draft=lookup

Each update samples --group completions of --prompts_per_update prompts from the current base and
rewards each with the share of its lines that parse as Python together with the prompt. The
advantages of a group are its rewards less their mean, over their deviation (GRPO, arXiv 2402.03300,
without its KL term; each batch is used once, so no ratio is clipped). The base follows their
gradient by Adam. The draft, if any, is the one it began with: it changes speed, not text.

--output gets updates.jsonl (reward, tau, seconds), curve.png, and the base of the last update. A
run that is started again goes on from it.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.serialization import from_bytes, to_bytes

from clover_jax import api, cli
from clover_jax.cli.command_flags import define_settings, settings_from
from clover_jax.field_types import setting
from clover_jax.models.decoder import Decoder, base_logits, packed_mask


@dataclasses.dataclass(frozen=True)
class RolloutOptions:
    """The flags of this example."""

    base: str = setting("builtin:tiny", "the base to train")
    draft: str = setting("none", "draft of the rollouts: a head's folder, lookup, or none")
    prompts: str | None = setting(None, "rows with a prompt [prompts.jsonl of the base]")
    updates: int = setting(40, "updates of the base", least=1)
    prompts_per_update: int = setting(4, "prompts of an update", least=1)
    group: int = setting(8, "completions of a prompt", least=2)
    max_new_tokens: int = setting(64, "tokens of a completion at most", least=2)
    batch_size: int = setting(16, "rows decoded at once", least=1)
    learning_rate: float = setting(3e-5, "of Adam")
    seed: int = setting(0, "of prompts and samples")
    output: str = setting("runs/rollouts", "folder for the curve, the figures and the base")


def reward(prompt: str, completion: str) -> float:
    """Return the share of a completion's whole lines up to which the text parses as Python."""
    lines = completion.split("\n")[:-1]
    for count in range(len(lines), 0, -1):
        try:
            ast.parse(prompt + "\n".join(lines[:count]))
        except (SyntaxError, ValueError):
            continue
        return count / len(lines)
    return 0.0


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


def draw(rows: list[dict], title: str, path: Path) -> None:
    """Draw reward and tau against updates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for axis, name in zip(axes, ("reward", "tau"), strict=True):
        axis.plot([row["update"] for row in rows], [row[name] for row in rows])
        axis.set(xlabel="updates", ylabel=name, title=title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def define_flags(flags) -> None:
    """Define this command's flags."""
    define_settings(flags, RolloutOptions)


def main(flags) -> int:
    """Train, write a row an update, and go on where an earlier run stopped."""
    options = settings_from(flags, RolloutOptions)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    models = api.load_base(options.base, dtype="float32")
    if options.draft != "none":
        models = api.load_draft(models, options.draft)
    sampler = api.Sampler(models, batch_size=options.batch_size)
    source = Path(options.prompts) if options.prompts else models.base.directory / "prompts.jsonl"
    prompts = [json.loads(line)["prompt"] for line in source.read_text().splitlines()]
    width = options.max_new_tokens + max(len(models.tokenizer(text).input_ids) for text in prompts)

    optimizer = optax.adam(options.learning_rate)
    params = jax.tree.map(jnp.copy, models.base.params)  # the learner's own: it donates them
    state, rows, saved = optimizer.init(params), [], folder / "state.msgpack"
    update = make_update(models.base.config, optimizer)
    if saved.is_file():
        rows = [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]
        done, params, state = from_bytes((0, params, state), saved.read_bytes())
        rows = rows[:done]
        params, state = jax.tree.map(jnp.asarray, (params, state))

    for number in range(len(rows), options.updates):
        began = time.perf_counter()
        rng = np.random.default_rng((options.seed, number))
        chosen = [prompts[i] for i in rng.choice(len(prompts), options.prompts_per_update, False)]
        sampler.update_base(params)
        samples = sampler.sample(
            chosen,
            n=options.group,
            max_new_tokens=options.max_new_tokens,
            seed=options.seed * 100_003 + number,
        )
        sampled = time.perf_counter()

        decode = models.tokenizer.decode
        texts = [decode(ids[mask]) for ids, mask in zip(samples.tokens, samples.mask, strict=True)]
        rewards = np.array(
            [reward(chosen[i // options.group], text) for i, text in enumerate(texts)], np.float32
        ).reshape(-1, options.group)
        spread = rewards.std(axis=1, keepdims=True)
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (spread + 1e-4)
        batch = as_batch(samples, width)
        params, state = update(params, state, batch, advantages.reshape(-1))
        jax.block_until_ready(params)

        rows.append(
            {
                "update": number + 1,
                "reward": round(float(rewards.mean()), 4),
                "tau": samples.tau,
                "tokens": int(samples.lengths.sum()),
                "rollout_seconds": round(sampled - began, 3),
                "update_seconds": round(time.perf_counter() - sampled, 3),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        # The state first, whole or not at all: what a row says of an update is then true of it.
        temporary = saved.with_suffix(".part")
        temporary.write_bytes(to_bytes((len(rows), params, state)))
        (folder / "updates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        temporary.replace(saved)
    draw(rows, f"{options.base}, draft {options.draft}", folder / "curve.png")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
