"""Heads of the official layout in other sizes than the release's own decode as the release does."""

import dataclasses
import json

import pytest

from clover_jax import api
from tests.foreign_heads import read_layout, write_layout
from tests.tiny_checkpoints import assert_same_tensors, copy_of, edit_json

# (positions, augmenting layers) of what the release's own code decoded; its README has the rest.
SIZES = [(4, 1), (4, 2), (5, 2), (5, 3), (6, 3)]


@pytest.fixture
def recorded(fixtures_dir):
    """Return a function from a size to the folder of what the release decoded in it."""
    folder = fixtures_dir / "clover2_release_sizes"
    return lambda size: folder / "positions{}_layers{}".format(*size)


@pytest.fixture
def load(tmp_path):
    """Return a function from a recorded folder to models with the release's very tree."""

    def load(folder, dtype="float32", **options):
        tree = tmp_path / "tree.json"
        tree.write_text(json.dumps(recording(folder)["tree"]))
        plain = api.load_base(str(folder / "base"), dtype=dtype)
        return api.load_draft(plain, folder / "clover2", tree=f"file:{tree}", **options)

    return load


def recording(folder):
    return json.loads((folder / "decoded.json").read_text())


def decode(models, rows, batch_size):
    """Decode the recorded prompts and return rows as recorded."""
    settings = {"max_new_tokens": len(rows[0]["output_ids"]), "ignore_eos": True}
    prompts = [row["prompt_ids"] for row in rows]
    decoded = list(api.generate_rows(models, prompts, batch_size=batch_size, **settings))
    decoded.sort(key=lambda row: row["index"])
    return [{name: row[name] for name in rows[0]} for row in decoded]


def accepted(rows):
    return [row["accepted"] for row in rows]


# The smallest alone and the largest in a batch; the rest takes longer.
CASES = [(size, alone) for size in SIZES for alone in (True, False)]
USUAL = [(SIZES[0], True), (SIZES[-1], False)]


@pytest.mark.parametrize(
    ("size", "alone"),
    [pytest.param(*case, marks=() if case in USUAL else pytest.mark.slow) for case in CASES],
)
def test_texts_and_accepted_lengths_are_the_release_s(recorded, load, size, alone):
    rows, models = recording(recorded(size))["rows"], load(recorded(size))
    config = models.draft.head.config
    assert (config.num_positions, config.num_augmenting_layers) == size
    lengths = {length for row in rows for length in row["accepted"]}
    assert len(lengths) >= 3
    assert max(lengths) >= 2
    assert decode(models, rows, batch_size=1 if alone else len(rows)) == rows


@pytest.mark.parametrize("size", SIZES)
def test_a_head_that_the_release_ran_is_written_as_it_was_read(recorded, load, tmp_path, size):
    models = load(recorded(size), dtype="bfloat16")  # as the tensors are stored
    draft = models.draft
    write_layout("clover2", tmp_path / "head", draft.head.config, draft.params, models.base)
    assert_same_tensors(recorded(size) / "clover2", tmp_path / "head")
    assert read_layout("clover2", tmp_path / "head", models.base)[0] == draft.head.config


def test_accepted_lengths_tell_the_rotary_base_of_the_head(recorded, load):
    folder = recorded((4, 1))
    theta = json.loads((folder / "clover2" / "config.json").read_text())["rope_theta"]
    assert theta == 5e5  # which the release does not look at
    rows = recording(folder)["rows"]
    found = decode(load(folder, draft_rope_theta=theta), rows, batch_size=len(rows))
    assert [row["output_ids"] for row in found] == [row["output_ids"] for row in rows]
    assert accepted(found) != accepted(rows)


@pytest.mark.parametrize(
    "size, part, change",
    [
        ((4, 1), "base", {"rope_theta": 1e4}),
        pytest.param((5, 3), "base", {"rms_norm_eps": 1e-5}, marks=pytest.mark.slow),
        pytest.param((5, 3), "clover2", {"rms_norm_eps": 1e-5}, marks=pytest.mark.slow),
    ],
)
def test_accepted_lengths_tell_what_a_config_says(recorded, load, tmp_path, size, part, change):
    folder = copy_of(recorded(size), tmp_path / "copy")
    edit_json(folder / part / "config.json", **change)
    rows = recording(folder)["rows"]
    assert accepted(decode(load(folder), rows, batch_size=len(rows))) != accepted(rows)


def test_accepted_lengths_tell_the_order_of_the_layers(recorded, load):
    folder = recorded((6, 3))
    rows, models = recording(folder)["rows"], load(folder)
    params = dict(models.draft.params)
    params["augmenting_0"], params["augmenting_2"] = params["augmenting_2"], params["augmenting_0"]
    swapped = dataclasses.replace(models, draft=dataclasses.replace(models.draft, params=params))
    assert accepted(decode(swapped, rows, batch_size=len(rows))) != accepted(rows)
