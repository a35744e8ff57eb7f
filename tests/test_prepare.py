"""The command `prepare`: preview, prepared folders, cached activations, answers of the base."""

import dataclasses
import itertools
import json
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import closing

import jax
import numpy as np
import pytest

from clover_jax import cli, prepare
from clover_jax.command_flags import parse_flags
from clover_jax.data.pipeline import PipelineConfig, make_pipeline
from clover_jax.data.prepared import PreparedSamples, heldout_rows
from clover_jax.data.sample_checks import SampleCounts
from clover_jax.data.training_data import load_training_data
from clover_jax.errors import UserError
from clover_jax.models.decoder import Decoder, causal_mask
from clover_jax.models.loading import load_base
from clover_jax.models.tokenizer import load_tokenizer
from clover_jax.preparation import features
from clover_jax.preparation.samples import add_counts
from clover_jax.training.run import run_training
from clover_jax.training.settings import TrainSettings
from tests.conftest import REPOSITORY, WARNINGS
from tests.tiny_folders import SPEAKING, save_tiny_base
from tests.tiny_models import random_base
from tests.tiny_tokenizers import CHAT_TEMPLATE

SEQ_LEN = 64


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_base(tmp_path_factory.mktemp("models") / "base", template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def other_base(tmp_path_factory):
    from clover_jax.training.base_folder import save_base
    from tests.tiny_tokenizers import save_byte_level

    folder = tmp_path_factory.mktemp("models") / "other"
    folder.mkdir()
    save_byte_level(folder, CHAT_TEMPLATE)
    save_base(folder, SPEAKING, random_base(SPEAKING, seed=7))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rng = np.random.default_rng(0)
    words = ["the", "hat", "he", "had", "it", "be", "a"]
    with path.open("w") as file:
        for _ in range(60):
            said = [" ".join(rng.choice(words, size)) for size in rng.integers(1, 4, 2)]
            file.write(json.dumps({"prompt": said[0], "response": said[1]}) + "\n")
        file.write(json.dumps({"text": "he had the hat " * 12}) + "\n")
    return path


def run(capsys, *flags, **values):
    arguments = [*flags, *(f"--{name}={value}" for name, value in values.items())]
    status = cli.run(prepare.main, prepare.define_flags, arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def prepared(base, data, tmp_path_factory):
    """A folder with float32 activations for Clover-2."""
    output = tmp_path_factory.mktemp("prepared") / "out"
    flags = {"base": base, "data": data, "output": output, "seq_len": SEQ_LEN, "batch_size": 2}
    flags |= {"features": "clover2", "feature_dtype": "float32"}
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    assert cli.run(prepare.main, prepare.define_flags, arguments) == 0
    return output


def batches(samples, count=12, hidden_rows=None):
    dataset = make_pipeline(samples, PipelineConfig(2, SEQ_LEN), hidden_rows)
    with closing(iter(dataset)) as iterator:
        return list(itertools.islice(iterator, count))


def load(spec, base_folder, names=()):
    tokenizer = load_tokenizer(base_folder)
    return load_training_data(str(spec), tokenizer, SPEAKING.vocab_size, SEQ_LEN, names)


def test_preview_marks_what_counts(capsys, base, data):
    status, out, _ = run(capsys, "--preview", base=base, data=data, seq_len=SEQ_LEN)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith(f"== {data}:")
    assert lines[1].startswith("<s>[user]")
    assert lines[1].index("[assistant]") + len("[assistant]") == lines[1].index("⟦")
    assert json.loads(lines[-1])["looked_at"]["counted"] > 0


def test_preview_is_in_colour_on_a_terminal(base, data, monkeypatch, capsys):
    monkeypatch.setattr("clover_jax.preparation.preview.wants_colour", lambda file: True)
    _, out, _ = run(capsys, "--preview", base=base, data=data, seq_len=SEQ_LEN)
    assert "[assistant]\033[0m\033[32m" in out
    assert "⟦" not in out


def test_prepared_data_give_the_batches_of_the_raw_files(base, data, prepared):
    raw, ready = load(data, base), load(prepared, base)
    assert raw.hash == ready.hash
    jax.tree.map(np.testing.assert_array_equal, batches(raw.samples), batches(ready.samples))


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


def settings(base, spec, **changes):
    values = {
        "base": str(base),
        "data": str(spec),
        "steps": 50,
        "batch_size": 2,
        "seq_len": SEQ_LEN,
        "warmup_steps": 10,
        "log_every": 1,
        "num_augmenting_layers": 1,
        "num_positions": 3,
        "checkpoint_every": 0,
    }
    return TrainSettings(**(values | changes))


def losses(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_cached_teacher_gives_the_loss_curve_of_an_online_one(base, data, prepared, tmp_path):
    run_training(settings(base, data), tmp_path / "online", threading.Event())
    cached = settings(base, prepared, teacher="cached")
    run_training(cached, tmp_path / "cached", threading.Event())
    curves = losses(tmp_path / "online"), losses(tmp_path / "cached")
    assert len(curves[0]) == 50
    np.testing.assert_allclose(*curves, rtol=1e-5)
    assert curves[0][-1] < 0.9 * curves[0][0]
    card = json.loads((tmp_path / "online" / "draft" / "draft.json").read_text())
    assert card["chat_template"] == CHAT_TEMPLATE


def test_activations_of_another_base_are_refused_with_both_hashes(other_base, prepared, tmp_path):
    with pytest.raises(UserError, match=r"of another base than .*lm_head \w{12} against \w{12}"):
        run_training(settings(other_base, prepared, teacher="cached"), tmp_path, threading.Event())


def test_samples_of_another_tokenizer_are_refused_with_both_hashes(prepared):
    with pytest.raises(
        UserError, match=r"another tokenizer than the base's: \w{12} against \w{12}"
    ):
        load_training_data(
            str(prepared), load_tokenizer(REPOSITORY / "clover_jax/assets/tiny"), 300, SEQ_LEN
        )


@pytest.mark.parametrize(
    "names, message",
    [
        (("layer_1", "post_norm"), "has the activations pre_norm, but not layer_1, post_norm"),
        (("pre_norm",), None),
    ],
)
def test_activations_that_the_head_reads_must_be_there(base, prepared, names, message):
    if message is None:
        data = load(prepared, base, names)
        assert data.samples.hidden(0)["pre_norm"].dtype == np.float32
        assert not data.tokens_only.hidden_names
    else:
        with pytest.raises(UserError, match=message):
            load(prepared, base, names)


def test_a_cached_teacher_needs_a_prepared_folder(base, data):
    with pytest.raises(UserError, match="has no cached activations; make them with `prepare"):
        load(data, base, ("pre_norm",))


def test_another_row_length_is_refused(base, prepared):
    with pytest.raises(UserError, match="prepared with --seq_len=64, not 32"):
        load_training_data(str(prepared), load_tokenizer(base), SPEAKING.vocab_size, 32)


def test_shards_of_earlier_versions_are_no_useless_data():
    counts = SampleCounts(samples=2, tokens=9, counted=5, pieces=2).to_dict()
    assert add_counts(iter([counts, counts])).pieces == 4
    del counts["pieces"]
    add_counts(iter([counts])).check(SEQ_LEN, 0.05)


def test_a_prepared_folder_among_others_is_not_read_as_raw_data(base, data, prepared):
    with pytest.raises(UserError, match="was made by `prepare`.*give it to `train`, alone"):
        load(f"{data},{prepared}", base)


def test_samples_for_a_larger_vocabulary_are_refused(base, prepared):
    with pytest.raises(UserError, match="for a vocabulary of 261 tokens and the base has 200"):
        load_training_data(str(prepared), load_tokenizer(base), 200, SEQ_LEN)


@pytest.mark.parametrize("writes", [3, 9], ids=["in the samples", "in the activations"])
def test_a_killed_run_goes_on_where_it_was(capsys, base, data, prepared, tmp_path, writes):
    source = (
        "import os, sys; from clover_jax import cli, prepare\n"
        "from clover_jax.data import shards; from clover_jax.preparation import features, samples\n"
        "features.SHARD_BYTES, samples.SHARD_BYTES = 40_000, 4_000\n"
        "write, left = shards.ShardWriter.write, [int(sys.argv[1])]\n"
        "def killing(writer, *rest, **facts):\n"
        "    if not left[0]: os.kill(os.getpid(), 9)\n"
        "    left[0] -= 1; write(writer, *rest, **facts)\n"
        "shards.ShardWriter.write = killing\n"
        "sys.exit(cli.run(prepare.main, prepare.define_flags, sys.argv[2:]))\n"
    )
    flags = {"base": base, "data": data, "seq_len": SEQ_LEN, "batch_size": 2}
    flags |= {"features": "clover2", "feature_dtype": "float32", "output": tmp_path}
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    killed = subprocess.run(
        [sys.executable, *WARNINGS, "-c", source, str(writes), *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert len(list(tmp_path.glob("*.array_record"))) == writes
    with pytest.raises(UserError, match="not complete|has no cached activations"):
        load(str(tmp_path), base, ("pre_norm",))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.array_record")}
    status, _, err = run(capsys, **flags)
    assert status == 0, err
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in kept}.items()
    ours, whole = (PreparedSamples(folder, ("pre_norm",)) for folder in (tmp_path, prepared))
    assert len(ours) == len(whole)
    for index in range(len(ours)):
        np.testing.assert_array_equal(ours[index].tokens, whole[index].tokens)
        # A sample may have been read in another row of the batch.
        hidden = [samples.hidden(index)["pre_norm"] for samples in (ours, whole)]
        np.testing.assert_allclose(*hidden, atol=2e-6)


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


def test_a_finished_folder_is_left_alone_and_another_command_refused(
    capsys, base, data, prepared, monkeypatch
):
    flags = {"base": base, "data": data, "output": prepared, "seq_len": SEQ_LEN}
    flags |= {"features": "clover2", "feature_dtype": "float32"}
    before = {path: path.stat().st_mtime_ns for path in prepared.glob("*.array_record")}
    status, out, _ = run(capsys, **flags)
    assert status == 0
    assert json.loads(out.splitlines()[-1])["features"] == ["pre_norm"]
    assert {path: path.stat().st_mtime_ns for path in prepared.glob("*.array_record")} == before
    status, out, err = run(capsys, **(flags | {"feature_dtype": "bfloat16"}))
    assert (status, out) == (2, "")
    assert "another dtype ('float32', not 'bfloat16')" in err


@pytest.mark.parametrize(
    "free, yes, message", [(1e12, False, "add --yes"), (1e9, True, "too small")]
)
def test_large_files_need_consent_and_a_disk(monkeypatch, tmp_path, capsys, free, yes, message):
    monkeypatch.setattr(
        features.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free})
    )
    options = type("Options", (), {"output": tmp_path, "yes": yes})
    with pytest.raises(UserError, match=message):
        features._agree_to_size(20_000_000_000, 0, options)
    assert "20.0 GB for activations" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"features": "clover9"}, "'clover9' is neither a drafter"),
        ({"features": "layer_2"}, "layer_0 to layer_1"),
        ({"seq_len": 4096}, "--seq_len=4096 is longer than the base's context, 128"),
        ({"seq_len": 8}, "would be truncated"),
        ({"data": "/missing.jsonl"}, "no such file"),
        ({"draft": "x"}, "--draft is for --regenerate"),
        ({"mesh": "data=2"}, "prepare uses one device"),
        ({"chat_template": "alpaca"}, "no such file, and none of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mistake_is_one_line_and_status_2(capsys, base, data, tmp_path, changes, message):
    flags = {"base": base, "data": data, "output": tmp_path / "out", "seq_len": SEQ_LEN}
    status, out, err = run(capsys, **(flags | changes))
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert message in line
    assert not list(tmp_path.glob("out/*.array_record"))


def test_every_option_has_a_flag():
    from clover_jax.preparation.options import PrepareOptions

    flags = parse_flags(prepare.define_flags, [])
    assert {field.name for field in dataclasses.fields(PrepareOptions)} <= set(flags)
