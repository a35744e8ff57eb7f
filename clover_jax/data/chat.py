"""From a training record to tokens and loss mask, and from a prompt to the tokens to continue."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from clover_jax.data.chat_templates import RowTemplate
from clover_jax.data.forms import CALLS, WRITTEN, content_text
from clover_jax.data.prompts import Prompt
from clover_jax.data.records import Conversation, Message, Record, Text, TokenRow, TokenTurns, Turn
from clover_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Encoded(NamedTuple):
    """One record as [n] int32 tokens and [n] bool, True on those on which the base is imitated."""

    tokens: np.ndarray
    loss_mask: np.ndarray


class Span(NamedTuple):
    """Characters start .. end - 1 of a rendered conversation, all the assistant's."""

    start: int
    end: int


def encode_record(
    record: Record, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> Encoded:
    """Tokenize one record.

    Text begins as the tokenizer begins a text (BOS for most) and ends with EOS if the document
    ends. Conversations go through the chat template; without one, every message ends in a newline,
    EOS follows at the end, and roles are lost.
    Raises UserError for text without a tokenizer, ids outside the vocabulary, or a template that
    leaves the answers out or renders a conversation's beginning differently once one follows.
    """
    # Token ids need no tokenizer; everything below does.
    if isinstance(record, TokenRow):
        turns = ((record.prompt_ids, record.output_ids),)
        encoded = _encode_turns(turns, vocab_size, record.source)
    elif isinstance(record, TokenTurns):
        encoded = _encode_turns(record.turns, vocab_size, record.source)
    elif tokenizer is None:
        raise UserError(
            f"{record.source}: the base has no tokenizer files; give rows of prompt_ids and "
            "output_ids instead of text"
        )
    elif isinstance(record, Text):
        # A section in the middle of a document has no BOS and no EOS.
        ids = tokenizer(record.text, add_special_tokens=record.starts).input_ids
        ids = ids[num_doubled(ids, tokenizer) :]
        # With BOS some tokenizers add EOS.
        if record.starts and not record.ends and ids and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]
        encoded = Encoded(np.array(ids, np.int32), np.ones(len(ids), bool))
        encoded = _with_eos(encoded, tokenizer, True) if record.ends else encoded
    elif tokenizer.chat_template is not None:
        encoded = _encode_rendered(*render_chat(record, tokenizer), tokenizer, False)
    else:
        encoded = _encode_rendered(*render_plain(record), tokenizer, True)

    # A mask without an answer would be trained on in silence, and teach nothing.
    if isinstance(record, Conversation) and not encoded.loss_mask.any():
        answers = [
            message
            for index, message in after_first_question(record.messages)
            if message["role"] == "assistant" and index not in record.unlearned
        ]
        if any(content_text(one).strip() or one.keys() & {*WRITTEN} for one in answers):
            raise UserError(
                f"{record.source}: the loss mask is all zero although the assistant says "
                "something; the base's chat template leaves the answer out: give another "
                "--chat_template"
            )
    # A tokenizer may know tokens that the base has no row for.
    _check_id(encoded.tokens.max(initial=0), vocab_size, record.source)
    return encoded


def _check_id(id_: int, vocab_size: int, source: str) -> None:
    if not 0 <= id_ < vocab_size:
        raise UserError(
            f"{source}: token id {id_} is outside the base's vocabulary, 0 to {vocab_size - 1}"
        )


def render_plain(record: Conversation) -> tuple[str, list[Span]]:
    """Return the conversation with a newline after every message, and the assistant's spans.

    Raises UserError for calls, which only a chat template can write.

    Example: user "a", assistant "b" gives "a\\nb\\n" and [Span(2, 4)].
    """
    text, spans = "", []
    for index, message in enumerate(record.messages):
        start = len(text)
        text += _plain_text(message, record.source)
        if message["role"] == "assistant" and index not in record.unlearned:
            # The newline counts too, so that the head learns where an answer ends.
            spans.append(Span(start, len(text)))
    return text, spans


