"""Tokenizers load quietly and offline, and are known by their ids."""

import json

import pytest

from clover_jax.errors import UserError
from clover_jax.tokenizers.tokenizer import load_tokenizer, tokenizer_hash
from tests.tiny_tokenizers import CHAT_TEMPLATE, save_byte_fallback, save_byte_level

KINDS = {"byte level": save_byte_level, "byte fallback": save_byte_fallback}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The tiny tokenizers by kind, loaded from files."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {kind: load_tokenizer(save(folder / kind)) for kind, save in KINDS.items()}


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
