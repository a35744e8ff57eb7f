"""The wrapper that every command goes through, and the flags that several of them share."""

from clover_jax.cli.command import (
    HELP,
    STATUS_INTERRUPTED,
    STATUS_OK,
    STATUS_SOME_FAILED,
    STATUS_USER_ERROR,
    define_common_flags,
    flag_settings,
    report,
    run,
    stop_signals_as_event,
    workdir_of,
)

__all__ = [
    "HELP",
    "STATUS_INTERRUPTED",
    "STATUS_OK",
    "STATUS_SOME_FAILED",
    "STATUS_USER_ERROR",
    "define_common_flags",
    "flag_settings",
    "report",
    "run",
    "stop_signals_as_event",
    "workdir_of",
]
