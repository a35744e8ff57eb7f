"""Chat templates: which one is in use, and the text that it makes of a conversation.

A template is a program that comes with a model, from anybody. A process with limits renders it
(`template_worker.py`), so it takes neither this process's memory nor its time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import clover_jax
from clover_jax.data import template_worker
from clover_jax.data.prompts import BadPrompt, Prompt
from clover_jax.data.records import Conversation, Record, shown
from clover_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = Path(clover_jax.__file__).parent / "assets" / "templates"
# Exit status of the rendering process -> the limit that ended it.
_ENDINGS: dict[int | None, str] = {
    -signal.SIGPROF: f"takes more than {template_worker.LIMIT_SECONDS} s of processor time",
    template_worker.OUT_OF_MEMORY: f"takes more than {template_worker.LIMIT_MEGABYTES} MB",
}


def with_chat_template(
    tokenizer: PreTrainedTokenizerBase | None, name: str | None
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer with the named template: a file, or one of `assets/templates`.

    Raises UserError for a template that does not exist, cannot be read, or breaks the limits.
    """
    if name is not None:
        if tokenizer is None:
            raise UserError(
                f"--chat_template={name}: the base has no tokenizer files to use it with"
            )
        # A shipped name goes before a file of that name in the working directory.
        shipped = {path.stem: path for path in sorted(TEMPLATES.glob("*.jinja"))}
        path = shipped.get(name, Path(name).expanduser())
        if not path.is_file():
            raise UserError(
                f"--chat_template={name}: no such file, and none of {', '.join(shipped)}, which "
                "come with this program"
            )
        # Newlines at the ends of the file are the editor's, not the template's.
        tokenizer.chat_template = path.read_text(encoding="utf-8").strip("\n")
    # Tried once here: a template that breaks the limits would fail row by row.
    if tokenizer is not None and tokenizer.chat_template is not None:
        # A template may refuse this conversation, for want of a system's message perhaps.
        with contextlib.suppress(_Refusal):
            trial = [{"role": "user", "content": "Hello"}]
            render_template(tokenizer, trial, True, f"--chat_template={name}" if name else "--base")
    return tokenizer


def template_notice(
    rows: Iterable[Record | Prompt | BadPrompt], tokenizer: PreTrainedTokenizerBase | None
) -> str | None:
    """Return the warning for conversations where the base has no chat template, else None."""
    # Rows are records (`train`, `prepare`) or prompts (`generate`, `evaluate`).
    count = sum(
        isinstance(row, Conversation) or (isinstance(row, Prompt) and row.is_conversation)
        for row in rows
    )
    if not count or tokenizer is None or tokenizer.chat_template is not None:
        return None
    return (
        f"the model has no chat template: messages of {count} conversations are joined with "
        "newlines and roles are lost; pass --chat_template"
    )


def render_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    ask: bool,
    source: str,
) -> str:
    """Return the chat template's text of a conversation.

    ask: whether the text ends where the assistant's next answer begins.
    Raises UserError, naming `source`, for what cannot be rendered within the limits.
    """
    template = tokenizer.chat_template
    # As transformers: of several templates, the one for conversations without tools.
    text = template.get("default") if isinstance(template, dict) else template
    if not isinstance(text, str):
        raise UserError(
            f"{source}: the base's chat template must be a text, or several with one named "
            f"default, not {shown(template)}; give another --chat_template"
        )
    request = {
        "conversations": [list(messages)],
        "chat_template": text,
        "add_generation_prompt": ask,
        **tokenizer.special_tokens_map,
    }
    return _RENDERER.render(request, source)


class _Refusal(UserError):
    """A template does not want this conversation; it may want others."""


class _Renderer:
    """The process that renders: started when it is needed, and again after its limits ended it."""

    def __init__(self):
        self._process: subprocess.Popen[str] | None = None
        # Samples are made in a thread while the main one renders prompts.
        self._lock = threading.Lock()

    def render(self, request: Mapping[str, Any], source: str) -> str:
        """Return the text; raises UserError naming `source`."""
        with self._lock:
            # Each request gets one line: unlocked, a thread could read another thread's answer.
            line = self._answer(json.dumps(request, default=str))
            status = None if line else self._stop()

        if not line:  # a limit ended the process
            reason = _ENDINGS.get(status, f"ends its process with status {status}")
            raise UserError(
                f"{source}: the base's chat template {reason} for one conversation; give another "
                "--chat_template"
            )

        reply = json.loads(line)
        if "text" in reply:
            return reply["text"]
        raise (_Refusal if reply["is_refusal"] else UserError)(
            f"{source}: the base's chat template refuses the conversation: {reply['error']}"
        )

    def _answer(self, request: str) -> str:
        """Return the line that answers a request; "" where the process ended instead."""
        if self._process is None:
            atexit.register(self._stop)
            self._process = subprocess.Popen(
                # -P: the folder of the script holds modules of ours, not of the standard library.
                [sys.executable, "-P", template_worker.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,  # Ctrl-C is for this process, which then ends the other
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            return self._process.stdout.readline()
        except BrokenPipeError:
            return ""
        except BaseException:
            # Interrupted: the answer that is still to come belongs to no later request.
            self._process.kill()
            self._stop()
            raise

    def _stop(self) -> int | None:
        """Let the process end, and return its status."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        # The end of its input ends it; a pipe that it left already has nothing to flush.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        return process.wait()


_RENDERER = _Renderer()  # one for the whole process
