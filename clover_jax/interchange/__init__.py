"""Draft heads on disk: native draft directories and the layouts of other programs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "card": ["Card", "read_card"],
        "directory": ["Draft", "load_draft", "save_draft"],
        "layout": ["Layout"],
        "layouts": ["LAYOUTS", "layout_for", "recognise"],
        "stored_head": ["StoredHead", "open_head"],
        "write_head": ["write_foreign", "write_native"],
    },
)
