"""Train a draft head for a frozen base by distillation.

    python -m clover_jax.train --drafter=clover2 --data=builtin:python --steps=400 --workdir=runs/a

Training data (--data): text files, folders or globs of them, .jsonl (also .gz, .xz) with rows of
prompt and response, messages, text, or the prompt_ids and output_ids that `generate --output`
writes; a folder that `prepare` made; builtin:python is the Python standard library of this machine.

The workdir holds metrics.jsonl, eval.jsonl, tensorboard/, checkpoints/, draft/ (the last step) and
best/ (the best by measured tau, since the prompts, tree or tokens to measure with last changed).
The same command goes on where it was stopped; a finished workdir says so. SIGTERM or Ctrl-C saves a
checkpoint after the current step; the status is then 0 and the result says "finished": false; a
second Ctrl-C stops at once. Several processes work as one where the environment says so
(launch/local_processes); the mesh is then over the devices of all. Status 2: a mistake in what was
given, or a loss that is not finite; 3: another process of the run has gone away.
"""

import dataclasses
import os
import sys

from absl import flags as absl_flags

from clover_jax import cli
from clover_jax.cli.command_flags import define_template_flag
from clover_jax.errors import UserError


def define_flags(flags: absl_flags.FlagValues) -> None:
    """Define the flags of `train`."""
    cli.define_common_flags(flags)

    def text(name, default, meaning):
        absl_flags.DEFINE_string(name, default, meaning, flag_values=flags)

    def whole(name, default, meaning, least=0):
        absl_flags.DEFINE_integer(name, default, meaning, lower_bound=least, flag_values=flags)

    def number(name, default, meaning, least=0.0):
        absl_flags.DEFINE_float(name, default, meaning, lower_bound=least, flag_values=flags)

    text("drafter", "clover2", "the kind of draft head")
    text("data", "builtin:python", "training data: paths or globs, comma-separated")
    absl_flags.DEFINE_enum(
        "teacher",
        "online",
        ["online", "cached"],
        "where the base's activations come from: online runs it in every step, cached reads what "
        "`prepare --features` has put into --data",
        flag_values=flags,
    )
    define_template_flag(flags)
    whole("steps", 1000, "optimiser steps", least=1)
    whole("batch_size", 8, "rows of a batch", least=1)
    whole("seq_len", 512, "tokens of a row; documents are packed into rows", least=2)
    whole(
        "gradient_accumulation_steps",
        1,
        "parts of a batch, one after another, whose gradients are summed: less memory, same values",
        least=1,
    )
    absl_flags.DEFINE_bool(
        "remat",
        False,
        "compute the attention's scores of the head's layers again for the gradient: less memory, "
        "same values",
        flag_values=flags,
    )
    number("learning_rate", 1e-3, "peak learning rate; it falls to 0 at the last step")
    whole("warmup_steps", 100, "steps over which the rate rises to its peak")
    absl_flags.DEFINE_enum(
        "schedule", "linear", ["linear", "cosine"], "how the rate falls", flag_values=flags
    )
    number("adam_b2", 0.95, "AdamW's decay of squared gradients")
    number("weight_decay", 0.01, "AdamW's weight decay")
    number("clip_value", 0.5, "gradient values are clipped to this; 0: never")
    text(
        "drafter_options",
        None,
        "what this kind of head can be told, as name=value,...; an unknown name lists them",
    )
    whole("num_positions", None, "draft positions to train [the method's]", least=1)
    whole("num_augmenting_layers", None, "layers of the Augmenting Block [the method's]")
    number("draft_rope_theta", None, "rotary base of the head [the base model's]", least=1.0)
    whole(
        "draft_vocab",
        None,
        "tokens that the head can propose, the most frequent of the data [the base's vocabulary]",
        least=1,
    )
    number("regression_weight", None, "weight of the regression loss [the method's]")
    number("soft_ce_weight", None, "weight of the cross-entropy to the base [the method's]")
    number("hard_ce_weight", None, "weight of the cross-entropy to the text [the method's]")
    number(
        "total_variation_weight",
        None,
        "weight of the share of drawn drafts that the base would refuse [the method's]",
    )
    number("position_decay", None, "position i weighs this to the power of i [the method's]")
    absl_flags.DEFINE_bool(
        "label_mask",
        False,
        "leave out of the loss what the base's own choice would not have reached",
        flag_values=flags,
    )
    whole("loss_chunk", 512, "positions whose logits exist at a time", least=1)
    whole("log_every", 10, "steps between rows of metrics.jsonl", least=1)
    whole("checkpoint_every", 500, "steps between checkpoints; 0: only at the end")
    whole("eval_every", 0, "steps between measurements by decoding; 0: none, not even at the end")
    text("eval_prompts", None, "prompts to decode [the base's own, else from held-out data]")
    whole("eval_num_prompts", 16, "prompts to decode at most", least=1)
    whole("eval_max_new_tokens", 64, "tokens to decode for each prompt", least=2)
    text(
        "tree",
        None,
        "the token tree to decode with; recorded in the draft [paper25, or clover4 where the head "
        "is too shallow for it]",
    )
    absl_flags.DEFINE_boolean(
        "dry_run",
        False,
        "print what the run would take (params, memory of a device, FLOPs, time) and end; --mesh "
        "may then have more devices than there are",
        flag_values=flags,
    )
    text(
        "target",
        None,
        "hardware for --dry_run, such as tpu-v5e:4x4 or gpu-h200; where its compiler is installed, "
        "the step is compiled for it [this machine]",
    )
    text("program", None, "file for the compiled program's text, with --target")


