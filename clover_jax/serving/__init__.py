"""The server: OpenAI's API over HTTP, with many clients on one engine."""

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
