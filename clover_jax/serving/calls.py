"""The parts of an answer: what was thought, what is said, and the calls of tools.

A base writes calls and thinking into its text, between marks that its chat template has too. No
package that is maintained and light has their parsers: vLLM's and SGLang's come with torch,
`openai-harmony` loads its vocabulary from the network, and `transformers` parses whole answers by
a schema that few tokenizers have.
"""

from __future__ import annotations

import functools
import json
import re
import uuid
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from clover_jax.data.detokenization import settled_length


class Format(NamedTuple):
    """How a family of models writes calls; what is between the marks tells the rest.

    begins: marks before a call, or before a list of calls. ends: marks after it, left out.
    told_by: words of which a chat template of the family has one.
    is_bare: whether an answer may also begin with the JSON of a call, without a mark.
    others: marks within a call.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    told_by: tuple[str, ...]
    is_bare: bool = False
    others: tuple[str, ...] = ()


# The first whose word a chat template has; some have marks of others within them.
FORMATS = {
    # <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>
    "harmony": Format(
        ("<|start|>", "<|channel|>"),
        ("<|end|>", "<|call|>", "<|return|>"),
        ("<|channel|>",),
        others=("<|message|>", "<|constrain|>"),
    ),
    # [TOOL_CALLS][{"name": .., "arguments": {..}}, ..] or [TOOL_CALLS]NAME[ARGS]{..}, one by one
    "mistral": Format(("[TOOL_CALLS]",), (), ("[TOOL_CALLS]",), others=("[CALL_ID]", "[ARGS]")),
    # <|tool_call>call:NAME{key:<|"|>text<|"|>,key:1}<tool_call|>; FunctionGemma has other marks
    "gemma": Format(
        ("<|tool_call>", "<start_function_call>"),
        ("<tool_call|>", "<end_function_call>"),
        ("<|tool_call>", "<start_function_call>"),
        others=('<|"|>', "<escape>"),
    ),
    # <tool_call>{"name": .., "arguments": {..}}</tool_call>, also Qwen's; and Qwen3-Coder's
    # <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    "hermes": Format(
        ("<tool_call>", "<function="), ("</tool_call>",), ("<tool_call>", "<function=")
    ),
    # <|tool_call|>[{"name": .., "arguments": {..}}]<|/tool_call|> or functools[{..}]; Granite too
    "phi": Format(
        ("<|tool_call|>", "functools["),
        ("<|/tool_call|>",),
        ("<|tool_call|>", "<|tool|>", "functools["),
    ),
    # {"name": .., "parameters": {..}}, perhaps after <|python_tag|>, several with semicolons
    "llama": Format(("<|python_tag|>",), (), ("<|python_tag|>", "Environment: ipython"), True),
}
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


class Part(NamedTuple):
    """A new piece of an answer. A call's first piece has its id and name, later ones arguments."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    call: int = 0
    id: str | None = None
    name: str | None = None


