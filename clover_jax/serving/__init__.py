"""The server: OpenAI's API over HTTP, and what keeps one engine full for many clients."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "app": ["make_app"],
        "asks": ["Ask", "Overloaded", "TimeLimit"],
        "errors": ["ApiError"],
        "metrics": ["Metrics"],
        "options": ["ServeOptions", "ServeSpec"],
        "requests": ["read_chat", "read_completion"],
        "run": ["run"],
        "service": ["Service"],
    },
)
