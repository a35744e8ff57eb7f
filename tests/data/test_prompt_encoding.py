"""From prompt rows to token ids: templates, turns with their answers, mistakes."""

import pytest

from clover_jax.data.chat import encode_prompt
from clover_jax.data.prompts import parse_prompt
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.errors import UserError
from tests.tiny_tokenizers import CHAT_TEMPLATE, save_byte_level

V = 300


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tokenizer without a chat template."""
    return load_tokenizer(save_byte_level(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A tokenizer with a chat template, one that refuses a system role."""
    return load_tokenizer(save_byte_level(tmp_path_factory.mktemp("chat"), CHAT_TEMPLATE))


def row(**values):
    return parse_prompt(values, index=0, source="p.jsonl:1")


def encoded_text(tokenizer, prompt, answers=()):
    return tokenizer.decode(encode_prompt(prompt, tokenizer, V, answers))


def test_a_prompt_is_continued_as_it_is_even_by_a_chat_model(plain, chat):
    assert encoded_text(plain, row(prompt="the cat")) == "the cat"
    assert encoded_text(chat, row(prompt="the cat")) == "the cat"


def test_token_ids_are_taken_as_they_are_and_need_no_tokenizer():
    assert encode_prompt(row(prompt_ids=[5, 1]), None, V) == [5, 1]


def test_a_question_and_messages_go_through_the_template(chat):
    assert encoded_text(chat, row(question="Why?")) == "<s>[user]Why?[assistant]"
    prompt = row(
        messages=[
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
    )
    assert encoded_text(chat, prompt) == "<s>[user]a[assistant]b[user]c[assistant]"


def test_the_begin_token_of_a_template_is_not_doubled(chat):
    assert encode_prompt(row(question="Why?"), chat, V).count(chat.bos_token_id) == 1


def test_turns_are_played_with_the_answers_so_far(chat, plain):
    prompt = row(turns=["a", "c"])
    assert encoded_text(chat, prompt) == "<s>[user]a[assistant]"
    assert encoded_text(chat, prompt, ["b"]) == "<s>[user]a[assistant]b[user]c[assistant]"
    assert encoded_text(plain, prompt) == "a\n"
    assert encoded_text(plain, prompt, ["b"]) == "a\nb\nc\n"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prompt": ""}, "p.jsonl:1: the prompt is empty; give at least one token"),
        ({"prompt_ids": [0, 300]}, "token id 300 is outside the base's vocabulary, 0 to 299"),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
            "p.jsonl:1: the base's chat template refuses the conversation: no system role",
        ),
    ],
)
def test_a_row_that_cannot_be_encoded_is_named(values, said, chat):
    with pytest.raises(UserError) as raised:
        encode_prompt(row(**values), chat, V)
    assert said in str(raised.value)


def test_text_for_a_base_without_a_tokenizer_is_refused():
    with pytest.raises(UserError, match="p.jsonl:1: the base has no tokenizer files; give prompt_"):
        encode_prompt(row(prompt="a"), None, V)
