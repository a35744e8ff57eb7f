"""Render chat templates for `chat_templates.py`: a script, run as a process with hard limits.

A line of standard input is a request: {"conversations": [messages], "chat_template": text, "now":
the time that the template reads, null for the clock's, and variables of the template}. Each is
answered by a line of standard output: {"text": .., "answers": [start, end) of its {% generation %}
blocks if these are asked for}, or {"error": .., "is_refusal": whether the template itself did not
want the conversation}.
"""

import datetime
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 3  # of processor time for one conversation
LIMIT_MEGABYTES = 512
# A template adds a system prompt and markers to the messages, no more.
LIMIT_ADDED_CHARS, LIMIT_GROWTH = 1_000_000, 16
OUT_OF_MEMORY = 3  # exit status


def main() -> None:
    """Answer requests until standard input ends."""
    # Imported before the limits: the memory of these libraries is not the template's.
    import jinja2
    from transformers.utils import chat_template_utils

    # The name by which its strftime_now reads the time.
    clock = vars(chat_template_utils)["datetime"] = _Clock()
    refusals = (jinja2.TemplateError, jinja2.UndefinedError)
    # Other systems do not enforce the limit; the time still bounds what can be filled there.
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        # In addition to what the process has already.
        limit = pages * resource.getpagesize() + (LIMIT_MEGABYTES << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    for line in sys.stdin:
        # The signal has no handler, so it ends the process, whatever C function it is in.
        signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
        try:
            reply: dict[str, Any]
            request = json.loads(line)
            clock.frozen = request.pop("now", None)
            texts, answers = map(list, chat_template_utils.render_jinja_template(**request))
            reply = {"text": _checked(texts[0], line), "answers": answers[0] if answers else None}
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:  # whatever a template may raise is said of its row
            text = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
            reply = {"error": " ".join(text.split())[:300], "is_refusal": type(error) in refusals}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


class _Clock:
    """The time as templates read it: frozen, an ISO time, or the clock's where that is None."""

    frozen: str | None = None

    def now(self) -> datetime.datetime:
        if self.frozen is None:
            return datetime.datetime.now()
        return datetime.datetime.fromisoformat(self.frozen)


def _checked(text: str, request: str) -> str:
    most = LIMIT_ADDED_CHARS + LIMIT_GROWTH * len(request)
    if len(text) > most:
        raise ValueError(f"it makes a text of {len(text)} characters; {most} are the limit here")
    return text


if __name__ == "__main__":
    main()
