"""What a prepared folder holds: the samples and activations that raw data would give."""

import jax
import numpy as np
import pytest

from clover_jax.checkpoints.loading import load_base
from clover_jax.data.prepared import PreparedSamples, heldout_rows
from clover_jax.data.samples import SampleCounts
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.data.training_data import load_training_data
from clover_jax.models.decoder import Decoder, causal_mask
from clover_jax.training.features import feature_names
from tests.prepare.prepared_data import SEQ_LEN, batches, load
from tests.tiny_folders import SPEAKING
from tests.tiny_models import TINY


def test_prepared_data_give_the_batches_of_the_raw_files(base, data, prepared):
    raw, ready = load(data, base), load(prepared, base)
    assert raw.hash == ready.hash
    jax.tree.map(np.testing.assert_array_equal, batches(raw.samples), batches(ready.samples))


def test_the_identity_names_all_that_samples_depend_on(base, data, prepared):
    raw, ready = load(data, base), load(prepared, base)
    assert raw.identity == ready.identity
    assert set(raw.identity) == {"data", "tokenizer", "chat_template"}
    tokenizer = load_tokenizer(base)
    tokenizer.chat_template += "{# edited #}"
    edited = load_training_data(str(data), tokenizer, SPEAKING.vocab_size, SEQ_LEN).identity
    assert {name for name in edited if edited[name] != raw.identity[name]} == {"chat_template"}
    assert load(prepared, base, ("pre_norm",)).identity["activations"]


def test_what_is_held_out_is_kept_apart(base, data, prepared):
    raw = load(data, base)
    rows = heldout_rows(prepared)
    assert len(rows) == len(raw.heldout) > 0
    assert rows[0].prompt_ids
    assert rows[0].output_ids


def test_cached_activations_are_those_of_the_base(base, prepared):
    loaded = load_base(str(base))
    samples = PreparedSamples(prepared, ("pre_norm",))
    forward = jax.jit(Decoder(loaded.config).apply)  # compiled, as the cached ones were
    for index in range(3):
        hidden = samples.hidden(index)["pre_norm"]
        tokens = samples[index].tokens[None, :SEQ_LEN]
        positions = np.arange(tokens.shape[1])[None]
        mask = causal_mask(1, tokens.shape[1])
        output = forward({"params": loaded.params}, tokens, positions, mask)
        np.testing.assert_allclose(hidden[:SEQ_LEN], output.hidden["pre_norm"][0], atol=2e-6)
        assert len(hidden) == len(samples[index].tokens)


@pytest.mark.parametrize(
    "spec, kept",
    [
        ("pre_norm, post_norm", ("post_norm", "pre_norm")),
        ("pre_norm", ("pre_norm",)),
        ("layer_1", ("layer_1", "post_norm")),
        ("medusa", ("post_norm",)),
    ],
)
def test_all_activations_that_were_named_are_kept(spec, kept):
    assert feature_names(spec, TINY) == kept


def test_a_process_reads_the_activations_of_its_own_rows_only(prepared, monkeypatch):
    samples = PreparedSamples(prepared, ("pre_norm",))
    whole = batches(samples)
    read, hidden = [], samples.hidden
    monkeypatch.setattr(samples, "hidden", lambda index: read.append(index) or hidden(index))
    all_read = len(batches(samples)) and len(read)
    read.clear()
    mine = batches(samples, hidden_rows=[1])
    assert len(read) < 0.8 * all_read
    for ours, every in zip(mine, whole, strict=True):
        np.testing.assert_array_equal(ours.tokens, every.tokens)
        np.testing.assert_array_equal(ours.hidden["pre_norm"][1], every.hidden["pre_norm"][1])
        assert every.hidden["pre_norm"][0].any()
        assert not ours.hidden["pre_norm"][0].any()


def test_shards_of_earlier_versions_are_no_useless_data():
    counts = SampleCounts(samples=2, tokens=9, counted=5, pieces=2).to_dict()
    assert SampleCounts.total([counts, counts]).pieces == 4
    del counts["pieces"]
    assert SampleCounts.total([counts]).pieces == 5