def _plain_text(message: Message, source: str) -> str:
    extra = [key for key in WRITTEN if key in message]
    if extra:
        raise UserError(
            f"{source}: the model has no chat template, without which {extra[0]} of a message "
            "cannot be written; pass --chat_template"
        )
    return content_text(message) + "\n"


def render_chat(record: Conversation, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Span]]:
    """Return the chat template's text and the spans that the assistant generates.

    A template's own {% generation %} blocks are these spans. In others an answer's span begins
    where a generation prompt would end and ends with its end-of-turn marker; white space that the
    template puts after that is not the assistant's. Answers before the first question are left out:
    no template has a place for them.
    Raises UserError for a template that does not say where an answer begins, or leaves out a call
    or a message.
    """
    asked = after_first_question(record.messages)
    # Without a question there is nothing to learn: the caller gets an empty mask.
    if not asked:
        return "", []
    messages = [message for _, message in asked]
    are_learned = [i not in record.unlearned for i, one in asked if one["role"] == "assistant"]

    template = RowTemplate(tokenizer, record.source, record.variables)
    marked = template.marked_answers(messages)
    if marked is not None:
        text, spans = marked[0], [Span(*span) for span in marked[1]]
    else:
        # Each answer is rendered as the last message, then looked up in the whole conversation.
        text, spans = template.render(messages, False), []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                answer = _Answer(template, messages[: index + 1], len(spans) + 1)
                spans.append(answer.span_in(text, spans[-1].end if spans else 0))

    template.check(messages, text, False)
    if all(are_learned):
        return text, spans
    if len(spans) != len(are_learned):
        raise UserError(
            f"{record.source}: the base's chat template marks {len(spans)} answers of "
            f"{len(are_learned)}, so the ones not to be learned cannot be told apart; give another "
            "--chat_template"
        )
    return text, list(itertools.compress(spans, are_learned))


def after_first_question(messages: Sequence[Message]) -> list[tuple[int, Message]]:
    """Return (number, message) pairs without the assistant's ones at the beginning."""
    pairs = enumerate(messages)
    return list(itertools.dropwhile(lambda pair: pair[1]["role"] == "assistant", pairs))


