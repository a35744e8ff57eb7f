"""`pretrain` makes a folder that others read, resumes exactly, and names mistakes."""

import json
import threading

import jax
import numpy as np
import pytest
import transformers
from optax.contrib import MuonDimensionNumbers

from clover_jax import cli
from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.sources import find_directory
from clover_jax.config import BaseConfig
from clover_jax.data.corpus import is_heldout
from clover_jax.errors import UserError
from clover_jax.runtime.files import only_process_in
from experiments.tiny_base import bits_per_byte, muon
from experiments.tiny_base.base_folder import llama_config_values, round_to_bfloat16, save_base
from experiments.tiny_base.pretrain import define_flags, main
from experiments.tiny_base.pretrain_card import is_made_here
from experiments.tiny_base.pretrain_run import StepLog, Stopped, claim_workdir
from experiments.tiny_base.pretraining import (
    init_params,
    init_state,
    load_state,
    pretrain,
    save_state,
)
from experiments.tiny_base.settings import PretrainConfig
from experiments.tiny_base.token_windows import TokenStream

TINY = BaseConfig(
    vocab_size=100,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_ids=(1,),
)
# One length only, so that one program is compiled.
QUICK = PretrainConfig(
    steps=4, tokens_per_step=1024, tokens_per_part=512, lengths=(256,), length_starts=(0.0,)
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder of modules, some of them held out."""
    root = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(0)
    for number in range(40):
        words = ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(30)]
        lines = [
            f"def {w}(x):\n    y = x\n    y = {w}(y)\n    y = y\n    return y\n" for w in words
        ]
        (root / f"module{number}.py").write_text("\n\n".join(lines))
    return root


def run_pretrain(capsys, *argv):
    status = cli.run(main, define_flags, argv)
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


def flags_for(sources, workdir):
    return (
        f"--sources={sources}",
        f"--workdir={workdir}",
        "--steps=1",
        "--tokens_per_step=1024",
        "--vocab_size=300",
        "--hidden_size=16",
        "--intermediate_size=24",
        "--num_layers=1",
        "--num_heads=2",
        "--num_kv_heads=1",
    )


def make_stream():
    rng = np.random.default_rng(1)
    documents = [rng.integers(3, 100, 3000) for _ in range(3)]
    return TokenStream(documents, bos=0, eos=1, blocks=1, seed=0)


def ignore(state, loss, progress):
    """Take no notice of a step."""


def test_makes_a_folder_that_others_read(sources, tmp_path, capsys):
    status, out, _ = run_pretrain(capsys, *flags_for(sources, tmp_path / "run"))
    assert status == 0
    report = json.loads(out[-1])
    folder = tmp_path / "run" / "base"
    assert report["output"] == str(folder)
    assert (report["steps"], report["tokens_read"]) == (1, 1024)
    assert 0 < report["bits_per_byte"] < 8.2

    assert transformers.AutoConfig.from_pretrained(str(folder)).model_type == "llama"
    assert transformers.AutoTokenizer.from_pretrained(str(folder)).bos_token_id == 0
    base = load_base(str(folder))
    assert (base.config.vocab_size, base.config.eos_token_ids) == (300, (1,))

    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    heldout = [p.read_text() for p in sources.iterdir() if is_heldout(p.name)]
    assert prompts
    assert all(any(row["prompt"] in text for text in heldout) for row in prompts)
    assert f"| {report['bits_per_byte']} |" in (folder / "README.md").read_text()


def test_other_settings_for_the_same_workdir_are_refused(tmp_path):
    claim_workdir(tmp_path, {"steps": 2})
    claim_workdir(tmp_path, {"steps": 2})
    with pytest.raises(UserError, match="--steps=2, not 3"):
        claim_workdir(tmp_path, {"steps": 3})


def test_a_second_run_in_the_same_workdir_is_refused(sources, tmp_path, capsys):
    with only_process_in(tmp_path, "is training", "--workdir"):
        status, _, error = run_pretrain(capsys, *flags_for(sources, tmp_path))
    assert (status, "another run is training in" in error) == (2, True)
    assert not (tmp_path / "settings.json").exists()


def test_bad_shapes_are_named_before_anything_is_trained(sources, tmp_path, capsys):
    status, _, error = run_pretrain(
        capsys, *flags_for(sources, tmp_path / "run"), "--num_kv_heads=3", "--num_heads=4"
    )
    assert status == 2
    assert "num_heads (4) must be divisible by num_kv_heads (3)" in error


def test_a_mistake_leaves_the_workdir_free_for_the_right_command(sources, tmp_path, capsys):
    flags = flags_for(sources, tmp_path / "run")
    for mistake in ("--hidden_size=17", "--vocab_size=9", "--learning_rate=0"):
        status, _, error = run_pretrain(capsys, *flags, mistake)
        assert status == 2, error
    assert not (tmp_path / "run").exists()


def test_a_folder_of_the_users_is_not_replaced(sources, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    flags = (*flags_for(sources, tmp_path / "run"), f"--output={tmp_path / 'out'}")
    status, _, error = run_pretrain(capsys, *flags)
    assert status == 2
    assert "out exists already; give another --output, or --overwrite" in error
    assert (tmp_path / "out" / "thesis.txt").exists()


@pytest.mark.parametrize("workdir, given", [("run", "--output={}/base"), ("", "")])
def test_a_base_of_somebody_else_is_not_replaced(sources, tmp_path, capsys, workdir, given):
    (tmp_path / "base").mkdir()
    save_base(tmp_path / "base", TINY, round_to_bfloat16(init_params(TINY, 0)))
    flags = [*flags_for(sources, tmp_path / workdir), "--overwrite"]
    flags += [given.format(tmp_path)] if given else []
    status, _, error = run_pretrain(capsys, *flags)
    assert status == 2
    assert "base is not a base made by pretrain, so --overwrite does not delete it" in error
    assert load_base(str(tmp_path / "base")).config.vocab_size == 100


def test_builtin_tiny_is_known_as_made_here():
    assert is_made_here(find_directory("builtin:tiny"))


def test_steps_that_are_done_again_have_one_row(sources, tmp_path, capsys):
    flags = (*flags_for(sources, tmp_path / "run"), "--log_every=1")
    assert run_pretrain(capsys, *flags)[0] == 0
    metrics = tmp_path / "run" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 2, "loss": 1.0}\n{"step": 3, "lo')  # after its last checkpoint
    assert run_pretrain(capsys, *flags)[0] == 0
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = pretrain(TINY, QUICK, make_stream(), init_state(TINY, QUICK), ignore)

    class Log(StepLog):
        def __call__(self, state, loss, progress):
            if state.step == 2:
                self.stop.set()
            super().__call__(state, loss, progress)

    class Bar:
        def show(self, figures): ...

        def update(self): ...

    log = Log(tmp_path, Bar(), log_every=1, save_every=100, stop=threading.Event())
    with pytest.raises(Stopped):
        pretrain(TINY, QUICK, make_stream(), init_state(TINY, QUICK), log)
    half = load_state(tmp_path / "state.msgpack", init_state(TINY, QUICK))
    assert (half.step, half.tokens) == (2, 2048)
    resumed = pretrain(TINY, QUICK, make_stream(), half, ignore)
    assert resumed.step == 4
    for one, other in zip(jax.tree.leaves(whole[:2]), jax.tree.leaves(resumed[:2]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_loss_that_is_not_finite_stops_the_run():
    state = init_state(TINY, QUICK)
    broken = state._replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
    with pytest.raises(UserError, match="the loss is nan at step 1"):
        pretrain(TINY, QUICK, make_stream(), broken, ignore)


def test_the_schedule_warms_up_then_falls_to_zero_and_windows_grow():
    config = PretrainConfig(warmup=0.1)
    assert config.rate_at(0.05) == pytest.approx(0.5)
    assert config.rate_at(0.1) == pytest.approx(1.0)
    assert config.rate_at(0.55) == pytest.approx(0.5)
    assert config.rate_at(1.0) == 0.0
    assert [config.length_at(p) for p in (0.0, 0.49, 0.5, 0.9)] == [256, 256, 512, 1024]


def test_tokens_per_step_must_fit_blocks_and_parts():
    with pytest.raises(UserError, match=r"tokens_per_step \(1500\) must be a multiple of 1024"):
        PretrainConfig(tokens_per_step=1500)


def test_a_checkpoint_survives_its_round_trip(tmp_path):
    state = init_state(TINY, QUICK)._replace(step=3, tokens=7, seconds=1.5)
    save_state(tmp_path / "state", state)
    loaded = load_state(tmp_path / "state", init_state(TINY, QUICK))
    assert loaded[2:] == (3, 7, 1.5)
    jax.tree.map(np.testing.assert_array_equal, state.params, loaded.params)


def test_every_matrix_is_left_to_muon_and_nothing_else():
    params = jax.eval_shape(lambda: init_params(TINY, 0))
    matrices = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(
            muon.matrix_dimensions(params), is_leaf=lambda x: isinstance(x, MuonDimensionNumbers)
        )
    }
    layer = "layers_0"
    assert matrices == {
        f"{layer}/attention/qkv",
        f"{layer}/attention/out",
        f"{layer}/mlp/gate_up",
        f"{layer}/mlp/down",
    }


def test_shards_stay_below_the_limit_and_load_again(tmp_path):
    params = round_to_bfloat16(init_params(TINY, 0))
    save_base(tmp_path, TINY, params, max_shard_bytes=3500)
    sizes = [path.stat().st_size for path in tmp_path.glob("model-*.safetensors")]
    assert len(sizes) > 1
    assert max(sizes) < 3500 + 1000  # the header comes on top
    jax.tree.map(np.testing.assert_array_equal, params, load_base(str(tmp_path)).params)
    assert llama_config_values(TINY)["eos_token_id"] == 1


def test_bits_per_byte_counts_every_token_once_and_no_padding():
    documents = [np.arange(3, 13), np.arange(20, 23)]
    params = jax.tree.map(np.zeros_like, init_params(TINY, 0))  # a uniform distribution
    score = bits_per_byte.score_documents(TINY, params, documents, 26, bos=0, length=4)
    assert (score.tokens, score.bytes) == (13, 26)
    assert score.nats_per_token == pytest.approx(np.log(100), rel=1e-5)
    assert score.bits_per_byte == pytest.approx(np.log2(100) * 13 / 26, rel=1e-5)
