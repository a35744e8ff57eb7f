"""From a prompt row and the answers so far to the token ids that the base continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clover_jax.data.chat_templates import render_template
from clover_jax.data.prompts import Prompt
from clover_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_prompt(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    answers: Sequence[str] = (),
) -> list[int]:
    """Return the token ids of the context that the base continues next.

    tokenizer: the base's, or None where it has none; then only `prompt_ids` can be read.
    vocab_size: V of the base.
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
        text = render_template(tokenizer, _messages(prompt, answers), True, prompt.source)
        # The template writes the special tokens of the start itself.
        ids = tokenizer(text, add_special_tokens=False).input_ids
    else:
        ids = tokenizer(_plain_text(prompt, answers)).input_ids

    if not ids:
        raise UserError(f"{prompt.source}: the prompt is empty; give at least one token")
    # A row's own ids may be anything, and a tokenizer may know tokens that the base does not.
    wrong = [id_ for id_ in (min(ids), max(ids)) if not 0 <= id_ < vocab_size]
    if wrong:
        raise UserError(
            f"{prompt.source}: token id {wrong[0]} is outside the base's vocabulary, "
            f"0 to {vocab_size - 1}"
        )
    return ids


def _messages(prompt: Prompt, answers: Sequence[str]) -> list[dict[str, str]]:
    messages = [dict(message) for message in prompt.messages or ()]
    # Turns with their answers, then the turn that waits for one.
    for index, turn in enumerate((prompt.turns or ())[: len(answers) + 1]):
        messages.append({"role": "user", "content": turn})
        messages += [{"role": "assistant", "content": text} for text in answers[index : index + 1]]
    return messages


def _plain_text(prompt: Prompt, answers: Sequence[str]) -> str:
    if prompt.text is not None:
        return prompt.text
    # Every turn and every answer ends in a newline, so that a later context begins with the earlier
    # one and its answer, and the answer starts on a line of its own.
    return "".join(message["content"] + "\n" for message in _messages(prompt, answers))
