"""The wrapper that every command goes through, and the flags that several of them share."""

from clover_jax.cli.command import (
    define_common_flags,
    flag_settings,
    report,
    run,
    stop_signals_as_event,
    workdir_of,
)

__all__ = [
    "define_common_flags",
    "flag_settings",
    "report",
    "run",
    "stop_signals_as_event",
    "workdir_of",
]
