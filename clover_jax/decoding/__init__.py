"""Decoding: trees, the one step and its stages, and the engine with its continuous batching."""

import lazy_loader

# Lazy: commands define flags from `sampling_config` alone, before JAX is loaded.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "adaptive_tree": ["AdaptiveTree"],
        "engine": ["Engine"],
        "requests": ["Generation", "Request", "RowUpdate"],
        "sampling_config": ["GREEDY", "SamplingConfig", "Warping"],
        "step": ["StepConfig", "Weights", "speculate_and_verify", "weights_for"],
        "tree": ["TokenTree", "TreeConfig", "parse_tree"],
    },
)
