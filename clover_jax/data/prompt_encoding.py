"""From a prompt row and the answers so far to the token ids that the base continues."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clover_jax.data.prompts import Prompt
from clover_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_prompt(
    prompt: Prompt,
    tokenizer: "PreTrainedTokenizerBase | None",
    vocab_size: int,
    answers: Sequence[str] = (),
) -> list[int]:
    """Return the token ids of the context that the base continues next.

    Args:
      prompt: the row.
      tokenizer: the base's, or None where it has none; then only `prompt_ids` can be read.
      vocab_size: V of the base.
      answers: the text of the answers to the row's first turns; the next turn is encoded.

    Raises:
      UserError: naming the row, what is wrong with it and what would be right.
    """
    if prompt.prompt_ids is not None:
        ids = list(prompt.prompt_ids)
    elif tokenizer is None:
        raise UserError(
            f"{prompt.source}: the base has no tokenizer files; give prompt_ids instead of text"
        )
    elif prompt.is_conversation and tokenizer.chat_template is not None:
        ids = _apply_template(prompt, tokenizer, _messages(prompt, answers))
    else:
        ids = tokenizer(_plain_text(prompt, answers)).input_ids
    if not ids:
        raise UserError(f"{prompt.source}: the prompt is empty; give at least one token")
    if max(ids) >= vocab_size:
        raise UserError(
            f"{prompt.source}: token id {max(ids)} is outside the base's vocabulary, "
            f"0 to {vocab_size - 1}"
        )
    return ids


def template_notice(
    prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase | None"
) -> str | None:
    """Return what to tell a user whose conversations meet a base without a chat template."""
    num_conversations = sum(prompt.is_conversation for prompt in prompts)
    if not num_conversations or tokenizer is None or tokenizer.chat_template is not None:
        return None
    return (
        f"the base has no chat template: in {num_conversations} of {len(prompts)} rows "
        "turns and answers are joined by newlines"
    )


def _messages(prompt: Prompt, answers: Sequence[str]) -> list[dict[str, str]]:
    messages = [dict(message) for message in prompt.messages or ()]
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


def _apply_template(
    prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]]
) -> list[int]:
    import jinja2

    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
    except jinja2.TemplateError as error:
        raise UserError(
            f"{prompt.source}: the base's chat template refuses the conversation: {error}"
        ) from None
