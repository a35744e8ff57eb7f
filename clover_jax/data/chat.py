"""From a training record to token ids and the mask of tokens on which the base is imitated."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from clover_jax.data.records import Conversation, Record, Text, TokenRow
from clover_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Encoded(NamedTuple):
    """One record, tokenised.

    tokens:    [n] int32.
    loss_mask: [n] bool, True on the assistant's tokens (all tokens of plain text).
    """

    tokens: np.ndarray
    loss_mask: np.ndarray


class Span(NamedTuple):
    """Characters start .. end - 1 of a rendered conversation, all the assistant's."""

    start: int
    end: int


def encode_record(
    record: Record, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> Encoded:
    """Tokenise one record.

    Text begins as the tokenizer begins a text (BOS for most) and ends with EOS if the document
    ends. Conversations go through the chat template; without one, every message ends in a newline,
    EOS follows at the end, and nothing says who speaks.
    Raises UserError for text without a tokenizer, ids outside the vocabulary, or a template that
    renders a conversation's beginning differently once the answer follows.
    """
    if isinstance(record, TokenRow):
        encoded = _encode_ids(record)
    elif tokenizer is None:
        raise UserError(
            f"{record.source}: the base has no tokenizer files; give rows of prompt_ids and "
            "output_ids instead of text"
        )
    elif isinstance(record, Text):
        encoded = _encode_text(record, tokenizer)
    elif tokenizer.chat_template is not None:
        encoded = _encode_rendered(*render_chat(record, tokenizer), tokenizer, False)
    else:
        encoded = _encode_rendered(*render_plain(record), tokenizer, True)
    if encoded.tokens.size and encoded.tokens.max() >= vocab_size:
        raise UserError(
            f"{record.source}: token id {encoded.tokens.max()} is outside the base's vocabulary, "
            f"0 to {vocab_size - 1}"
        )
    return encoded


def render_plain(record: Conversation) -> tuple[str, list[Span]]:
    """Return the conversation with a newline after every message, and the assistant's spans.

    Example: user "a", assistant "b" gives "a\\nb\\n" and [Span(2, 4)].
    """
    text, spans = "", []
    for role, content in record.messages:
        start = len(text)
        text += content + "\n"
        if role == "assistant":
            spans.append(Span(start, len(text)))
    return text, spans


def render_chat(record: Conversation, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Span]]:
    """Return the chat template's text and the spans that the assistant generates.

    An answer's span begins where a generation prompt would end and ends with its end-of-turn
    marker; white space that the template puts after that is not the assistant's.
    """
    messages = [{"role": role, "content": content} for role, content in record.messages]
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            asked = _apply_template(record, tokenizer, messages[:index], True)
            answered = _apply_template(record, tokenizer, messages[: index + 1], False)
            if not answered.startswith(asked):
                raise UserError(
                    f"{record.source}: the base's chat template renders the conversation before "
                    f"answer {len(spans) + 1} differently once the answer follows, so its tokens "
                    "cannot be told apart; give rows of prompt_ids and output_ids"
                )
            content = message["content"]
            end = len(answered.rstrip()) if not content.endswith((" ", "\n")) else len(answered)
            spans.append(Span(len(asked), end))
    text = _apply_template(record, tokenizer, messages, False)
    if spans and not text.startswith(answered):
        raise UserError(
            f"{record.source}: the base's chat template renders an answer differently once more "
            "follows; give rows of prompt_ids and output_ids"
        )
    return text, spans


def _apply_template(
    record: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    ask: bool,
) -> str:
    import jinja2

    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=ask, tokenize=False)
    except jinja2.TemplateError as error:
        raise UserError(
            f"{record.source}: the base's chat template refuses the conversation: {error}"
        ) from None


def _encode_rendered(
    text: str, spans: list[Span], tokenizer: PreTrainedTokenizerBase, is_plain: bool
) -> Encoded:
    """Tokenise; a token is the assistant's when its last character is.

    (Its first may not be: a token may join a space before the answer to the answer's first word.)
    """
    encoding = tokenizer(text, add_special_tokens=is_plain, return_offsets_mapping=True)
    last = np.array([end - 1 for _, end in encoding.offset_mapping], np.int64)
    is_empty = np.array([start == end for start, end in encoding.offset_mapping], bool)
    mask = np.zeros(len(last), bool)
    for span in spans:
        mask |= (last >= span.start) & (last < span.end)
    tokens = np.array(encoding.input_ids, np.int32)
    encoded = Encoded(tokens, mask & ~is_empty)
    ends_with_answer = bool(spans) and spans[-1].end == len(text)
    return _with_eos(encoded, tokenizer, ends_with_answer) if is_plain else encoded


def _encode_text(record: Text, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    ids = tokenizer(record.text, add_special_tokens=record.starts).input_ids
    encoded = Encoded(np.array(ids, np.int32), np.ones(len(ids), bool))
    return _with_eos(encoded, tokenizer, True) if record.ends else encoded


def _encode_ids(record: TokenRow) -> Encoded:
    tokens = np.array([*record.prompt_ids, *record.output_ids], np.int32)
    return Encoded(tokens, np.arange(len(tokens)) >= len(record.prompt_ids))


def _with_eos(encoded: Encoded, tokenizer: PreTrainedTokenizerBase, counts: bool) -> Encoded:
    """Append EOS where the tokenizer has one and has not put it there itself."""
    eos = tokenizer.eos_token_id
    if eos is None or (encoded.tokens.size and encoded.tokens[-1] == eos):
        return encoded
    return Encoded(np.append(encoded.tokens, np.int32(eos)), np.append(encoded.loss_mask, counts))
