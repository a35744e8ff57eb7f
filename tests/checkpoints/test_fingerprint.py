"""A fingerprint is the same for any dtype, and differs for another base."""

import dataclasses

import jax
import jax.numpy as jnp

from clover_jax.checkpoints.base import BaseFingerprint, checksum, differences, fingerprint
from clover_jax.checkpoints.loading import load_base
from tests.tiny_checkpoints import random_base
from tests.tiny_models import TINY
from tests.tiny_models import random_base as random_params
from tests.tiny_tokenizers import CHAT_TEMPLATE, save_byte_level


def test_the_loaded_dtype_does_not_matter(fixtures_dir):
    source = str(fixtures_dir / "clover2_reference" / "base")
    narrow, wide = (fingerprint(load_base(source, dtype)) for dtype in (jnp.bfloat16, jnp.float32))
    assert narrow == wide
    assert (wide.vocab_size, wide.tokenizer, wide.chat_template) == (96, None, None)


def test_other_weights_and_shapes_differ(tmp_path):
    one, other = (fingerprint(random_base(tmp_path, seed=seed)) for seed in (0, 1))
    assert differences(one, one) == {}
    assert differences(one, other) == {"lm_head": (one.lm_head, other.lm_head)}
    deeper = random_base(tmp_path, dataclasses.replace(TINY, num_layers=4))
    assert differences(one, fingerprint(deeper))["num_layers"] == (3, 4)


def test_tied_embeddings_are_their_own_output_matrix(tmp_path):
    base = random_base(tmp_path, dataclasses.replace(TINY, tie_word_embeddings=True))
    untied = dataclasses.replace(base, params=base.params | {"lm_head": base.params["embedding"]})
    assert fingerprint(base) == fingerprint(untied)


def test_the_tokenizer_and_its_template_count_where_both_sides_have_them(tmp_path):
    base = random_base(tmp_path)
    bare = fingerprint(base)
    save_byte_level(tmp_path)
    plain = fingerprint(base)
    save_byte_level(tmp_path, CHAT_TEMPLATE)
    chatty = fingerprint(base)
    assert plain.tokenizer == chatty.tokenizer is not None
    assert plain.chat_template is None
    assert chatty.chat_template is not None
    assert differences(plain, chatty) == {}
    assert differences(bare, plain) == {}, "a folder without a tokenizer may be the same base"
    save_byte_level(tmp_path, CHAT_TEMPLATE + " ")
    edited = fingerprint(base)
    hashes = (chatty.chat_template, edited.chat_template)
    assert differences(chatty, edited) == {"chat_template": hashes}
    other = dataclasses.replace(plain, tokenizer="other")
    assert differences(plain, other) == {"tokenizer": (plain.tokenizer, "other")}


def test_json_round_trip(tmp_path):
    written = fingerprint(random_base(tmp_path))
    assert BaseFingerprint.from_dict(written.to_dict()) == written


def test_a_checksum_tells_any_change_and_any_exchange():
    params = random_params(TINY)
    known = checksum(params)
    assert checksum(jax.tree.map(lambda x: x + 0, params)) == known
    up = params["layers_1"]["mlp"]["down"]
    for other in (
        up.at[3, 5].add(1e-3),
        2 * up,
        up[::-1],
        up[:, ::-1],
        up.at[jnp.array([0, 7])].set(up[jnp.array([7, 0])]),
        up.astype(jnp.bfloat16),
    ):
        layer = params["layers_1"] | {"mlp": params["layers_1"]["mlp"] | {"down": other}}
        assert checksum(params | {"layers_1": layer}) != known
