"""Chat templates: which one is in use, and the text that it makes of a conversation.

A template is a program that comes with a model, from anybody. A process with limits renders it
(`template_worker.py`), so it takes neither this process's memory nor its time.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import datetime
import functools
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import clover_jax
from clover_jax.data import template_worker
from clover_jax.data.forms import content_text
from clover_jax.data.prompts import BadPrompt, Prompt
from clover_jax.data.records import LABELS, Conversation, Message, Record, Text, is_text, shown
from clover_jax.errors import UserError
from clover_jax.runtime.files import read_json_object
from clover_jax.runtime.progress import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = Path(clover_jax.__file__).parent / "assets" / "templates"
# Exit status of the rendering process -> the limit that ended it.
_ENDINGS: dict[int | None, str] = {
    -signal.SIGPROF: f"takes more than {template_worker.LIMIT_SECONDS} s of processor time",
    template_worker.OUT_OF_MEMORY: f"takes more than {template_worker.LIMIT_MEGABYTES} MB",
}
# What texts begin with that chat templates have rendered.
_FOREIGN_MARK = re.compile(
    r"<s>|<bos>|<\|(begin_of_text|im_start|startoftext|bos|start_header_id|system|user)\|>|\[INST\]"
)
# transformers gives a template what was thought under each of these names.
_THINKING = {"reasoning", "reasoning_content", "thinking"}


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
    elif tokenizer is not None:
        _tell_two_templates(Path(tokenizer.name_or_path))
    # Tried once here: a template that breaks the limits would fail row by row.
    if tokenizer is not None and tokenizer.chat_template is not None:
        # A template may refuse this conversation, for want of a system's message perhaps.
        with contextlib.suppress(_Refusal):
            trial = [{"role": "user", "content": "Hello"}]
            source = f"--chat_template={name}" if name else "--base"
            RowTemplate(tokenizer, source).render(trial, True)
    return tokenizer


CLOCK = "template_time"  # in what a run records of its identity


def _tell_two_templates(directory: Path) -> None:
    """Say which of two chat templates in a tokenizer's folder is used, where they differ."""
    file, settings = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if not file.is_file() or not settings.is_file():
        return
    other = read_json_object(settings).get("chat_template")
    if other and other != file.read_text(encoding="utf-8"):
        say(f"{settings} has another chat_template than {file.name}, which is used")


@contextlib.contextmanager
def frozen_clock(*recorded: Path) -> Iterator[None]:
    """Let chat templates read one time meanwhile: an earlier run's, or that of the beginning.

    Some write today's date, and a run that goes on the next day must have the same samples.
    recorded: JSON files in which an earlier part of the run may have recorded its time.
    All processes of a run call it.
    """
    # Imported here: it loads JAX, which `--help` does not need.
    from clover_jax.runtime.distributed import from_primary

    def chosen() -> str:
        there = (read_json_object(path) for path in recorded if path.is_file())
        parts = (part for values in there for part in values.values() if isinstance(part, dict))
        times = (part[CLOCK] for part in parts if part.get(CLOCK))
        return next(times, None) or datetime.datetime.now().isoformat(timespec="seconds")

    before, _RENDERER.now = _RENDERER.now, from_primary(chosen)
    try:
        yield
    finally:
        _RENDERER.now = before


def clock_identity(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str]:
    """Return the frozen time under its name, nothing where the chat template reads no time."""
    if _RENDERER.now is None or tokenizer is None or "strftime_now" not in words_of(tokenizer):
        return {}
    return {CLOCK: _RENDERER.now}


def template_notice(
    rows: Iterable[Record | Prompt | BadPrompt], tokenizer: PreTrainedTokenizerBase | None
) -> str | None:
    """Return a warning for what a tokenizer and its template do not read of rows, else None."""
    if tokenizer is None:
        return None
    # Rows are records (`train`, `prepare`) or prompts (`generate`, `evaluate`).
    conversations, texts = [], []
    for row in rows:
        if isinstance(row, Conversation) or (isinstance(row, Prompt) and row.is_conversation):
            conversations.append(row)
        elif isinstance(row, Text | Prompt):
            texts.append(row.text or "")
    notices = [_foreign_marks(texts, tokenizer), _unread_keys(conversations, tokenizer)]
    roles = [
        row.messages[0]["role"]
        for row in conversations
        if isinstance(row, Conversation) and row.messages
    ]
    num_begun = roles.count("assistant") if tokenizer.chat_template is not None else 0
    if num_begun:
        notices.append(
            f"{num_begun} conversations begin with messages of the assistant, which are left out"
        )
    return "; ".join(filter(None, notices)) or None


