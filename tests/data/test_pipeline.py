import contextlib
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_jax.data.pipeline import CutInPieces, PipelineConfig, _Numbered, make_pipeline
from clover_jax.data.records import TokenRow
from clover_jax.data.samples import Reading, RecordSamples

CONFIG = PipelineConfig(batch_size=3, seq_len=16, seed=0)


def counting_rows(count=30, seed=0):
    """Return documents of consecutive ids, each from its own start."""
    rng = np.random.default_rng(seed)
    rows = []
    for document in range(count):
        ids = tuple(range(100 * document, 100 * document + rng.integers(3, 40)))
        rows.append(TokenRow("f", ids[:2], ids[2:]))
    return rows


@contextlib.contextmanager
def pipeline(rows, config=CONFIG):
    with contextlib.closing(
        iter(make_pipeline(RecordSamples(rows, Reading(None, 100_000, config.seq_len)), config))
    ) as batches:
        yield batches


def take(count, rows, config=CONFIG):
    with pipeline(rows, config) as batches:
        return list(itertools.islice(batches, count))


def assert_equal(first, second):
    for a, b in zip(first, second, strict=True):
        for name in ("tokens", "segment_ids", "positions", "loss_mask"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_the_same_seed_gives_the_same_batches_and_another_gives_others():
    rows = counting_rows()
    assert_equal(take(8, rows), take(8, rows))
    other = take(8, rows, PipelineConfig(3, 16, seed=1))
    assert any((a.tokens != b.tokens).any() for a, b in zip(take(8, rows), other, strict=True))


@pytest.mark.parametrize("position", [0, 1, 7, 25])
def test_an_iterator_goes_on_from_its_saved_state(position):
    rows = counting_rows()
    with pipeline(rows) as batches:
        list(itertools.islice(batches, position))
        state = json.loads(json.dumps(batches.get_state()))
        expected = list(itertools.islice(batches, 10))
    with pipeline(rows) as batches:
        batches.set_state(state)
        assert_equal(expected, list(itertools.islice(batches, 10)))


def test_segments_are_pieces_of_documents_with_their_masks():
    for batch in take(12, counting_rows()):
        assert batch.tokens.shape == (3, 16)
        for row in range(3):
            for segment in range(1, batch.segment_ids[row].max() + 1):
                at = batch.segment_ids[row] == segment
                ids = batch.tokens[row][at]
                np.testing.assert_array_equal(np.diff(ids), 1)
                np.testing.assert_array_equal(batch.positions[row][at], np.arange(len(ids)))
                np.testing.assert_array_equal(batch.loss_mask[row][at], ids % 100 >= 2)
        padding = batch.segment_ids == 0
        assert not batch.loss_mask[padding].any()
        assert not batch.tokens[padding].any()


def test_an_epoch_holds_every_token_that_can_be_learned():
    rows = counting_rows(count=40)
    seen = {int(t) for b in take(40, rows) for t in b.tokens[b.segment_ids > 0]}
    wanted = {token for row in rows for token in (*row.prompt_ids, *row.output_ids)[1:-1]}
    # The pieces at the end of a document that are one token long have no pair.
    assert len(wanted - seen) <= len(rows)


def test_rows_are_mostly_full():
    batches = take(20, counting_rows(count=200))
    assert np.mean([batch.segment_ids > 0 for batch in batches]) > 0.85


def test_the_cut_gives_the_docstrings_example():
    arrays = {"tokens": np.arange(8), "loss_mask": np.ones(8, bool)}
    pieces = CutInPieces(3).flat_map(arrays)
    assert [piece["tokens"].tolist() for piece in pieces] == [[0, 1, 2], [3, 4, 5]]


def test_every_token_knows_its_sample_and_its_place_there():
    samples = RecordSamples(counting_rows(), Reading(None, 10_000, CONFIG.seq_len))
    numbered = _Numbered(samples)
    assert numbered[7]["sample"].tolist() == [7] * len(samples[7].tokens)
    assert numbered[7]["place"].tolist() == list(range(len(samples[7].tokens)))


@settings(max_examples=50)
@given(st.lists(st.booleans(), max_size=40), st.integers(2, 12))
def test_every_piece_fits_and_has_something_to_learn(mask, seq_len):
    arrays = {"tokens": np.arange(len(mask)), "loss_mask": np.array(mask, bool)}
    pieces = CutInPieces(seq_len).flat_map(arrays)
    places = {int(token) for piece in pieces for token in piece["tokens"]}
    for at in range(0, len(mask), seq_len):
        # A token is read, one that counts is emitted, and another one is drafted.
        part = mask[at : at + seq_len]
        has_pair = any(a and b for a, b in itertools.pairwise(part[1:]))
        assert (at in places) == has_pair
        assert places.issuperset(range(at, at + len(part))) or not has_pair


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match=r"batch_size \(0\) must be at least 1"):
        PipelineConfig(batch_size=0, seq_len=16)


def test_a_record_that_cannot_be_used_is_named_and_left_out(capsys):
    rows = [*counting_rows(), TokenRow("f:9", (1,), (100_000,))]
    take(40, rows)
    error = capsys.readouterr().err
    assert error.startswith("left out a sample: f:9: token id 100000 is outside the base's voc")
    assert len(error.splitlines()) == 1
