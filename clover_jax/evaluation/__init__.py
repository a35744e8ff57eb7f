"""Measure drafts against plain decoding: rows, times, figures, reports, plots."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "compare": ["compare_reports"],
        "options": ["DraftChoice", "Options"],
        "run": ["evaluate"],
        "tally": ["Tally"],
    },
)