def _foreign_marks(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a warning for texts that a template of another tokenizer has rendered."""
    marks = [found[0] for text in texts if (found := _FOREIGN_MARK.match(text))]
    foreign = [mark for mark in marks if tokenizer.tokenize(mark) != [mark]]
    if not foreign:
        return None
    return (
        f"{len(foreign)} texts begin with a mark of another tokenizer, {foreign[0]} in the first, "
        "which is read as plain text; give messages, or rendered text of this base"
    )


def _unread_keys(
    conversations: Sequence[Conversation | Prompt], tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """Return a warning for what the chat template does not read of conversations."""
    if not conversations:
        return None
    if tokenizer.chat_template is None:
        return (
            f"the model has no chat template: messages of {len(conversations)} conversations are "
            "joined with newlines and roles are lost; pass --chat_template"
        )

    counts = collections.Counter(key for row in conversations for key in _keys_in(row))
    read = words_of(tokenizer) | LABELS
    unread = sorted(counts.keys() - read, key=lambda key: (-counts[key], key))
    if not unread:
        return None
    listed = [f"{shown(key)} ({counts[key]})" for key in unread[:9]]
    listed += [f"and {len(unread) - 9} more"] if len(unread) > 9 else []
    return (
        f"the chat template does not read {', '.join(listed)}: "
        "keys of messages or rows, with their numbers; pass another --chat_template if it should"
    )


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the chat template, of all where there are several; "" without one."""
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else (template or "",)
    return "\n".join(map(str, texts))


def words_of(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the words of the chat template: it reads a key that is one of them."""
    words = set(re.findall(r"\w+", template_text(tokenizer)))
    return words | (_THINKING if words & _THINKING else set())


def _keys_in(row: Conversation | Prompt) -> Iterator[str]:
    """Yield the keys of a row that a template may read, other than role and content."""
    yield from row.variables
    turns = (turn for turn in getattr(row, "turns", None) or () if not isinstance(turn, str))
    for message in (*(row.messages or ()), *itertools.chain.from_iterable(turns)):
        yield from message.keys() - {"role", "content"}
        if isinstance(message.get("content"), list):
            yield from {key for part in message["content"] for key in part} - {"type", "text"}


class RowTemplate(NamedTuple):
    """The chat template of a tokenizer, for the conversation of one row.

    source: the row's place, for messages to the user.
    variables: what else the template may read, tools for example.

    Methods raise UserError, naming `source`, for what cannot be rendered within the limits. Their
    `ask` is whether a text ends where the assistant's next answer begins.
    """

    tokenizer: PreTrainedTokenizerBase
    source: str
    variables: Mapping[str, Any] = {}

    def render(self, messages: Sequence[Message], ask: bool) -> str:
        """Return the template's text of a conversation."""
        return self._reply(messages, ask)["text"]

    def marked_answers(
        self, messages: Sequence[Message]
    ) -> tuple[str, list[tuple[int, int]]] | None:
        """Return the text, and the spans of it within {% generation %} blocks; None without."""
        if not re.search(r"\{%-?\s*generation\s*-?%\}", self._text()):
            return None
        reply = self._reply(messages, False, with_answers=True)
        return reply["text"], [(start, end) for start, end in reply["answers"]]

    def check(self, messages: Sequence[Message], text: str, ask: bool) -> None:
        """Raise UserError where a text leaves out a message that is not the assistant's.

        Templates skip roles that they do not know without a word.
        """
        for index, message in enumerate(messages):
            content = content_text(message).strip()
            # A template may rewrite what a tool says: then the text changes with it.
            if message["role"] == "assistant" or not content or content in text:
                continue
            others = [*messages[:index], *messages[index + 1 :]]
            try:
                is_lost = self.render(others, ask) == text
            except _Refusal:
                is_lost = False
            if is_lost:
                raise UserError(
                    f"{self.source}: the base's chat template leaves out message {index}, of the "
                    f"role {shown(message['role'])}; give another --chat_template, or leave it out"
                )

    def _reply(
        self, messages: Sequence[Message], ask: bool, with_answers: bool = False
    ) -> dict[str, Any]:
        """Return the reply of the rendering process: text, and perhaps spans of answers."""
        text, special = self._text(), self.tokenizer.special_tokens_map
        has_parts = any(isinstance(message.get("content"), list) for message in messages)
        # A template that prints a list as Python writes it gets one text, as servers do.
        if has_parts and not _reads_parts(text, json.dumps(special, default=str)):
            messages = [
                {**one, "content": content_text(one)}
                if isinstance(one.get("content"), list)
                else one
                for one in messages
            ]
        request = {
            **special,
            **self.variables,
            "conversations": [list(messages)],
            "chat_template": text,
            "add_generation_prompt": ask,
            "now": _RENDERER.now,
            "return_assistant_tokens_mask": with_answers,
        }
        reply = _RENDERER.render(request, self.source)
        if not is_text(reply["text"]):
            raise UserError(
                f"{self.source}: the conversation holds half a character, as \\ud83d alone is"
            )
        return reply

    def _text(self) -> str:
        """Return the text of the template that a conversation with these variables goes through."""
        # As transformers: of several templates, the one for conversations with or without tools.
        text = template = self.tokenizer.chat_template
        if isinstance(template, dict):
            has_tools = self.variables.get("tools") is not None and "tool_use" in template
            text = template.get("tool_use" if has_tools else "default")
        if not isinstance(text, str):
            raise UserError(
                f"{self.source}: the base's chat template must be a text, or several with one "
                f"named default, not {shown(template)}; give another --chat_template"
            )
        return text


@functools.lru_cache(maxsize=8)
def _reads_parts(template: str, special_tokens: str) -> bool:
    """Return whether a template makes the same text of a content and of a list of its parts."""
    parts = [{"type": "text", "text": "Hello"}]
    requests = [
        {
            **json.loads(special_tokens),
            "conversations": [[{"role": "user", "content": content}]],
            "chat_template": template,
        }
        for content in ("Hello", parts)
    ]
    with contextlib.suppress(UserError):
        of_text, of_parts = (_RENDERER.render(request, "--base")["text"] for request in requests)
        return of_text == of_parts
    return False


class _Refusal(UserError):
    """A template does not want this conversation; it may want others."""


class _Renderer:
    """The process that renders: started when it is needed, and again after its limits ended it.

    now: the time that templates read; None is the clock's.
    """

    now: str | None = None

    def __init__(self):
        self._process: subprocess.Popen[str] | None = None
        # Samples are made in a thread while the main one renders prompts.
        self._lock = threading.Lock()

    def render(self, request: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Return the reply with the text; raises UserError naming `source`."""
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
            return reply
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
