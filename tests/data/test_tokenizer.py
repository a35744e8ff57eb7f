"""Tokenizers load quietly and offline, are known by their ids, and decode piece by piece."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.data.detokenization import TextStream, decode_text, special_ids
from clover_jax.data.tokenizer import load_tokenizer, tokenizer_hash
from clover_jax.errors import UserError
from tests.tiny_tokenizers import CHAT_TEMPLATE, save_byte_fallback, save_byte_level

KINDS = {"byte level": save_byte_level, "byte fallback": save_byte_fallback}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The tiny tokenizers by kind, loaded from files."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {kind: load_tokenizer(save(folder / kind)) for kind, save in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_text_survives_a_round_trip(tokenizers, kind, capfd):
    tokenizer = tokenizers[kind]
    text = "the cat, 日本 é!  \n 's"
    assert decode_text(tokenizer, tokenizer(text).input_ids + [tokenizer.eos_token_id]) == text
    assert capfd.readouterr() == ("", "")


def draw_chunks(data, tokenizer, most):
    words = st.text("the cao日é😀 ", max_size=4).map(lambda text: tokenizer(text).input_ids)
    anything = st.lists(st.integers(0, len(tokenizer) - 1), max_size=4)
    return data.draw(st.lists(st.one_of(words, anything), max_size=most))


def pieces(tokenizer, chunks):
    stream = TextStream(tokenizer)
    return [stream.push(chunk) for chunk in chunks] + [stream.held()]


def test_a_character_appears_with_its_last_token(tokenizers):
    tokenizer = tokenizers["byte level"]
    first, second, mark = tokenizer("é!").input_ids
    assert pieces(tokenizer, [[first], [second, mark]]) == ["", "é!", ""]
    assert pieces(tokenizer, [[mark, first], [second]]) == ["!", "é", ""]
    assert pieces(tokenizer, [[mark, first]]) == ["!", "\N{REPLACEMENT CHARACTER}"]


def test_a_run_of_byte_tokens_appears_when_it_has_ended(tokenizers):
    tokenizer = tokenizers["byte fallback"]
    ids = tokenizer("日a").input_ids[1:]  # without the space that this kind puts before
    assert pieces(tokenizer, [[id_] for id_ in ids]) == ["", "", "", "日a", ""]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_pieces_of_any_tokens_in_any_chunks_join_to_the_whole(tokenizers, kind, data):
    tokenizer = tokenizers[kind]
    chunks = draw_chunks(data, tokenizer, 8)
    whole = decode_text(tokenizer, [id_ for chunk in chunks for id_ in chunk])
    assert "".join(pieces(tokenizer, chunks)) == whole


def test_a_continuation_keeps_the_space_that_the_start_of_a_text_loses(tokenizers):
    tokenizer = tokenizers["byte fallback"]
    prompt, answer = tokenizer("the").input_ids, tokenizer("the").input_ids
    assert decode_text(tokenizer, answer) == "the"
    assert decode_text(tokenizer, answer, prompt) == " the"
    stream = TextStream(tokenizer, prompt)
    assert stream.push(answer) + stream.held() == " the"
    only_bytes = tokenizer.convert_tokens_to_ids(["<0x41>", "<0x42>"])
    assert decode_text(tokenizer, answer, only_bytes) == " the"


def test_a_character_that_the_context_begins_belongs_to_what_follows(tokenizers):
    tokenizer = tokenizers["byte level"]
    first, second, mark = tokenizer("é!").input_ids
    assert decode_text(tokenizer, [second, mark], [mark, first]) == "é!"
    stream = TextStream(tokenizer, [mark, first])
    assert [stream.push([second]), stream.push([mark])] == ["é", "!"]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_long_stream_after_a_prompt_forgets_nothing_that_matters(tokenizers, kind, data):
    tokenizer = tokenizers[kind]
    prompt = [id_ for chunk in draw_chunks(data, tokenizer, 4) for id_ in chunk]
    chunks = draw_chunks(data, tokenizer, 8) * 12 + draw_chunks(data, tokenizer, 8)
    stream, text, seen = TextStream(tokenizer, prompt), "", []
    for chunk in chunks:
        text += stream.push(chunk)
        seen += chunk
        assert text + stream.held() == decode_text(tokenizer, seen, prompt)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_special_tokens_may_be_text_all_or_some(tokenizers, kind, data):
    tokenizer = tokenizers[kind]
    special = special_ids(tokenizer)
    shown = frozenset(data.draw(st.sets(st.sampled_from(sorted(special)), min_size=1)))
    chunks = draw_chunks(data, tokenizer, 8)
    ids = [id_ for chunk in chunks for id_ in chunk]
    text = decode_text(tokenizer, ids, (), shown)
    assert text == tokenizer.decode([id_ for id_ in ids if id_ not in special - shown])
    stream = TextStream(tokenizer, (), shown)
    assert "".join(map(stream.push, chunks)) + stream.held() == text


def test_a_push_decodes_few_tokens_however_long_the_text(tokenizers, monkeypatch):
    tokenizer, counts = tokenizers["byte fallback"], []
    decode = type(tokenizer).decode

    def counted(self, ids, **options):
        counts.append(len(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(type(tokenizer), "decode", counted)
    stream = TextStream(tokenizer)
    for _ in range(500):
        stream.push(tokenizer("the 日").input_ids)
    assert max(counts) < 200


def test_a_long_prompt_in_byte_tokens_leaves_the_answer_alone(tokenizers):
    tokenizer = tokenizers["byte fallback"]
    prompt, answer = (
        tokenizer("ab 日é日é日é日é日é日é日é日é日é日é").input_ids,
        tokenizer("the").input_ids,
    )
    # Of the bytes at the prompt's end, those of a character that it leaves incomplete.
    for cut, expected in enumerate([" the", "é the", "é the", "日é the", "日é the", "日é the"]):
        end = len(prompt) - cut
        assert decode_text(tokenizer, [*prompt[end:], *answer], prompt[:end]) == expected


def test_a_wrong_byte_does_not_undo_the_prompt(tokenizers):
    tokenizer = tokenizers["byte fallback"]
    prompt, wrong = tokenizer("a日日日").input_ids, tokenizer.convert_tokens_to_ids("<0xFF>")
    answer = [wrong, *tokenizer("the").input_ids]
    assert decode_text(tokenizer, answer, prompt) == "\N{REPLACEMENT CHARACTER} the"


def test_a_folder_without_tokenizer_files_has_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


def test_a_broken_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("nonsense")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    with pytest.raises(UserError, match=f"{tmp_path}: its tokenizer cannot be loaded: "):
        load_tokenizer(tmp_path)


def test_the_hash_is_the_same_on_every_machine_and_sees_only_ids(tokenizers, tmp_path):
    before = tokenizer_hash(tokenizers["byte level"])
    assert before == "3abccf9bda482140e8096d1b5d4224884849073af32fd7c54e596cd6ddc9b72c"
    assert tokenizer_hash(load_tokenizer(save_byte_level(tmp_path, CHAT_TEMPLATE))) == before
    assert tokenizer_hash(tokenizers["byte fallback"]) != before

    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    assert tokenizer_hash(load_tokenizer(tmp_path)) != before


def test_a_tokenizer_that_is_code_is_refused_and_never_run(tmp_path):
    config = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own"}))
    (tmp_path / "tokenizer.model").write_bytes(b"")
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(UserError, match="is custom code, which is never run here"):
        load_tokenizer(tmp_path)
