"""How the tests of `prepare` make a folder and read it again."""

import itertools
from contextlib import closing

import numpy as np

from clover_jax.data.pipeline import PipelineConfig, make_pipeline
from clover_jax.data.prepared import PreparedSamples
from clover_jax.data.samples import Reading
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.data.training_data import load_training_data
from tests.tiny_folders import SPEAKING

SEQ_LEN = 64
FLAGS = {
    "seq_len": SEQ_LEN,
    "batch_size": 2,
    "features": "clover2",
    "feature_dtype": "float32",
}


def batches(samples, count=12, hidden_rows=None):
    dataset = make_pipeline(samples, PipelineConfig(2, SEQ_LEN), hidden_rows)
    with closing(iter(dataset)) as iterator:
        return list(itertools.islice(iterator, count))


def load(spec, base_folder, names=()):
    reading = Reading(load_tokenizer(base_folder), SPEAKING.vocab_size, SEQ_LEN)
    return load_training_data(str(spec), reading, names)


def assert_same_samples(ours, others):
    """Two folders have the same samples; activations may be those of another row of a batch."""
    mine, theirs = (PreparedSamples(folder, ("pre_norm",)) for folder in (ours, others))
    assert len(mine) == len(theirs)
    for index in range(len(mine)):
        np.testing.assert_array_equal(mine[index].tokens, theirs[index].tokens)
        hidden = [samples.hidden(index)["pre_norm"] for samples in (mine, theirs)]
        np.testing.assert_allclose(*hidden, atol=2e-6)
