"""Folders with a SentencePiece model only: the ids of its own library, and no code that runs."""

import json

import pytest

from clover_jax.checkpoints.loading import load_base
from clover_jax.data import tokenizer as tokenizer_module
from clover_jax.data.detokenization import decode_text
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.errors import UserError
from tests.tiny_checkpoints import copy_of

pytest.importorskip("sentencepiece")


@pytest.fixture(scope="module")
def fixtures(fixtures_dir):
    return fixtures_dir / "sentencepiece"


@pytest.fixture(scope="module")
def expected(fixtures):
    return json.loads((fixtures / "expected.json").read_text(encoding="utf-8"))


def save_folder(folder, model, name="LlamaTokenizer", **settings):
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


@pytest.mark.parametrize("kind", ["llama", "baichuan", "symbols", "plain"])
def test_ids_and_texts_are_those_of_the_library(fixtures, expected, tmp_path, kind):
    name = "BaiChuanTokenizer" if kind == "baichuan" else "LlamaTokenizer"
    folder = save_folder(tmp_path, fixtures / f"{kind}.model", name, add_bos_token=False)
    tokenizer = load_tokenizer(folder)
    assert [tokenizer(text).input_ids for text in expected["texts"]] == expected["ids"][kind]
    if kind != "plain":  # without byte fallback the library writes ⁇ for what no piece covers
        texts = [tokenizer.decode(ids) for ids in expected["ids"][kind]]
        assert texts == expected["decoded"][kind]


def test_baichuans_is_read_without_its_code(fixtures, tmp_path):
    template = "{% for m in messages %}<reserved_1>{{ m['content'] }}{% endfor %}<reserved_12>"
    name, settings = "BaichuanTokenizer", {"add_bos_token": False, "chat_template": template}
    tokenizer = load_tokenizer(save_folder(tmp_path, fixtures / "baichuan.model", name, **settings))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer.pad_token is None
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    ids = tokenizer(chat).input_ids
    assert [ids[0], ids[-1]] == tokenizer.convert_tokens_to_ids(["<reserved_1>", "<reserved_12>"])
    assert decode_text(tokenizer, [*ids, 2]) == "<reserved_1>the<reserved_12>"


@pytest.mark.parametrize("legacy, parts", [(True, ["▁the", "</s>", "▁the"]), (False, None)])
def test_text_behind_a_special_token_starts_with_a_space_as_before(
    fixtures, expected, tmp_path, legacy, parts
):
    save_folder(tmp_path, fixtures / "llama.model", legacy=legacy)
    tokenizer = load_tokenizer(tmp_path)
    _, *found = tokenizer.tokenize("the</s>the", add_special_tokens=True)
    assert found[:2] == ["▁the", "</s>"]
    assert (found == parts) if parts else (found[2] != "▁the" and "".join(found[2:]) == "the")
    # Vicuna's texts start with BOS, without a setting that asks for it.
    index = expected["texts"].index("the")
    assert tokenizer("the").input_ids == [1, *expected["ids"]["llama"][index]]


def test_added_tokens_follow_the_models(fixtures, tmp_path):
    decoder = {"400": {"content": "<pad>", "special": True}}
    folder = save_folder(tmp_path, fixtures / "llama.model", added_tokens_decoder=decoder)
    (folder / "added_tokens.json").write_text('{"<more>": 401}')
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<more>"]) == [400, 401]
    assert tokenizer("a<more><pad>").input_ids[-2:] == [401, 400]
    (folder / "added_tokens.json").write_text('{"<more>": 500}')
    with pytest.raises(
        UserError, match="its added token '<more>' should have id 500, but gets 401"
    ):
        load_tokenizer(folder)


def test_a_llama_without_settings_is_known_by_its_config(fixtures, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((fixtures / "llama.model").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    assert load_tokenizer(tmp_path)("the").input_ids[0] == 1


def test_one_that_is_too_large_for_its_base_is_refused(fixtures, fixtures_dir, tmp_path):
    copy_of(fixtures_dir / "clover2_reference" / "base", tmp_path / "base")
    save_folder(tmp_path / "base", fixtures / "llama.model")
    with pytest.raises(UserError, match="has id 399, but the embedding has only 96 rows"):
        load_base(str(tmp_path / "base"))


@pytest.mark.parametrize("size", [0, 700, 3000])
def test_a_file_that_is_not_a_model_is_refused(fixtures, tmp_path, size):
    path = save_folder(tmp_path, fixtures / "llama.model") / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=f"{tmp_path}: its tokenizer cannot be loaded: "):
        load_tokenizer(tmp_path)


def test_the_package_that_is_missing_is_named(fixtures, tmp_path, monkeypatch):
    save_folder(tmp_path, fixtures / "llama.model")
    monkeypatch.setattr(tokenizer_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install sentencepiece"):
        load_tokenizer(tmp_path)
