"""Time the parts of a step as the engine runs them, alternating."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "loops": ["draft_loop", "step_loop", "verify_loop"],
        "parts": ["Bench", "Part", "chunk_run", "stage_parts", "step_part"],
        "turns": ["Run", "time_in_turns"],
    },
)
