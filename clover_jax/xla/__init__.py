"""Read a compiled program: bytes, time, buffers and work, also for hardware that is not here."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "buffers": ["CompiledProgram", "Temporaries", "compile_with_buffers"],
        "hlo": ["Program", "Sent"],
        "targets": ["CHIPS", "Chip", "Target", "find_devices", "parse_target"],
        "work": ["Work", "count_flops", "count_work"],
    },
)