# Up to the arguments of a call whose name comes first, as templates write it.
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]([\w-]+))?\s*(?:\[ARGS\])?\s*(?=\{)")
_NAMED_SO_FAR = re.compile(r"[\w.\-\s\[\]]*")
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_XML_HEAD = re.compile(rf"\s*{_FUNCTION}([^\s<>]+)\s*>")
_XML_SO_FAR = re.compile(rf"{_FUNCTION}[^\s<>]*\s*")
_VALUE_ENDS = ("</parameter>", _PARAMETER, "</function>")
_GEMMA = re.compile(r"\s*call:([\w.-]+)(\{.*\})\s*", re.DOTALL)
_HARMONY_STARTS = ("<|start|>", "<|channel|>", "to=")
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
# Marks that are a part of what they begin.
_BEGINS_WITH = {_FUNCTION: _FUNCTION, "functools[": "["}

# A reader of the text: it yields where it needs more of it, and returns what its docstring says.
Reading = Generator[None, None, Any]
Kind = Literal["reasoning", "content"]


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
        functions = [tool.get("function", tool) for tool in tools]
        # The types of every function's parameters, by name.
        self._types = {
            name: _types(one.get("parameters"))
            for one in functions
            if isinstance(one, dict) and isinstance(name := one.get("name"), str)
        }
        self._form = FORMATS[style.calls] if style.calls and tools else None
        self._thinking, self._is_thinking = style.thinking, is_thinking
        self._most_calls, self.num_calls = most_calls, 0

        # Text that is not read yet; white space that waits for what follows it.
        self._text, self._space, self._is_over = "", "", False
        self._new: list[Part] = []
        # White space at the beginning of a part is left out, but not at the answer's.
        self._trims, self._kind = False, "content"
        self._work = self._harmony() if style.calls == "harmony" else self._answer()
        next(self._work)

    def push(self, text: str) -> list[Part]:
        """Return what a further piece of text settles."""
        self._text += text
        return self._go_on()

    def end(self) -> list[Part]:
        """Return what was held back, at the end of the text."""
        self._is_over = True
        parts = self._go_on()
        space, self._space = self._space, ""
        return [*parts, Part("content", space)] if space and self._kind == "content" else parts

    def _go_on(self) -> list[Part]:
        next(self._work, None)
        new, self._new = self._new, []
        return new

    def _more(self) -> Reading:
        """Wait for more text; return False at the end."""
        if not self._is_over:
            yield
            return True
        return False

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def _say(self, kind: Kind, text: str) -> None:
        text = self._space + text
        if self._trims:
            text = text.lstrip()
        said = text.rstrip()
        self._space, self._kind = text[len(said) :], kind
        if said:
            self._trims = False
            self._new.append(Part(kind, said))

    def _begin_part(self) -> None:
        self._space, self._trims = "", True

    def _pass_until(self, use: Callable[[str], None], marks: Sequence[str]) -> Reading:
        """Use the text up to a mark, read the mark and return it; None at the end of the text."""
        while True:
            found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
            if found:
                at, mark = min(found)
                use(self._take(at))
                return self._take(len(mark))
            use(self._take(settled_length(self._text, marks)))
            if not (yield from self._more()):
                use(self._take(len(self._text)))
                return None

    def _match(self, options: Sequence[str]) -> Reading:
        """Read one of these after white space and return it; None where none is next."""
        while True:
            text = self._text.lstrip()
            found = next((one for one in options if text.startswith(one)), None)
            if found is not None:
                self._take(len(self._text) - len(text) + len(found))
                return found
            # It may be the beginning of one.
            if not any(one.startswith(text) for one in options) or not (yield from self._more()):
                return None

    def _answer(self) -> Reading:
        """Read thinking at the beginning, then text and calls."""
        if self._thinking is not None:
            opened, closed = self._thinking
            if self._is_thinking or (yield from self._match([opened])):
                self._begin_part()
                yield from self._pass_until(functools.partial(self._say, "reasoning"), [closed])
                self._begin_part()
        if self._form is not None and self._form.is_bare:
            # A base may also answer in JSON: only a tool's name tells a call.
            yield from self._json_calls(self._types)

        marks = self._form.begins if self._form else ()
        say = functools.partial(self._say, "content")
        while mark := (yield from self._pass_until(say, marks)):
            if not (yield from self._calls(mark)):
                say(mark)

    def _calls(self, mark: str) -> Reading:
        """Read what follows a mark; return whether it is a call. If not, nothing is read."""
        assert self._form is not None  # as it has the mark
        begins_with = _BEGINS_WITH.get(mark, "")
        self._text = begins_with + self._text
        while not self._text.strip() and (yield from self._more()):
            pass
        # What comes next tells how the call is written.
        first = self._text.lstrip()[:1]
        if first in ("{", "["):
            is_call = yield from self._json_calls()
        elif first == "<":
            is_call = yield from self._xml_call()
        elif mark in FORMATS["gemma"].begins:
            is_call = yield from self._gemma_call()
        else:
            is_call = mark in FORMATS["mistral"].begins and (yield from self._named_call())
        if is_call:
            yield from self._match(self._form.ends)
        else:
            self._text = self._text.removeprefix(begins_with)
        return is_call

    def _begin_call(self, name: str, id_: str | None = None) -> None:
        self._begin_part()
        # Mistral's templates want nine letters and digits; others take any id.
        self._add(Part("call", "", self.num_calls, id_ or uuid.uuid4().hex[:9], name))
        self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        if text:
            self._add(Part("call", text, self.num_calls - 1))

    def _add(self, part: Part) -> None:
        if self._most_calls is None or part.call < self._most_calls:
            self._new.append(part)

    def _json_calls(self, known: Container[str] | None = None) -> Reading:
        """Read a call, a list of calls, or several one after the other.

        known: names of functions; None for any. Returns whether there is a call. If not, nothing
        is read.
        """
        opened = (yield from self._match(["["])) or ""
        if not (yield from self._json_call(known)):
            self._text = opened + self._text
            return False
        # Calls follow one another after commas, semicolons or white space.
        while separator := (yield from self._match([",", ";", "{"])):
            left = separator if separator == "{" else ""
            self._text = left + self._text
            if not (yield from self._json_call(known)):
                self._text = separator.removeprefix(left) + self._text
                break
        if opened:
            yield from self._match(["]"])
        return True

    def _json_call(self, known: Container[str] | None) -> Reading:
        """Read one object that names a function; return whether it does."""
        brackets = _Brackets()
        while not (head := _HEAD.match(self._text)):
            if not "{".startswith(self._text.lstrip()[:1]):
                return False
            # Keys in another order: only the whole object says which call it is.
            if (end := brackets.end_in(self._text)) is not None:
                return self._whole_call(end, known)
            if not (yield from self._more()):
                return False
        name = _from_json(head[1])
        if not isinstance(name, str) or (known is not None and name not in known):
            return False

        self._take(head.end())
        self._begin_call(name)
        yield from self._stream_arguments()
        # After other keys, which say nothing more, the object ends.
        if (yield from self._match(["}", ","])) == ",":
            rest = _Brackets(depth=1)
            while (end := rest.end_in(self._text)) is None and (yield from self._more()):
                pass
            self._take(len(self._text) if end is None else end)
        return True

    def _whole_call(self, end: int, known: Container[str] | None) -> bool:
        value = _from_json(self._text[:end])
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]  # as OpenAI's API writes calls
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or (known is not None and name not in known):
            return False

        given = value.get("arguments", value.get("parameters"))
        self._take(end)
        self._begin_call(name)
        self._add_arguments(given if isinstance(given, str) else _as_json(given or {}))
        return True

    def _stream_arguments(self) -> Reading:
        """Pass an object on as it comes."""
        brackets = _Brackets()
        while (end := brackets.end_in(self._text)) is None:
            self._add_arguments(self._take(len(self._text)))
            brackets.num_read = 0
            if not (yield from self._more()):
                return
        self._add_arguments(self._take(end))

    def _named_call(self) -> Reading:
        """Read a name and an object, perhaps with marks between them; return whether they come."""
        while not (head := _NAMED.match(self._text)):
            may_come = _NAMED_SO_FAR.fullmatch(self._text)
            if not may_come or not (yield from self._more()):
                return False
        self._take(head.end())
        self._begin_call(head[1], head[2])
        yield from self._stream_arguments()
        return True

    def _gemma_call(self) -> Reading:
        """Read a name and arguments in Gemma's own notation; return whether they come."""
        ends = FORMATS["gemma"].ends
        while not (found := [at for end in ends if (at := self._text.find(end)) >= 0]):
            if not (yield from self._more()):
                break
        # Only all of it can be turned into JSON.
        length = min(found, default=len(self._text))
        call = _GEMMA.fullmatch(self._text[:length])
        arguments = _from_gemma(call[2]) if call else None
        if call is None or not isinstance(arguments, dict):
            return False
        self._take(length)
        self._begin_call(call[1])
        self._add_arguments(_as_json(arguments))
        return True

    def _xml_call(self) -> Reading:
        """Read a function and its parameters in tags; return whether they come."""
        while not (head := _XML_HEAD.match(self._text)):
            text = self._text.lstrip()
            may_come = _FUNCTION.startswith(text) or _XML_SO_FAR.fullmatch(text)
            if not may_come or not (yield from self._more()):
                return False
        self._take(head.end())
        self._begin_call(head[1])

        types, before = self._types.get(head[1], {}), "{"
        while (yield from self._match([_PARAMETER, "</function>"])) == _PARAMETER:
            key, value, has_ended = yield from self._parameter()
            written = _as_json(_typed(value, types.get(key, frozenset())))
            # Where the text ends within a value, so do the arguments.
            written = written if has_ended else _as_json(value)[:-1]
            self._add_arguments(f"{before}{_as_json(key)}: {written}")
            if not has_ended:
                return True
            before = ", "
        self._add_arguments("{}" if before == "{" else "}")
        return True

    def _parameter(self) -> Reading:
        """Read a parameter; return its key, its text and whether that has an end."""
        while ">" not in self._text and (yield from self._more()):
            pass
        key, _, self._text = self._text.partition(">")
        # Some models leave the closing tag out.
        while not (
            found := [(at, end) for end in _VALUE_ENDS if (at := self._text.find(end)) >= 0]
        ):
            if not (yield from self._more()):
                break

        at, end = min(found, default=(len(self._text), ""))
        value = self._take(at)
        self._text = self._text.removeprefix("</parameter>")
        # The newlines next to the tags are not the value's.
        return key.strip(), value.removeprefix("\n").removesuffix("\n"), end != ""

    def _harmony(self) -> Reading:
        """Read messages, each with its channel and perhaps the tool that it goes to."""
        mark, seen = "", set[str]()
        self._trims = True
        while mark is not None:
            mark = mark if mark in _HARMONY_STARTS else (yield from self._match(_HARMONY_STARTS))
            if mark is None and not self._text.strip():
                return
            # A message without a head is text, and so is a head without a message.
            head = "" if mark is None else (yield from self._harmony_head(mark))
            if head is None:
                return
            channel = re.search(r"<\|channel\|>\s*(\w+)", head)
            goes_to = re.search(r"to=(?:functions\.)?([^\s<]+)", head)
            if self._form is not None and goes_to is not None:
                self._begin_call(goes_to[1])
                use: Callable[[str], None] = self._add_arguments
            else:
                is_thought = channel is not None and channel[1] == "analysis"
                kind: Kind = "reasoning" if is_thought else "content"
                # Messages of one kind are one text, on lines of their own.
                self._space, self._trims, self._kind = "\n" * (kind in seen), kind not in seen, kind
                seen.add(kind)
                use = functools.partial(self._say, kind)
            mark = yield from self._pass_until(use, _HARMONY_ENDS)

    def _harmony_head(self, mark: str) -> Reading:
        """Return the head of a message that begins with a mark; None where the text ends in it."""
        while (at := self._text.find("<|message|>")) < 0:
            if not (yield from self._more()):
                self._say("content", mark + self._take(len(self._text)))
                return None
        head = mark + self._take(at)
        self._take(len("<|message|>"))
        return head


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
        listed = [
            type_ for type_ in named for type_ in (type_ if isinstance(type_, list) else [type_])
        ]
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
