"""Structured outputs: JSON schemas, regexes, choices and grammars that a row's text must match.

llguidance compiles a form and says which tokens may come next. In a tree each slot has a mask of
its own, for the text that ends with the slot's path. Nothing here imports JAX or numpy, for
`--help`, and llguidance only where a form is compiled.
"""

from __future__ import annotations

import collections
import functools
import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clover_jax.data.records import is_text, shown
from clover_jax.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerBase

FORMS = ("json", "json_object", "regex", "choice", "grammar")
MOST_KEPT = 16  # compiled forms
COUNTS = ("compile_seconds", "mask_seconds", "draft_tokens", "accepted_tokens")
# Of one form: its symbols, and the states of its lexer, of 1 to 2 kB each.
_MOST_SYMBOLS, _MOST_STATES = 100_000, 20_000
_WHITESPACE = r"[ \n\r\t]{1,40}"  # between JSON's tokens: without an end a base may write no more


def form_text(value: Any) -> str | None:
    """Return a form as JSON text, {"json": schema} for example; None for none.

    value: a mapping with one of FORMS, or its JSON text. A schema may be JSON text too.
    Raises UserError for anything else.
    """
    if value is None:
        return None
    found = _parsed(value) if isinstance(value, str) else value
    given = {}
    if isinstance(found, Mapping):
        given = {name: each for name, each in found.items() if each is not None}
    if len(given) != 1 or not set(given) <= set(FORMS):
        raise UserError(
            f"structured_outputs must be an object with one of {', '.join(FORMS)}, not "
            f"{shown(value)}"
        )

    ((name, form),) = given.items()
    if name == "json" and isinstance(form, str):
        form = _parsed(form)
    is_right, wanted = {
        "json": (isinstance(form, Mapping | bool), "a JSON schema"),
        "json_object": (form is True, "true"),
        "regex": (is_text(form) and form, "a regular expression"),
        "choice": (
            isinstance(form, list | tuple) and form and all(is_text(x) and x for x in form),
            "a list of texts, none of them empty",
        ),
        "grammar": (is_text(form) and form, "a grammar in Lark's or GBNF's notation"),
    }[name]
    if not is_right:
        raise UserError(f"structured_outputs: {name} must be {wanted}, not {shown(form)}")
    # The order of keys is that of a schema's properties in the text.
    return json.dumps({name: form})


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


class Grammars:
    """Matchers of forms for the tokens of one base; compiled forms are kept.

    counts: of COUNTS: seconds of compiling and of trees' masks; tokens that forms forced, as they
        were drafted and accepted.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, eos_ids: Sequence[int]):
        """Take a tokenizer; nothing is compiled before the first form.

        vocabulary: tokens that the base scores. eos_ids: those that may end a text that matches.
        """
        self._source, self._vocabulary, self._eos_ids = tokenizer, vocabulary, tuple(eos_ids)
        self.counts = dict.fromkeys(COUNTS, 0.0)
        # Requests are checked in several threads.
        self._lock = threading.Lock()
        self._compiled = functools.lru_cache(MOST_KEPT)(self._compile)

    def matcher(self, form: str) -> LLMatcher:
        """Return a matcher at the beginning of a form; raises UserError where it cannot be one."""
        with self._lock:
            began = time.perf_counter()
            try:
                return self._compiled(form).deep_copy()
            finally:
                self.counts["compile_seconds"] += time.perf_counter() - began

    @functools.cached_property
    def _tokens(self) -> Any:
        from llguidance.hf import from_tokenizer

        source: Any = self._source  # of a class that `transformers` does not export
        if not self._eos_ids:
            raise UserError("structured outputs need a base with an end-of-sequence token")
        try:
            return from_tokenizer(source, self._vocabulary, eos_token=list(self._eos_ids))
        except ValueError as error:
            raise UserError(f"structured outputs and this tokenizer: {error}") from error

    def _compile(self, form: str) -> LLMatcher:
        try:
            from llguidance import LLMatcher, LLParserLimits, grammar_from
        except ImportError as error:
            raise UserError(
                "structured outputs need llguidance: pip install 'clover-jax[structured]'"
            ) from error

        ((kind, value),) = json.loads(form).items()
        if kind == "json_object":
            kind, value = "json", {"type": "object"}
        if kind == "choice":
            # One terminal for all: as rules of their own, thousands are too many for a parser.
            texts = " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
            kind, value = "lark", f"start: CHOICE\nCHOICE: {texts}"
        text = value if isinstance(value, str) else json.dumps(value)
        try:
            if kind == "json":
                grammar = LLMatcher.grammar_from_json_schema(
                    text, defaults={"whitespace_pattern": _WHITESPACE}
                )
            else:
                grammar = grammar_from(kind, text)
            limits = LLParserLimits(
                max_grammar_size=_MOST_SYMBOLS, max_lexer_states=_MOST_STATES, verbose_errors=False
            )
            matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
            matcher.compute_bitmask()  # a form may be too complex for its very first token
            problem = problem_of(matcher)
        except ValueError as error:
            problem = " ".join(str(error).split())
        if problem:
            raise UserError(f"structured_outputs: {kind}: {problem}")
        return matcher


def problem_of(matcher: LLMatcher) -> str:
    """Return why a matcher has failed, in one line; "" where it has not."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:300]


def draft_chain(chain: list[int], tokens: np.ndarray, parent: np.ndarray, is_shared: bool) -> None:
    """Put tokens that a form forces on a path of a tree, from the root down, in place.

    chain: it is cut to the tokens that the tree has room for.
    tokens, parent: of the slots, parents first, negative tokens in unused ones. is_shared: whether
        all rows share the parents, which stay; then other drafted tokens make way.

    Example: the chain [7, 8] and tokens [5, 7, -1], parent [-1, 0, 0] give [5, 7, 8], [-1, 0, 1].
    """
    import numpy as np

    slot = 0
    for index, token in enumerate(chain):
        children = np.flatnonzero((parent == slot) & (tokens >= 0))
        same = children[tokens[children] == token]
        unused = np.flatnonzero(tokens < 0)
        unused = unused[(parent[unused] == slot) if is_shared else (unused > slot)]

        # The child that has the token, else a slot that is free, else the first child makes way.
        if len(same):
            slot = same[0]
        elif len(unused):
            parent[unused[0]], slot = slot, unused[0]
        elif len(children):
            slot = children[0]
        else:
            del chain[index:]
            return
        tokens[slot] = token


def fill_masks(
    matcher: LLMatcher,
    tokens: Sequence[int],
    parent: Sequence[int],
    masks: np.ndarray,
    eos_ids: Sequence[int],
) -> None:
    """Write which tokens may follow each slot of a tree, for the slots that the text can reach.

    matcher: at the tree's root; it is left there. tokens, parent: of the slots, parents first.
    masks: [T, words], one bit a token; slots that no text can reach keep theirs.

    Example: after the root `{` of an object without properties only the slot of `}` is reached.
    """
    children = collections.defaultdict(list)
    for slot, above in enumerate(parent):
        # Nothing of a text follows its end; unused slots hold negative numbers.
        if above >= 0 <= tokens[slot] and tokens[slot] not in eos_ids:
            children[above].append(slot)

    def visit(slot: int, there: LLMatcher) -> None:
        row = masks[slot]
        there.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        for child in children[slot]:
            # Not a rollback: after one, llguidance 1.9.1 sometimes returns a wrong mask.
            beyond = there.deep_copy()
            if beyond.try_consume_tokens([tokens[child]]):
                visit(child, beyond)

    visit(0, matcher)
