"""Decoding: trees, the one step and its stages, and the engine with its continuous batching."""

import lazy_loader

# Names without their modules: the flags of commands come from `sampling_config`, before JAX is
# loaded.
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
