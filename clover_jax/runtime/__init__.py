"""The process and its machine: processes, device memory, dtypes, progress, compile times."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "compilation_cache": ["use_compilation_cache"],
        "compile_clock": ["CompileClock"],
        "device_memory": ["advise_on_memory", "keep_freed_memory"],
        "distributed": [
            "from_primary",
            "is_primary",
            "joined_processes",
            "primary_speaks",
            "process_count",
            "to_host",
            "wait_for_all",
        ],
        "dtypes": ["exact_matmuls", "resolve_dtype"],
        "progress": ["Progress", "passing_note", "progress_bar", "say"],
        "provenance": ["git_revision", "versions"],
    },
)
