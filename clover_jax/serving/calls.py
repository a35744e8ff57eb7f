"""The parts of an answer: what was thought, what is said, and the calls of tools.

A base writes calls and thinking into its text, between marks that its chat template has too. No
package that is maintained and light has their parsers: vLLM's and SGLang's come with torch,
`openai-harmony` loads its vocabulary from the network, and `transformers` parses whole answers by
a schema that few tokenizers have.

`Incoming` has the text, `Parts` what was read from it. Each notation of calls has a reader of its
own, `FORMATS` names those of a family of models, and `Splitter` reads the text around calls.
"""

from __future__ import annotations

import functools
import json
import re
import uuid
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from clover_jax.data.detokenization import settled_length

T = TypeVar("T")
# It yields where it needs more of the text, and returns what its docstring says.
Reading = Generator[None, None, T]
Kind = Literal["reasoning", "content"]


class Incoming:
    """The text of an answer that is not read yet, while more of it comes.

    left: what has come; append to it. is_over: whether it is all.
    """

    def __init__(self) -> None:
        self.left, self.is_over = "", False

    def put_back(self, text: str) -> None:
        """Put text back, which is then read next."""
        self.left = text + self.left

    def take(self, length: int) -> str:
        """Read so many characters and return them."""
        taken, self.left = self.left[:length], self.left[length:]
        return taken

    def more(self) -> Reading[bool]:
        """Wait for more text; return False at the end."""
        if not self.is_over:
            yield
            return True
        return False

    def match(self, options: Sequence[str]) -> Reading[str | None]:
        """Read one of these after white space and return it; None where none is next."""
        while True:
            text = self.left.lstrip()
            found = next((one for one in options if text.startswith(one)), None)
            if found is not None:
                self.take(len(self.left) - len(text) + len(found))
                return found
            # It may be the beginning of one.
            if not any(one.startswith(text) for one in options) or not (yield from self.more()):
                return None

    def pass_until(self, use: Callable[[str], None], marks: Sequence[str]) -> Reading[str | None]:
        """Use the text up to a mark, read the mark and return it; None at the end of the text."""
        while True:
            found = [(at, mark) for mark in marks if (at := self.left.find(mark)) >= 0]
            if found:
                at, mark = min(found)
                use(self.take(at))
                return self.take(len(mark))
            use(self.take(settled_length(self.left, marks)))
            if not (yield from self.more()):
                use(self.take(len(self.left)))
                return None

    def read_until(self, marks: Sequence[str]) -> Reading[tuple[str, str | None]]:
        """Read up to a mark and return the text before it, and the mark as `pass_until` does."""
        pieces: list[str] = []
        mark = yield from self.pass_until(pieces.append, marks)
        return "".join(pieces), mark


