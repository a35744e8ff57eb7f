"""Folders with a SentencePiece model only: the ids of its own library, and no code that runs."""

import json

import pytest

from clover_jax.errors import UserError
from clover_jax.pretrained.loading import load_base
from clover_jax.tokenizers.detokenization import decode_text
from clover_jax.tokenizers.sentencepiece_model import (
    Kind,
    SentencePieceModel,
    TextPiece,
    read_sentencepiece,
)
from clover_jax.tokenizers.sentencepiece_tokenizer import build_tokenizer, merges_of
from clover_jax.tokenizers.tokenizer import load_tokenizer
from tests.tiny_checkpoints import copy_of

KINDS = ("llama", "baichuan", "symbols", "plain")


@pytest.fixture(scope="module")
def fixtures(fixtures_dir):
    return fixtures_dir / "sentencepiece"


@pytest.fixture(scope="module")
def expected(fixtures):
    return json.loads((fixtures / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_the_library(fixtures, expected, kind):
    model = read_sentencepiece(fixtures / f"{kind}.model")
    tokenizer = build_tokenizer(model)
    for text, ids in zip(expected["texts"], expected["ids"][kind], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, repr(text)
    if model.byte_fallback:  # else the library writes ⁇ for what no piece covers
        for ids, decoded in zip(expected["ids"][kind], expected["decoded"][kind], strict=True):
            assert tokenizer.decode(ids) == decoded


def test_merges_of_the_highest_score_come_first():
    pieces = [("a", -2), ("b", -3), ("ab", -0.0), ("c", -4), ("abc", -1), ("<s>", 0)]
    kinds = [Kind.NORMAL] * 5 + [Kind.CONTROL]
    listed = tuple(TextPiece(*piece, kind) for piece, kind in zip(pieces, kinds, strict=True))
    model = SentencePieceModel(listed, False, True, False, b"")
    assert merges_of(model) == [("a", "b"), ("ab", "c")]


def save_folder(folder, model, name, **settings):
    """Write a folder as a repository with a model only: its class `name` may be code in it."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.read_bytes())
    (folder / "tokenization_baichuan.py").write_text("raise SystemExit('the code was run')")
    auto_map = {"AutoTokenizer": [f"tokenization_baichuan.{name}", None]}
    roles = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": None,
    }
    values = {"tokenizer_class": name, "auto_map": auto_map} | roles | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", ["BaiChuanTokenizer", "BaichuanTokenizer"])
def test_baichuans_is_read_without_its_code(fixtures, expected, tmp_path, name):
    template = "{% for m in messages %}<reserved_1>{{ m['content'] }}{% endfor %}<reserved_12>"
    save_folder(
        tmp_path,
        fixtures / "baichuan.model",
        name,
        add_bos_token=False,
        add_eos_token=False,
        chat_template=template,
    )
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer(text).input_ids for text in expected["texts"]] == expected["ids"]["baichuan"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer.pad_token is None
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    ids = tokenizer(chat).input_ids
    assert [ids[0], ids[-1]] == tokenizer.convert_tokens_to_ids(["<reserved_1>", "<reserved_12>"])
    assert decode_text(tokenizer, [*ids, 2]) == "<reserved_1>the<reserved_12>"


def test_vicunas_starts_with_its_first_token(fixtures, expected, tmp_path):
    save_folder(tmp_path, fixtures / "llama.model", "LlamaTokenizer", legacy=False)
    tokenizer = load_tokenizer(tmp_path)
    index = expected["texts"].index("the")
    assert tokenizer("the").input_ids == [1, *expected["ids"]["llama"][index]]
    assert tokenizer("the").input_ids == tokenizer.encode("the")


@pytest.mark.parametrize("legacy, parts", [(True, ["▁the", "</s>", "▁the"]), (False, None)])
def test_text_behind_a_special_token_starts_with_a_space_as_before(
    fixtures, tmp_path, legacy, parts
):
    settings = {"legacy": legacy, "add_bos_token": False}
    save_folder(tmp_path, fixtures / "llama.model", "LlamaTokenizer", **settings)
    found = load_tokenizer(tmp_path).tokenize("the</s>the")
    assert found[:2] == ["▁the", "</s>"]
    assert (found == parts) if parts else (found[2] != "▁the" and "".join(found[2:]) == "the")


def test_added_tokens_follow_the_models(fixtures, tmp_path):
    folder = save_folder(
        tmp_path,
        fixtures / "llama.model",
        "LlamaTokenizer",
        added_tokens_decoder={"400": {"content": "<pad>", "special": True}},
    )
    (folder / "added_tokens.json").write_text('{"<more>": 401}')
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<more>"]) == [400, 401]
    assert tokenizer("a<more><pad>").input_ids[-2:] == [401, 400]
    (folder / "added_tokens.json").write_text('{"<more>": 500}')
    with pytest.raises(UserError, match="its added token '<more>' should have id 500"):
        load_tokenizer(folder)
    (folder / "added_tokens.json").write_text('{"": 401}')
    with pytest.raises(UserError, match="its added token with id 401 is an empty text"):
        load_tokenizer(folder)


def test_a_llama_without_settings_is_known_by_its_config(fixtures, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((fixtures / "llama.model").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    assert load_tokenizer(tmp_path)("the").input_ids[0] == 1


def test_one_that_is_too_large_for_its_base_is_refused(fixtures, fixtures_dir, tmp_path):
    copy_of(fixtures_dir / "clover2_reference" / "base", tmp_path / "base")
    save_folder(tmp_path / "base", fixtures / "llama.model", "LlamaTokenizer")
    with pytest.raises(UserError, match="has id 399, but the embedding has only 96 rows"):
        load_base(str(tmp_path / "base"))


BROKEN = {
    "cut": (lambda data: data[:3000], "it ends in the middle of a field"),
    "text": (lambda data: b"IQ== 0\n", "it ends in the middle of a field"),
    "empty": (lambda data: b"", "it has no pieces"),
    "of another kind": (lambda data: data.replace(b"\x18\x02", b"\x18\x01"), "not of the BPE kind"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_no_model_is_named(fixtures, tmp_path, case):
    spoil, message = BROKEN[case]
    save_folder(tmp_path, fixtures / "llama.model", "LlamaTokenizer")
    path = tmp_path / "tokenizer.model"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(UserError) as refused:
        load_tokenizer(tmp_path)
    assert str(refused.value).startswith(f"{path} is not a ")
    assert message in str(refused.value)


def test_every_cut_of_a_model_is_refused(fixtures, tmp_path):
    data, path = (fixtures / "plain.model").read_bytes(), tmp_path / "tokenizer.model"
    for size in range(0, len(data) - 100, 23):
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match=r"tokenizer\.model is not a "):
            read_sentencepiece(path)