class _Answer:
    """One answer, rendered as the last message of its conversation, and what led to it.

    asked: the text that the base continues: all before the answer, with the generation prompt.
    answered: the text that ends with the answer and its end-of-turn marker.
    """

    def __init__(self, template: RowTemplate, messages: list[Message], number: int):
        def render(last: list[Message], ask: bool) -> str:
            return template.render([*messages[:-1], *last], ask)

        self._source, self._content = template.source, content_text(messages[-1])
        self._before = content_text(messages[-2]).strip()
        self.asked, self.answered = render([], True), render(messages[-1:], False)
        # Only then the answer is the text after what was asked.
        if not self.answered.startswith(self.asked):
            self._refuse(
                f"renders the conversation before answer {number} differently once the answer "
                "follows, so its tokens cannot be told apart"
            )

        # Calls that a template does not know would leave an answer that says nothing.
        without = {key: one for key, one in messages[-1].items() if key not in CALLS}
        self._has_calls = len(without) < len(messages[-1])
        if self._has_calls:
            bare = None
            with contextlib.suppress(UserError):
                bare = render([without | {"content": self._content}], False)
            if self.answered == bare:
                self._refuse(f"leaves out the calls in answer {number}")
            if self._content.rpartition("</think>")[2].strip() not in self._rest:
                self._refuse(f"leaves out the text next to the calls in answer {number}")

        # Text between the two that no generation prompt holds would have to be generated.
        # The first place: an end-of-turn marker may hold the answer's letters, or no answer at all.
        content, rest = self._content.strip(), self._rest
        if self._has_calls and not content:
            content = "x"
            rest = render([{"role": "assistant", "content": content}], False)[len(self.asked) :]
        before = rest[: rest.find(content)]
        if before.strip() and self.asked == render([], False):
            self._refuse(
                f"has no assistant marker: it puts {before.strip()!r} before answer {number}, but "
                "adds nothing where an answer is asked for (add_generation_prompt)"
            )

    @property
    def _rest(self) -> str:
        return self.answered[len(self.asked) :]

    def span_in(self, text: str, after: int) -> Span:
        """Return where the answer lies in the text of the whole conversation, at `after` or later.

        after: where the answer before this one ends.
        """
        # White space after the answer is the template's, unless the answer itself ends so.
        own = self.answered
        own = own if self._content.strip() and own.endswith(self._content) else own.rstrip()
        # The usual case: what follows leaves the answer as it was.
        if text.startswith(own):
            return Span(len(self.asked), len(own))

        # Some templates drop the thinking block of past turns. It may be the template's own, before
        # the content, or begin the content.
        start, is_asked = len(self.asked), text.startswith(self.asked)
        kept = self._rest.rpartition("</think>")[2].strip()
        begins = text.find(kept, start)
        if is_asked and kept and begins >= 0 and not text[start:begins].strip():
            return Span(start, begins + len(kept))
        # Mistral 3 puts the tools before the last question: then they move on, and only what stands
        # before the answer within its turn is the same.
        turn = self.asked[self.asked.rfind(self._before) :] if self._before else ""
        begins = -1 if is_asked or not turn else text.find(turn + own[start:], after)
        if begins >= 0:
            return Span(begins + len(turn), begins + len(turn) + len(own) - start)
        if self._has_calls:
            self._refuse("renders an answer with calls differently once more follows")

        # Only white space may stand in the place of the dropped block.
        content = self._content.rpartition("</think>")[2].strip()
        begins = text.find(content, start)
        if not is_asked or begins < 0 or text[start:begins].strip():
            return self._span_with_another_end(text)

        # The end-of-turn marker counts where it follows here, too. It and the block may both hold
        # the answer's letters.
        rest = self._rest.rpartition("</think>")[2].lstrip()
        marker = rest[rest.find(content) + len(content) :].rstrip()
        end = begins + len(content)
        return Span(start, end + len(marker) if text.startswith(marker, end) else end)

    def _span_with_another_end(self, text: str) -> Span:
        """Find the answer where only the last one ends in the marker that a model writes."""
        # gpt-oss ends past turns in another marker, which is not learned as it is never generated.
        both = zip(self.answered, text, strict=False)
        same = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
        content = self._content.strip()
        begins = same.rfind(content, len(self.asked)) if content else -1
        if begins < 0:
            self._refuse("renders an answer differently once more follows")
        return Span(len(self.asked), begins + len(content))

    def _refuse(self, reason: str) -> NoReturn:
        raise UserError(
            f"{self._source}: the base's chat template {reason}; give another --chat_template, or "
            "rows of prompt_ids and output_ids"
        )


def _encode_rendered(
    text: str, spans: list[Span], tokenizer: PreTrainedTokenizerBase, is_plain: bool
) -> Encoded:
    """Tokenize; a token is the assistant's when its last character is.

    (Its first may not be: a token may join a space before the answer to the answer's first word.)
    """
    # A template writes the special tokens itself.
    encoding = tokenizer(text, add_special_tokens=is_plain, return_offsets_mapping=True)
    # Tokens that the tokenizer adds have the offsets (0, 0), so their last character is in no span.
    # Spaces that it trims from offsets (trim_offsets) leave an empty range behind the last one.
    last = np.array([end - 1 for _, end in encoding.offset_mapping], np.int64)
    mask = np.zeros(len(last), bool)
    for span in spans:
        mask |= (last >= span.start) & (last < span.end)
    doubled = num_doubled(encoding.input_ids, tokenizer) if is_plain else 0
    encoded = Encoded(np.array(encoding.input_ids, np.int32)[doubled:], mask[doubled:])

    # Without a template EOS ends the text, and counts if the assistant speaks last.
    ends_with_answer = bool(spans) and spans[-1].end == len(text)
    return _with_eos(encoded, tokenizer, ends_with_answer) if is_plain else encoded


