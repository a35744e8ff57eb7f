"""Measure a decoding step here; compile steps for other hardware; estimate a training run."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "compiled_decoding": ["CompiledStep", "compile_and_describe", "compile_step"],
        "compiled_training": ["CompiledTraining", "compile_training_step"],
        "dry_run": ["DryRun", "dry_run_compiled"],
        "measured": ["TimedStep", "measure", "measure_and_describe"],
        "sweep": ["Cell", "sweep_and_describe"],
    },
)