def main(flags: absl_flags.FlagValues) -> int:
    """Train and report."""
    from clover_jax.training.settings import TrainSettings

    names = [field.name for field in dataclasses.fields(TrainSettings)]
    settings = TrainSettings(**{name: flags[name].value for name in names})
    if flags.program and not flags.target:
        raise UserError(
            f"--program={flags.program} is for --dry_run with --target, which is missing"
        )
    if flags.dry_run:
        return _dry_run(settings, flags)
    if flags.target:
        raise UserError(f"--target={flags.target} is for --dry_run; a run takes what is here")
    from clover_jax import api
    from clover_jax.runtime.distributed import is_primary, joined_processes

    workdir = cli.workdir_of(flags, "train")
    with joined_processes(), cli.stop_signals_as_event() as stop:
        report = api.train(workdir, stop=stop, mesh=flags.mesh, **vars(settings))
        if is_primary():
            print(_summary(report))
            cli.report(report)
    return 0


def _dry_run(settings, flags: absl_flags.FlagValues) -> int:
    """Print what a run would take; raises UserError where it cannot fit."""
    from clover_jax.xla.targets import parse_target, prepare_environment

    target = parse_target(flags.target) if flags.target else None
    if target is not None:
        prepare_environment(target, os.environ)  # before JAX is imported
    from clover_jax.benchmark.dry_run import dry_run, dry_run_compiled

    found = dry_run(settings, flags.mesh, target)
    print("\n".join(found.lines()), flush=True)
    compiled = dry_run_compiled(settings, found, target, flags.program) if target else None
    if compiled is None:
        found.check_memory()
    else:
        print("\n".join(compiled.lines()))
        compiled.check_memory()
    cli.report(found.to_row() | {"compiled": compiled and compiled.to_row()})
    return 0


def _summary(report: dict) -> str:
    where = report["workdir"]
    if report.get("already_finished"):
        return f"{where} has finished its {report['steps']} steps; the draft is {report['draft']}"
    if not report["finished"]:
        return f"stopped at step {report['steps']}; the same command goes on from there"
    measured = ""
    if "tau" in report:
        equal = f"{report['equal']} of {report['prompts']} outputs equal to plain decoding"
        measured = f", tau {report['tau']:.2f} at best, {equal}"
    return f"trained {report['steps']} steps{measured}; the draft is {report['draft']}"


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
