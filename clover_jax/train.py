"""Train a draft head for a frozen base by distillation.

    python -m clover_jax.train --drafter=clover2 --data=builtin:python --steps=400 --workdir=runs/a

Training data (--data): text files, folders or globs of them; .jsonl (also compressed), Parquet or
Arrow with rows of prompt and response, messages, text, or the prompt_ids and output_ids that
`generate --output` writes; a folder that `prepare` made; builtin:python, the standard library of
this machine's Python.

The workdir holds metrics.jsonl, eval.jsonl, tensorboard/, checkpoints/, draft/ (the last step) and
best/ (the head with the highest tau; other prompts, trees or lengths to measure with begin again).
--draft=WORKDIR of other commands uses best/, or draft/ if nothing was measured. Repeat the command
to resume a stopped run; --overwrite starts again. SIGTERM or Ctrl-C saves a checkpoint after the
current step; the status is then 0 and the result has "finished": false; a second Ctrl-C stops at
once. Several processes work as one if the environment sets them up (launch/local_processes); the
mesh then spans all their devices. Status 2: a usage error, or a loss that is not finite; 3: another
process of the run died.
"""

import dataclasses
import os
import sys

from absl import flags as absl_flags

from clover_jax import cli
from clover_jax.cli.command_flags import define_settings, settings_from
from clover_jax.errors import UserError
from clover_jax.field_types import setting
from clover_jax.training.settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class DryRunSettings:
    """Whether to estimate the cost of a run instead, and for which hardware."""

    dry_run: bool = setting(
        False,
        "print the cost of the run (params, memory of a device, FLOPs, time) and end; --mesh may "
        "then have more devices than this machine",
        group="dry run",
    )
    target: str | None = setting(
        None,
        "hardware for --dry_run, such as tpu-v5e:4x4 or gpu-h200; where its compiler is installed, "
        "the step is compiled for it [this machine]",
        group="dry run",
    )

    def __post_init__(self):
        if self.target and not self.dry_run:
            raise UserError(f"--target={self.target} is for --dry_run; a run takes what is here")


def define_flags(flags: absl_flags.FlagValues) -> None:
    """Define the flags of `train`."""
    define_settings(flags, TrainSettings)
    define_settings(flags, DryRunSettings)
    cli.define_common_flags(flags)


def main(flags: absl_flags.FlagValues) -> int:
    """Train and report."""
    settings = settings_from(flags, TrainSettings)
    asked = settings_from(flags, DryRunSettings)
    # Before JAX is imported: a dry run may be for other hardware, which the environment names.
    if asked.dry_run:
        return _dry_run(settings, asked, flags.mesh)

    from clover_jax import api
    from clover_jax.runtime.distributed import is_primary, joined_processes

    workdir = cli.workdir_of(flags, "train")
    with joined_processes(), cli.stop_signals_as_event() as stop:
        report = api.train(workdir, stop=stop, mesh=flags.mesh, **vars(settings))
        if is_primary():
            print(_summary(report))
            cli.report(report)
    return 0


def _dry_run(settings: TrainSettings, asked: DryRunSettings, mesh: str | None) -> int:
    """Print what a run would take; raises UserError where it cannot fit."""
    from clover_jax.evaluation.targets import parse_target, prepare_environment

    target = parse_target(asked.target) if asked.target else None
    if target is not None:
        prepare_environment(target, os.environ)  # before JAX is imported
    from clover_jax.evaluation.dry_run import dry_run, dry_run_compiled

    estimate = dry_run(settings, mesh, target)
    print("\n".join(estimate.lines()), flush=True)

    # The compiler's account is exact, so the estimate refuses only where there is none.
    compiled = dry_run_compiled(settings, estimate, target) if target else None
    if compiled is None:
        estimate.check_memory()
    figures = {"mesh": str(estimate.mesh), "total_bytes": estimate.total_bytes}
    row = {"dry_run": True} | dataclasses.asdict(estimate) | figures
    cli.report(row | {"compiled": compiled})
    return 0


def _summary(report: dict) -> str:
    if not report["finished"]:
        return f"stopped at step {report['steps']}; repeat the command to resume"
    done = f"trained {report['steps']} steps"
    if report.get("already_finished"):
        finished = f"{report['workdir']} has finished its {report['steps']} steps"
        done = f"{finished} (--overwrite starts again)"
    if "tau" not in report:
        return f"{done}\nhead: {report['draft']}, tau not measured"

    # The best head need not be the last. --draft=WORKDIR uses the best one too.
    equal = f"{report['equal']} of {report['prompts']} outputs equal to plain decoding"
    tree = report.get("tree") or "the default tree"
    return (
        f"{done}; best at step {report['best_step']}, {equal}; last head: {report['draft']}\n"
        f"best head: {report['best']}, tau {report['tau']:.2f} (temperature 0, {tree})"
    )


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
