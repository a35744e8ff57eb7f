"""Prompts for a base that knows Python: function heads taken from held-out modules."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from clover_jax.data.corpus import Document, parse_module

_MAX_CHARACTERS = 700
_MIN_BODY_LINES = 4
_PER_MODULE = 12

Function = ast.FunctionDef | ast.AsyncFunctionDef


def heldout_prompts(documents: Sequence[Document], count: int) -> list[dict[str, str]]:
    """Return up to `count` rows {"prompt", "category"}, at most 12 of a module.

    A prompt is the line of the class, if any, and the function from `def` to the end of its
    docstring, or to its colon. It ends before the line break: that token also holds the
    indentation of the body, which is for the model to write. Which functions are taken depends
    on hashes of their names; modules take turns, so that the first rows are varied already.

    Categories: "test" (test modules), "method", "function".
    """
    by_module = [_module_prompts(document) for document in documents]
    rows: dict[str, dict[str, str]] = {}
    for turn in zip_longest(*by_module):
        for row in turn:
            if row is not None:
                rows.setdefault(row["prompt"], row)
    return list(rows.values())[:count]


def _module_prompts(document: Document) -> list[dict[str, str]]:
    lines = document.text.split("\n")
    found = []
    for parent, function in _functions(parse_module(document.text)):
        prompt = _head(lines, parent, function)
        if prompt is not None:
            name = f"{document.name}:{parent.name if parent else ''}.{function.name}"
            digest = hashlib.sha256(name.encode("utf-8")).digest()
            found.append((digest, prompt, _category(document.name, parent)))
    chosen = sorted(found)[:_PER_MODULE]
    return [{"prompt": prompt, "category": category} for _, prompt, category in chosen]


def _functions(module: ast.Module) -> Iterator[tuple[ast.ClassDef | None, Function]]:
    """Yield the functions of a module and the methods of its classes, with the class."""
    for node in module.body:
        if isinstance(node, Function):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            yield from ((node, child) for child in node.body if isinstance(child, Function))


def _head(lines: Sequence[str], parent: ast.ClassDef | None, function: Function) -> str | None:
    """Return the prompt, or None where too little is left to write or the head is too long."""
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        end, body = body[0].end_lineno, body[1:]
    else:
        end = _line_before_body(lines, body[0])
    body_lines = (function.end_lineno or 0) - end
    if not body or body_lines < _MIN_BODY_LINES or end < function.lineno:
        return None
    prompt = "\n".join(lines[function.lineno - 1 : end]).rstrip()
    if parent is not None:
        prompt = f"{lines[parent.lineno - 1].rstrip()}\n\n{prompt}"
    is_whole = prompt.endswith((":", '"""', "'''")) and len(prompt) <= _MAX_CHARACTERS
    return prompt if is_whole else None


def _line_before_body(lines: Sequence[str], first: ast.stmt) -> int:
    """Return the number of the last line before the body that is neither empty nor a comment."""
    # A body that starts with a decorated function starts at the decorator.
    starts = [decorator.lineno for decorator in getattr(first, "decorator_list", [])]
    end = min([first.lineno, *starts]) - 1
    while end > 0 and lines[end - 1].strip()[:1] in ("", "#"):
        end -= 1
    return end


def _category(module: str, parent: ast.ClassDef | None) -> str:
    if any(part.startswith(("test", "_test", "idle_test")) for part in module.split("/")):
        return "test"
    return "function" if parent is None else "method"
