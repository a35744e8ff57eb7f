"""What a prepared folder holds, previews, and data that is refused."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from clover_jax import prepare
from clover_jax.checkpoints.loading import load_base
from clover_jax.cli.command_flags import parse_flags
from clover_jax.data import prepared as prepared_folder
from clover_jax.data.prepared import PreparedSamples, heldout_rows
from clover_jax.data.samples import Reading, SampleCounts
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.data.training_data import load_training_data
from clover_jax.errors import UserError
from clover_jax.models.decoder import Decoder, causal_mask
from clover_jax.training import features
from clover_jax.training.features import feature_names
from clover_jax.training.settings import PrepareOptions
from tests.conftest import REPOSITORY
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
    reading = Reading(tokenizer, SPEAKING.vocab_size, SEQ_LEN)
    edited = load_training_data(str(data), reading).identity
    assert {name for name in edited if edited[name] != raw.identity[name]} == {"chat_template"}
    assert load(prepared, base, ("pre_norm",)).identity["activations"]


def test_what_is_held_out_is_kept_apart(base, data, prepared, monkeypatch, capsys):
    raw = load(data, base)
    rows = heldout_rows(prepared)
    assert len(rows) == len(raw.heldout) > 1
    assert rows[0].prompt_ids
    assert rows[0].output_ids
    assert "held-out samples" not in capsys.readouterr().err
    monkeypatch.setattr(prepared_folder, "MAX_HELDOUT_READ", 1)
    assert heldout_rows(prepared) == rows[:1]
    said = f"the first 1 of {len(rows)} held-out samples are read"
    assert capsys.readouterr().err == f"{prepared}/heldout.json: {said}\n"


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


def test_preview_marks_what_counts(command, base, data):
    status, out, _ = command("--preview", base=base, data=data, seq_len=SEQ_LEN)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith(f"== {data}:")
    assert lines[0].endswith("to learn, between ⟦ and ⟧")
    assert lines[1].startswith("<s>[user]")
    assert lines[1].index("[assistant]") + len("[assistant]") == lines[1].index("⟦")
    assert json.loads(lines[-1])["looked_at"]["counted"] > 0


def test_preview_is_in_color_on_a_terminal(command, base, data, monkeypatch):
    monkeypatch.setattr("clover_jax.training.prepare_run.wants_color", lambda file: True)
    _, out, _ = command("--preview", base=base, data=data, seq_len=SEQ_LEN)
    assert "[assistant]\033[0m\033[32m" in out
    assert out.splitlines()[0].endswith("to learn, in green")
    assert "⟦" not in out


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"features": "clover9"}, "'clover9' is neither a drafter"),
        ({"features": "layer_2"}, "layer_0 to layer_1"),
        ({"seq_len": 4096}, "--seq_len=4096 is longer than the base's context, 128"),
        ({"seq_len": 8, "max_truncated": 0.05}, "would be truncated"),
        ({"data": "/missing.jsonl"}, "no such file"),
        ({"draft": "x"}, "--draft is for --regenerate"),
        ({"mesh": "data=2"}, "--mesh=data=2 is for --regenerate and --features"),
        ({"chat_template": "alpaca"}, "no such file, and none of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mistake_is_one_line_and_status_2(command, base, data, tmp_path, changes, message):
    flags = {"base": base, "data": data, "output": tmp_path / "out", "seq_len": SEQ_LEN}
    status, out, err = command(**(flags | changes))
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert message in line
    assert not list(tmp_path.glob("out/*.array_record"))


def test_every_option_has_a_flag():
    flags = parse_flags(prepare.define_flags, [])
    names = {field.name for field in dataclasses.fields(PrepareOptions)}
    assert names - {"spec", "warping"} <= set(flags)


@pytest.mark.parametrize(
    "free, yes, message", [(1e12, False, "add --yes"), (1e9, True, "too small")]
)
def test_large_files_need_consent_and_a_disk(monkeypatch, tmp_path, capsys, free, yes, message):
    monkeypatch.setattr(
        features.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free})
    )
    options = type("Options", (), {"directory": tmp_path, "yes": yes})
    with pytest.raises(UserError, match=message):
        features._agree_to_size(20_000_000_000, 0, options)
    assert "20.0 GB for activations" in capsys.readouterr().err


def test_samples_of_other_settings_are_refused_with_both(base, prepared):
    own, edited = load_tokenizer(base), load_tokenizer(base)
    edited.chat_template += "{# edited #}"
    other, size = load_tokenizer(REPOSITORY / "clover_jax/assets/tiny"), SPEAKING.vocab_size
    for given, message in (
        ((other, 300, SEQ_LEN), r"another tokenizer than the base's: \w{12} against \w{12}"),
        ((own, 200, SEQ_LEN), "for a vocabulary of 261 tokens and the base has 200"),
        ((edited, size, SEQ_LEN), "was prepared with another chat template than"),
        ((own, size, 32), "prepared with --seq_len=64, not 32"),
    ):
        with pytest.raises(UserError, match=message):
            load_training_data(str(prepared), Reading(*given))


def test_a_prepared_folder_among_others_is_not_read_as_raw_data(base, data, prepared):
    with pytest.raises(UserError, match="was made by `prepare`.*give it to `train`, alone"):
        load(f"{data},{prepared}", base)


@pytest.mark.parametrize("written", ["heldout.json", "regenerated.jsonl.manifest.json"])
def test_a_folder_that_is_not_finished_is_not_read_as_raw_data(base, prepared, tmp_path, written):
    for name in (written, "regenerated.jsonl"):
        shutil.copy(prepared / "heldout.json", tmp_path / name)
    with pytest.raises(UserError, match="is not complete; repeat the `prepare`"):
        load(str(tmp_path), base)


def test_a_train_json_of_the_users_is_raw_data(base, tmp_path):
    rows = [{"prompt_ids": [1, 2], "output_ids": [3, 4, n]} for n in range(5, 25)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    assert len(load(str(tmp_path), base).samples)