class Part(NamedTuple):
    """A new piece of an answer. A call's first piece has its id and name, later ones arguments."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    call: int = 0
    id: str | None = None
    name: str | None = None


class Parts:
    """The parts of an answer that are settled, and the white space that is not.

    has_tools: whether there may be calls. functions: the types of their parameters, by name.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], most_calls: int | None):
        self.has_tools = bool(tools)
        self.functions = {
            name: _types(one.get("parameters"))
            for one in (tool.get("function", tool) for tool in tools)
            if isinstance(one, dict) and isinstance(name := one.get("name"), str)
        }
        self._most_calls, self.num_calls = most_calls, 0
        self._new: list[Part] = []
        # White space waits for what follows it. Where a part begins, but not the answer, it goes.
        self._space, self._trims, self._kind = "", False, "content"

    def take(self) -> list[Part]:
        """Return the parts since the last time."""
        new, self._new = self._new, []
        return new

    def end(self) -> None:
        """Add the white space that ends the answer."""
        if self._space and self._kind == "content":
            self._new.append(Part("content", self._space))
        self._space = ""

    def say(self, kind: Kind, text: str) -> None:
        """Add a piece of what is thought or said."""
        text = self._space + text
        if self._trims:
            text = text.lstrip()
        said = text.rstrip()
        self._space, self._kind = text[len(said) :], kind
        if said:
            self._trims = False
            self._new.append(Part(kind, said))

    def begin_part(self, kind: Kind = "content", space: str = "") -> None:
        """Leave out white space up to what is said next; space: stands there instead."""
        self._space, self._trims, self._kind = space, not space, kind

    def begin_call(self, name: str, id_: str | None = None) -> None:
        """Add a call; id_: the model's own, if any."""
        self.begin_part()
        # Mistral's templates want nine letters and digits; others take any id.
        self._add(Part("call", "", self.num_calls, id_ or uuid.uuid4().hex[:9], name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Add a piece of the last call's arguments."""
        if text:
            self._add(Part("call", text, self.num_calls - 1))

    def _add(self, part: Part) -> None:
        if self._most_calls is None or part.call < self._most_calls:
            self._new.append(part)


# Reads what follows a mark, and returns whether it is a call. If not, nothing is read.
Reader = Callable[[Incoming, Parts], Reading[bool]]

# Up to the arguments of a call whose name comes first, as templates write it.
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def read_json(text: Incoming, parts: Parts, known: Container[str] | None = None) -> Reading[bool]:
    """Read {"name": .., "arguments": {..}}, a list of such calls, or several one after the other.

    known: names of functions; None for any.
    """
    opened = (yield from text.match(["["])) or ""
    if not (yield from _read_object(text, parts, known)):
        text.put_back(opened)
        return False
    # Calls follow one another after commas, semicolons or white space.
    while separator := (yield from text.match([",", ";", "{"])):
        left = separator if separator == "{" else ""
        text.put_back(left)
        if not (yield from _read_object(text, parts, known)):
            text.put_back(separator.removeprefix(left))
            break
    if opened:
        yield from text.match(["]"])
    return True


def _read_object(text: Incoming, parts: Parts, known: Container[str] | None) -> Reading[bool]:
    """Read one object that names a function; return whether it does."""
    # Where keys come in another order, only the whole object says which call it is.
    brackets = _Brackets()
    while not (head := _HEAD.match(text.left)) and not (end := brackets.end_in(text.left)):
        if not "{".startswith(text.left.lstrip()[:1]) or not (yield from text.more()):
            return False
    written = head[0] if head else text.left[:end]
    call = {"name": _from_json(head[1])} if head else _from_json(written)
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]  # as OpenAI's API writes calls
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or (known is not None and name not in known):
        return False

    text.take(len(written))
    parts.begin_call(name)
    if not head:
        given = call.get("arguments", call.get("parameters"))
        parts.add_arguments(given if isinstance(given, str) else _as_json(given or {}))
        return True
    yield from _pass_object(text, parts.add_arguments)
    # After other keys, which say nothing more, the object ends.
    if (yield from text.match(["}", ","])) == ",":
        yield from _pass_object(text, lambda _: None, depth=1)
    return True


def _pass_object(text: Incoming, use: Callable[[str], None], depth: int = 0) -> Reading[None]:
    """Use an object as it comes; depth: its brackets that were read before."""
    brackets = _Brackets(depth)
    while (end := brackets.end_in(text.left)) is None:
        use(text.take(len(text.left)))
        brackets.num_read = 0
        if not (yield from text.more()):
            return
    use(text.take(end))


_FUNCTION, _PARAMETER = "<function=", "<parameter="
_XML_HEAD = re.compile(rf"\s*{_FUNCTION}([^\s<>]+)\s*>")
_XML_SO_FAR = re.compile(rf"{_FUNCTION}[^\s<>]*\s*")


def read_xml(text: Incoming, parts: Parts) -> Reading[bool]:
    """Read <function=NAME><parameter=KEY>VALUE</parameter></function>, as Qwen3-Coder writes it."""
    while not (head := _XML_HEAD.match(text.left)):
        so_far = text.left.lstrip()
        may_come = _FUNCTION.startswith(so_far) or _XML_SO_FAR.fullmatch(so_far)
        if not may_come or not (yield from text.more()):
            return False
    text.take(head.end())
    parts.begin_call(head[1])

    types, before = parts.functions.get(head[1], {}), "{"
    while (yield from text.match([_PARAMETER, "</function>"])) == _PARAMETER:
        key = (yield from text.read_until([">"]))[0].strip()
        value, end = yield from text.read_until(["</parameter>", _PARAMETER, "</function>"])
        # Some models leave the closing tag out.
        text.put_back("" if end in (None, "</parameter>") else end)
        # The newlines next to the tags are not the value's.
        value = value.removeprefix("\n").removesuffix("\n")
        written = _as_json(_typed(value, types.get(key, frozenset())) if end else value)
        # Where the text ends within a value, so do the arguments.
        parts.add_arguments(f"{before}{_as_json(key)}: {written if end else written[:-1]}")
        if end is None:
            return True
        before = ", "
    parts.add_arguments("{}" if before == "{" else "}")
    return True


_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]([\w-]+))?\s*(?:\[ARGS\])?\s*(?=\{)")


def read_named(text: Incoming, parts: Parts) -> Reading[bool]:
    """Read NAME[CALL_ID]ID[ARGS]{..}, with or without the marks, as newer Mistrals write it."""
    while not (head := _NAMED.match(text.left)):
        if not re.fullmatch(r"[\w.\-\s\[\]]*", text.left) or not (yield from text.more()):
            return False
    text.take(head.end())
    parts.begin_call(head[1], head[2])
    yield from _pass_object(text, parts.add_arguments)
    return True


_GEMMA_BEGINS = ("<|tool_call>", "<start_function_call>")
_GEMMA_ENDS = ("<tool_call|>", "<end_function_call>")


def read_gemma(text: Incoming, parts: Parts) -> Reading[bool]:
    """Read call:NAME{key:<|"|>text<|"|>,key:1}; FunctionGemma has <escape> for quotes."""
    # Only all of it can be turned into JSON.
    written, end = yield from text.read_until(_GEMMA_ENDS)
    text.put_back(end or "")
    call = re.fullmatch(r"\s*call:([\w.-]+)(\{.*\})\s*", written, re.DOTALL)
    arguments = _from_gemma(call[2]) if call else None
    if call is None or not isinstance(arguments, dict):
        text.put_back(written)
        return False
    parts.begin_call(call[1])
    parts.add_arguments(_as_json(arguments))
    return True


_HARMONY_BEGINS = ("<|start|>", "<|channel|>")
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")


def read_harmony(text: Incoming, parts: Parts) -> Reading[None]:
    """Read an answer of messages, each with its channel and perhaps the tool that it goes to.

    Example: <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>
    """
    begins, ends = (*_HARMONY_BEGINS, "to="), (*_HARMONY_ENDS, *_HARMONY_BEGINS)
    mark: str | None = ""
    seen = set[str]()
    parts.begin_part()
    while mark is not None:
        mark = mark if mark in begins else (yield from text.match(begins))
        if mark is None and not text.left.strip():
            return
        # A message without a head is text, and so is a head without a message.
        text.put_back(mark or "")
        head, begun = (yield from text.read_until(["<|message|>"])) if mark else ("", "")
        if begun is None:
            parts.say("content", head)
            return

        channel = re.search(r"<\|channel\|>\s*(\w+)", head)
        goes_to = re.search(r"to=(?:functions\.)?([^\s<]+)", head)
        if parts.has_tools and goes_to:
            parts.begin_call(goes_to[1])
            use: Callable[[str], None] = parts.add_arguments
        else:
            kind: Kind = "reasoning" if channel and channel[1] == "analysis" else "content"
            # Messages of one kind are one text, on lines of their own.
            parts.begin_part(kind, "\n" if kind in seen else "")
            seen.add(kind)
            use = functools.partial(parts.say, kind)
        mark = yield from text.pass_until(use, ends)


class Format(NamedTuple):
    """How a family of models writes calls.

    begins: marks before a call, or before a list of calls. ends: marks after it, left out.
    told_by: words of which a chat template of the family has one. others: marks within a call.
    reader: reads the family's own notation after a mark, where it is neither JSON nor XML.
    answer_reader: reads whole answers, where text and thinking have marks of the format too.
    is_bare: whether an answer may also begin with the JSON of a call, without a mark.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    told_by: tuple[str, ...]
    others: tuple[str, ...] = ()
    reader: Reader | None = None
    answer_reader: Callable[[Incoming, Parts], Reading[None]] | None = None
    is_bare: bool = False


# The first whose word a chat template has; some have marks of others within them.
FORMATS = {
    "harmony": Format(
        _HARMONY_BEGINS,
        _HARMONY_ENDS,
        ("<|channel|>",),
        ("<|message|>", "<|constrain|>"),
        answer_reader=read_harmony,
    ),
    # [TOOL_CALLS][{..}, ..] or [TOOL_CALLS]NAME[ARGS]{..}, one by one
    "mistral": Format(
        ("[TOOL_CALLS]",), (), ("[TOOL_CALLS]",), ("[CALL_ID]", "[ARGS]"), read_named
    ),
    # <|tool_call>call:NAME{..}<tool_call|>
    "gemma": Format(_GEMMA_BEGINS, _GEMMA_ENDS, _GEMMA_BEGINS, ('<|"|>', "<escape>"), read_gemma),
    # <tool_call>{..}</tool_call>, also Qwen's; and Qwen3-Coder's, with or without its first mark
    "hermes": Format(("<tool_call>", _FUNCTION), ("</tool_call>",), ("<tool_call>", _FUNCTION)),
    # <|tool_call|>[{..}]<|/tool_call|> or functools[{..}]; Granite too
    "phi": Format(
        ("<|tool_call|>", "functools["),
        ("<|/tool_call|>",),
        ("<|tool_call|>", "<|tool|>", "functools["),
    ),
    # {"name": .., "parameters": {..}}, perhaps after <|python_tag|>, several with semicolons
    "llama": Format(
        ("<|python_tag|>",), (), ("<|python_tag|>", "Environment: ipython"), is_bare=True
    ),
}
# Notations that may follow the marks of any format, by what they begin with.
_COMMON: dict[str, Reader] = {"{": read_json, "[": read_json, "<": read_xml}
# Marks that are a part of what they begin.
_BEGINS_WITH = {_FUNCTION: _FUNCTION, "functools[": "["}
_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))


class Style(NamedTuple):
    """How a base writes what is not plain text.

    calls: the name of a format; None for none. thinking: the marks around what it thinks.
    """

    calls: str | None = None
    thinking: tuple[str, str] | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, which may be special tokens."""
        form = FORMATS[self.calls] if self.calls else Format((), (), ())
        return (*form.begins, *form.ends, *form.others, *(self.thinking or ()))


def style_of(template: str, wanted: str = "auto") -> Style:
    """Return how a base with this chat template writes.

    wanted: the name of a format instead of the one that the template tells; "none": plain text.
    """
    if wanted == "none":
        return Style()
    told = (name for name, one in FORMATS.items() if any(word in template for word in one.told_by))
    thinking = next((marks for marks in _THINKING if marks[1] in template), None)
    return Style(next(told, None) if wanted == "auto" else wanted, thinking)


class Splitter:
    """Split one answer into its parts, however its text is cut into pieces.

    A call is known by its name and the beginning of its arguments; what does not get so far stays
    text. Arguments are what the model wrote, JSON or not. White space next to calls and thinking
    is the template's, and is left out.

    Example, with Style("hermes") and a tool:

        splitter.push('Yes.\\n<tool_call>{"name": "f", "arg')  # the content "Yes."
        splitter.push('uments": {"a": 1}}</tool_call>')  # a call of f, and its '{"a": 1}'
        splitter.end()  # nothing was held back
    """

    def __init__(
        self,
        style: Style,
        tools: Sequence[Mapping[str, Any]] = (),
        is_thinking: bool = False,
        most_calls: int | None = None,
    ):
        """Begin an answer.

        tools: as the request has them; without any, calls stay text.
        is_thinking: whether the prompt has opened the thinking.
        most_calls: leave out further calls; None keeps all.
        """
        self._text, self._parts = Incoming(), Parts(tools, most_calls)
        form = FORMATS[style.calls] if style.calls else None
        if form and form.answer_reader:
            self._work = form.answer_reader(self._text, self._parts)
        else:
            self._work = self._answer(form if tools else None, style, is_thinking)
        next(self._work)

    @property
    def num_calls(self) -> int:
        """How many calls have begun, with those that are left out."""
        return self._parts.num_calls

    def push(self, text: str) -> list[Part]:
        """Return what a further piece of text settles."""
        self._text.left += text
        next(self._work, None)
        return self._parts.take()

    def end(self) -> list[Part]:
        """Return what was held back, at the end of the text."""
        self._text.is_over = True
        next(self._work, None)
        self._parts.end()
        return self._parts.take()

    def _answer(self, form: Format | None, style: Style, is_thinking: bool) -> Reading[None]:
        """Read thinking at the beginning, then text and calls."""
        text, parts = self._text, self._parts
        if style.thinking is not None:
            opened, closed = style.thinking
            if is_thinking or (yield from text.match([opened])):
                parts.begin_part()
                yield from text.pass_until(functools.partial(parts.say, "reasoning"), [closed])
                parts.begin_part()
        if form is not None and form.is_bare:
            # A base may also answer in JSON: only a tool's name tells a call.
            yield from read_json(text, parts, known=parts.functions)

        say = functools.partial(parts.say, "content")
        while mark := (yield from text.pass_until(say, form.begins if form else ())):
            if form is None or not (yield from self._call(form, mark)):
                say(mark)

    def _call(self, form: Format, mark: str) -> Reading[bool]:
        """Read what follows a mark; return whether it is a call. If not, nothing is read."""
        text, begins_with = self._text, _BEGINS_WITH.get(mark, "")
        text.put_back(begins_with)
        while not text.left.strip() and (yield from text.more()):
            pass
        reader = _COMMON.get(text.left.lstrip()[:1], form.reader)
        if reader and (yield from reader(text, self._parts)):
            yield from text.match(form.ends)
            return True
        text.take(len(begins_with))
        return False


class _Brackets:
    """Find the end of a JSON object or list in a text that grows.

    depth: brackets that are open already. num_read: characters of the text that were looked at.
    """

    def __init__(self, depth: int = 0):
        self.depth, self.num_read = depth, 0
        self._in_string = self._is_escaped = False

    def end_in(self, text: str) -> int | None:
        """Return the position after the last bracket; None where it has not come yet."""
        for at in range(self.num_read, len(text)):
            letter = text[at]
            # Brackets in a string are its text.
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = letter == "\\", letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return at + 1
        self.num_read = len(text)
        return None


def _from_json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)  # models write newlines into strings
    except (ValueError, RecursionError):
        return None


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _from_gemma(text: str) -> Any:
    """Return the value of Gemma's notation: JSON but for bare keys and its own quotes."""
    # Texts stand between two quotes: every second part is one.
    parts = re.split(r'<\|"\|>|<escape>', text)
    parts[1::2] = map(_as_json, parts[1::2])
    if len(parts) > 1 or _from_json(text) is None:
        bare = r"([{,]\s*)([\w.$-]+)\s*:"
        parts[::2] = [re.sub(bare, r'\1"\2":', part) for part in parts[::2]]
    return _from_json("".join(parts))


def _types(schema: Any) -> dict[str, frozenset[str]]:
    """Return the names of the types that each property of a JSON schema may have."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    types = {}
    for key, one in properties.items() if isinstance(properties, dict) else ():
        choices = [one, *(one.get("anyOf") or ())] if isinstance(one, dict) else []
        named = [choice.get("type") for choice in choices if isinstance(choice, dict)]
        listed = [type_ for each in named for type_ in (each if isinstance(each, list) else [each])]
        types[key] = frozenset(type_ for type_ in listed if isinstance(type_, str))
    return types


def _typed(text: str, types: frozenset[str]) -> Any:
    """Return the value of a parameter that was written without quotes."""
    if text.strip() == "null" and "null" in types:
        return None
    if not types or "string" in types:
        return text
    value = _from_json(text.lower() if "boolean" in types else text)
    return text if value is None else value
