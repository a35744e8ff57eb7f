"""The trained tokenizer loses nothing and loads as others expect."""

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.errors import UserError
from experiments.tiny_base.tokenizer_training import encode_texts, save_tokenizer, train_tokenizer

TEXTS = ["def area(self):\n    return self.width * self.height\n\n\nclass Box:\n    pass\n"] * 20
TOKENIZER = train_tokenizer(TEXTS, vocab_size=300)


@settings(deadline=None)
@given(st.text() | st.text(alphabet=" \t\r\n_a1(é中\U0001f600"))
def test_round_trip_is_exact_on_any_text(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_come_first_and_bos_is_added():
    assert TOKENIZER.encode("").ids == [0]
    assert [TOKENIZER.id_to_token(i) for i in range(3)] == ["<|bos|>", "<|eos|>", "<|pad|>"]
    assert encode_texts(TOKENIZER, ["", "a"])[0].tolist() == []


def test_line_breaks_take_their_indentation_along():
    text = "def area(self):\n    return self.width"
    pieces = [piece for piece, _ in TOKENIZER.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == ["def", "Ġarea", "(self", "):", "ĊĠĠĠĠ", "return", "Ġself", ".width"]


def test_transformers_loads_it(tmp_path):
    save_tokenizer(TOKENIZER, tmp_path, max_length=64)
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 1, 2)
    assert loaded("def area")["input_ids"] == TOKENIZER.encode("def area").ids
    assert loaded.decode(loaded("x ,  y")["input_ids"][1:]) == "x ,  y"
    assert loaded.model_max_length == 64


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(UserError, match=r"vocab_size \(100\) must be at least 259"):
        train_tokenizer(TEXTS, vocab_size=100)
