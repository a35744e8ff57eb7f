"""The search of `--tree=auto`: time the parts of a step, choose trees, time them, keep the best."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "attention_trial": ["with_attention"],
        "auto_tree": ["with_auto_tree"],
        "calibration": ["measure_ranks"],
        "costs": ["measure_costs"],
        "tree_choice": ["Choice", "CostTable", "choose_tree"],
        "tree_trial": ["Trial", "measure_trials"],
    },
)
