"""From prompt rows to output rows: turns, stop strings, totals, text on a terminal."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "answer_text": ["AnswerText", "StopCut", "find_stop"],
        "options": ["GenerateOptions"],
        "row_state": ["RowState", "Turn", "TurnProgress"],
        "row_stream": ["RowEvent", "RowStream", "open_stream"],
        "row_totals": ["RowTotals"],
        "settings": ["GenerationSettings", "sampling_for"],
    },
)