def _encode_turns(turns: tuple[Turn, ...], vocab_size: int, source: str) -> Encoded:
    tokens = [token for context, answer in turns for token in (*context, *answer)]
    # Here already: a row may hold numbers that no array can.
    _check_id(max(tokens, default=0), vocab_size, source)
    # Contexts and answers take turns, and so does the mask.
    sizes = [len(part) for turn in turns for part in turn]
    counts = np.resize([False, True], len(sizes))
    return Encoded(np.array(tokens, np.int32), np.repeat(counts, sizes))


def _with_eos(encoded: Encoded, tokenizer: PreTrainedTokenizerBase, counts: bool) -> Encoded:
    """Append EOS where the tokenizer has one and did not add it itself; counts: its mask."""
    eos = tokenizer.eos_token_id
    if eos is None:
        return encoded
    # One that is there already has no place in the text, so no span has counted it.
    if encoded.tokens.size and encoded.tokens[-1] == eos:
        return Encoded(encoded.tokens, np.append(encoded.loss_mask[:-1], counts))
    return Encoded(np.append(encoded.tokens, np.int32(eos)), np.append(encoded.loss_mask, counts))


def encode_prompt(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    answers: Sequence[str] = (),
) -> list[int]:
    """Return the token ids of the context that the base continues next.

    answers: the text of the answers to the row's first turns; the next turn is encoded.
    Raises UserError naming the row, what is wrong with it and what would be right.
    """
    if prompt.prompt_ids is not None:
        ids = list(prompt.prompt_ids)
    elif tokenizer is None:
        raise UserError(
            f"{prompt.source}: the base has no tokenizer files; give prompt_ids instead of text"
        )
    elif prompt.is_conversation and tokenizer.chat_template is not None:
        messages = _messages(prompt, answers)
        template = RowTemplate(tokenizer, prompt.source, prompt.variables)
        text = template.render(messages, True)
        template.check(messages, text, True)
        # The template writes the special tokens of the start itself.
        ids = tokenizer(text, add_special_tokens=False).input_ids
    elif prompt.text is not None:
        ids = tokenizer(prompt.text).input_ids
        ids = ids[num_doubled(ids, tokenizer) :]
    else:
        # Every turn and answer ends in a newline, so that a later context begins with the earlier
        # one and its answer, and the answer starts on a line of its own.
        lines = (_plain_text(message, prompt.source) for message in _messages(prompt, answers))
        ids = tokenizer("".join(lines)).input_ids
        ids = ids[num_doubled(ids, tokenizer) :]

    if not ids:
        raise UserError(f"{prompt.source}: the prompt is empty; give at least one token")
    # A row's own ids may be anything, and a tokenizer may know tokens that the base does not.
    for id_ in (min(ids), max(ids)):
        _check_id(id_, vocab_size, prompt.source)
    return ids


def _messages(prompt: Prompt, answers: Sequence[str]) -> list[Message]:
    messages = list(prompt.messages or ())
    # Turns with their answers, then the turn that waits for one.
    for index, turn in enumerate((prompt.turns or ())[: len(answers) + 1]):
        messages += [{"role": "user", "content": turn}] if isinstance(turn, str) else turn
        messages += [{"role": "assistant", "content": text} for text in answers[index : index + 1]]
    return messages


def num_doubled(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many first tokens double the one after them: 1 for a text with BOS of its own.

    A text that a chat template has made begins with BOS, and the tokenizer adds another.
    """
    bos = tokenizer.bos_token_id
    return int(bos is not None and list(ids[:2]) == [bos, bos])
