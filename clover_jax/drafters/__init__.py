"""Draft heads: the contract (`drafter.py`), and one file a method."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "clover": ["Clover", "CloverConfig"],
        "clover2": ["Clover2", "Clover2Config"],
        "clover_copy": ["CloverCopy", "CloverCopyConfig"],
        "clover_lr": ["CloverLR", "CloverLRConfig"],
        "dflash2": ["DFlash2", "DFlash2Config"],
        "drafter": ["AcceptedPositions", "Drafter", "Frozen"],
        "eagle": ["Eagle", "EagleConfig"],
        "eagle3": ["Eagle3", "Eagle3Config"],
        "medusa": ["Medusa", "MedusaConfig"],
        "registry": ["DRAFTERS", "DraftHead", "config_for_base", "head", "init_params"],
    },
)
