"""The wrapper that every command goes through, and the flags that several of them share."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "command": [
            "HELP",
            "STATUS_INTERRUPTED",
            "STATUS_OK",
            "STATUS_SOME_FAILED",
            "STATUS_USER_ERROR",
            "report",
            "run",
            "stop_signals_as_event",
        ],
        "command_flags": ["define_common_flags", "flag_settings", "workdir_of"],
    },
)
