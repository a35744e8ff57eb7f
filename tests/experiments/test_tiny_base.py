"""`pretrain`: its prompts, tokenizer and windows, a folder that others read, exact resumes."""

import functools
import json
import threading

import jax
import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from optax.contrib import MuonDimensionNumbers

from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.sources import find_directory
from clover_jax.config import BaseConfig
from clover_jax.data.corpus import Document, builtin_documents, is_heldout
from clover_jax.errors import UserError
from clover_jax.runtime.files import only_process_in
from experiments.tiny_base import bits_per_byte, muon
from experiments.tiny_base import pretrain as pretrain_command
from experiments.tiny_base.base_folder import llama_config_values, round_to_bfloat16, save_base
from experiments.tiny_base.function_heads import heldout_prompts
from experiments.tiny_base.pretrain_card import is_made_here
from experiments.tiny_base.pretrain_run import StepLog, Stopped, claim_workdir
from experiments.tiny_base.pretraining import (
    init_params,
    init_state,
    load_state,
    pretrain,
)
from experiments.tiny_base.settings import BLOCK, PretrainConfig
from experiments.tiny_base.token_windows import TokenStream, cut_windows
from experiments.tiny_base.tokenizer_training import encode_texts, save_tokenizer, train_tokenizer
from tests.conftest import rows_in, run_command

WIDTHS = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4}
HEADS = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "max_position_embeddings": 1024}
TINY = BaseConfig(**WIDTHS, **HEADS, tie_word_embeddings=True, bos_token_id=0, eos_token_ids=(1,))
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


@pytest.fixture
def run(sources, tmp_path, capsys):
    """Run `pretrain` for a step with more flags: (status, lines of stdout, stderr)."""
    values = {"sources": sources, "workdir": tmp_path / "run", "steps": 1, "tokens_per_step": 1024}
    values |= {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24}
    values |= {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1}

    def run(*more, **changes):
        flags = [f"--{name}={value}" for name, value in (values | changes).items()]
        return run_command(capsys, pretrain_command, *flags, *more)

    return run


def make_stream(sizes=(3000, 3000, 3000), seed=0, blocks=1):
    rng = np.random.default_rng(1)
    documents = [rng.integers(3, 100, size) for size in sizes]
    return TokenStream(documents, bos=0, eos=1, blocks=blocks, seed=seed)


def ignore(state, loss, progress):
    """Take no notice of a step."""


def test_makes_a_folder_that_others_read(run, sources, tmp_path):
    status, out, _ = run()
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

    prompts = rows_in(folder / "prompts.jsonl")
    heldout = [p.read_text() for p in sources.iterdir() if is_heldout(p.name)]
    assert prompts
    assert all(any(row["prompt"] in text for text in heldout) for row in prompts)
    assert f"| {report['bits_per_byte']} |" in (folder / "README.md").read_text()


def test_other_settings_for_the_same_workdir_are_refused(tmp_path):
    claim_workdir(tmp_path, {"steps": 2})
    claim_workdir(tmp_path, {"steps": 2})
    with pytest.raises(UserError, match="--steps=2, not 3"):
        claim_workdir(tmp_path, {"steps": 3})


def test_a_second_run_in_the_same_workdir_is_refused(run, tmp_path):
    with only_process_in(tmp_path, "is training", "--workdir"):
        status, _, error = run(workdir=tmp_path)
    assert (status, "another run is training in" in error) == (2, True)
    assert not (tmp_path / "settings.json").exists()


def test_a_mistake_is_named_and_leaves_the_workdir_free_for_the_right_command(run, tmp_path):
    status, _, error = run(num_kv_heads=3, num_heads=4)
    assert status == 2
    assert "num_heads (4) must be divisible by num_kv_heads (3)" in error
    for mistake in ({"hidden_size": 17}, {"vocab_size": 9}, {"learning_rate": 0}):
        status, _, error = run(**mistake)
        assert status == 2, error
    assert not (tmp_path / "run").exists()


def test_a_folder_of_the_users_is_not_replaced(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    status, _, error = run(output=tmp_path / "out")
    assert status == 2
    assert "out exists already; give another --output, or --overwrite" in error
    assert (tmp_path / "out" / "thesis.txt").exists()


@pytest.mark.parametrize("name, folder", [("output", "base"), ("workdir", "")])
def test_a_base_of_somebody_else_is_not_replaced(run, tmp_path, name, folder):
    (tmp_path / "base").mkdir()
    save_base(tmp_path / "base", TINY, round_to_bfloat16(init_params(TINY, 0)))
    status, _, error = run("--overwrite", **{name: tmp_path / folder})
    assert status == 2
    assert "base is not a base made by pretrain, so --overwrite does not delete it" in error
    assert load_base(str(tmp_path / "base")).config.vocab_size == 100
    assert is_made_here(find_directory("builtin:tiny"))


def test_steps_that_are_done_again_have_one_row(run, tmp_path):
    assert run(log_every=1)[0] == 0
    metrics = tmp_path / "run" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 2, "loss": 1.0}\n{"step": 3, "lo')  # after its last checkpoint
    assert run(log_every=1)[0] == 0
    assert [row["step"] for row in rows_in(metrics)] == [1]


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
    rates = [config.rate_at(p) for p in (0.05, 0.1, 0.55, 1.0)]
    assert rates == pytest.approx([0.5, 1.0, 0.5, 0.0])
    assert [config.length_at(p) for p in (0.0, 0.49, 0.5, 0.9)] == [256, 256, 512, 1024]
    with pytest.raises(UserError, match=r"tokens_per_step \(1500\) must be a multiple of 1024"):
        PretrainConfig(tokens_per_step=1500)


def test_every_matrix_is_left_to_muon_and_nothing_else():
    params = jax.eval_shape(lambda: init_params(TINY, 0))
    is_leaf = lambda x: isinstance(x, MuonDimensionNumbers)  # noqa: E731
    leaves = jax.tree.leaves_with_path(muon.matrix_dimensions(params), is_leaf=is_leaf)
    matrices = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}
    names = ("attention/qkv", "attention/out", "mlp/gate_up", "mlp/down")
    assert matrices == {f"layers_0/{name}" for name in names}


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


windows_stream = functools.partial(make_stream, (5000, 700, 40, 3000, 1500))


def test_cut_windows_example():
    windows = cut_windows(np.array([[5, 0, 7]]), bos=0)
    np.testing.assert_array_equal(windows.inputs, [[0, 5, 0]])
    np.testing.assert_array_equal(windows.segment_ids, [[1, 1, 2]])
    np.testing.assert_array_equal(windows.weights, [[1, 0, 1]])


def test_short_windows_hold_the_same_targets_as_long_ones():
    stream = windows_stream(blocks=2)
    long, short = stream.batch(1, BLOCK), stream.batch(1, 256)
    assert short.inputs.shape == (8, 256)
    np.testing.assert_array_equal(long.targets.ravel(), short.targets.ravel())
    assert (short.inputs[:, 0] == 0).all()


def test_batches_depend_on_the_step_alone():
    one, other = windows_stream(blocks=2), windows_stream(blocks=2)
    later = one.steps_per_epoch + 1
    for step in range(later):
        one.batch(step, 512)
    np.testing.assert_array_equal(one.batch(later, 512).inputs, other.batch(later, 512).inputs)


def test_an_epoch_predicts_no_token_twice_and_epochs_differ():
    stream = windows_stream()
    epochs = [
        np.concatenate([stream.batch(e * n + s, BLOCK).targets for s in range(n)])
        for n in [stream.steps_per_epoch]
        for e in range(2)
    ]
    assert len(np.unique(epochs[0], axis=0)) == stream.steps_per_epoch
    assert (epochs[0] != epochs[1]).any()


def test_too_little_text_is_refused():
    with pytest.raises(UserError, match=r"hold 102 tokens.*needs at least 3072"):
        TokenStream([np.full(100, 5)], bos=0, eos=1, blocks=2, seed=0)
    with pytest.raises(ValueError, match="300"):
        windows_stream().batch(0, 300)  # which does not divide the block


TEXTS = ["def area(self):\n    return self.width * self.height\n\n\nclass Box:\n    pass\n"] * 20
TOKENIZER = train_tokenizer(TEXTS, vocab_size=300)


@settings(deadline=None)
@given(st.text() | st.text(alphabet=" \t\r\n_a1(é中\U0001f600"))
def test_round_trip_is_exact_on_any_text(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_come_first_and_bos_is_added():
    assert TOKENIZER.encode("").ids == [0]
    assert [TOKENIZER.id_to_token(i) for i in range(3)] == ["<|bos|>", "<|eos|>", "<|pad|>"]
    assert encode_texts(TOKENIZER, ["", "a"])[0].tolist() == []


def test_line_breaks_take_their_indentation_along():
    text = "def area(self):\n    return self.width"
    pieces = [piece for piece, _ in TOKENIZER.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == ["def", "Ġarea", "(self", "):", "ĊĠĠĠĠ", "return", "Ġself", ".width"]


def test_transformers_loads_it(tmp_path):
    save_tokenizer(TOKENIZER, tmp_path, max_length=64)
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 1, 2)
    assert loaded("def area")["input_ids"] == TOKENIZER.encode("def area").ids
    assert loaded.decode(loaded("x ,  y")["input_ids"][1:]) == "x ,  y"
    assert loaded.model_max_length == 64
    with pytest.raises(UserError, match=r"vocab_size \(100\) must be at least 259"):
        train_tokenizer(TEXTS, vocab_size=100)


MODULE = '''\
import os


@decorated
def join(
    first, second,
):
    # The body starts with a comment.
    path = os.path.join(first, second)
    if not path:
        raise ValueError
    return path


def short(x):
    return x


class Shape(Base):
    """A shape."""

    color = 1

    async def area(self, scale: float) -> float:
        """Return the area.

        In square metres.
        """
        total = 0
        for side in self.sides:
            total += side
        return total * scale
'''


def prompts_of(documents, count=100):
    return {row["prompt"]: row["category"] for row in heldout_prompts(documents, count)}


def test_takes_heads_up_to_colon_or_docstring():
    assert prompts_of([Document("shapes.py", MODULE)]) == {
        "def join(\n    first, second,\n):": "function",
        "class Shape(Base):\n\n    async def area(self, scale: float) -> float:\n"
        '        """Return the area.\n\n        In square metres.\n        """': "method",
    }


def test_modules_take_turns_and_test_modules_have_their_own_category():
    documents = [Document(f"{name}.py", MODULE.replace("join", name)) for name in ("a", "b")]
    first, second = heldout_prompts(documents, 2)
    assert first != second
    assert len(heldout_prompts(documents, 3)) == 3
    tests = heldout_prompts([Document("test/test_shapes.py", MODULE)], 10)
    assert {row["category"] for row in tests} == {"test"}


def test_every_prompt_of_the_library_is_text_of_a_held_out_module():
    documents = builtin_documents("heldout")
    texts = [document.text for document in documents]
    rows = heldout_prompts(documents, 50)
    assert len(rows) == 50
    for row in rows:
        head = row["prompt"].split("\n\n", 1)[-1] if row["prompt"][:5] == "class" else row["prompt"]
        assert any(head in text for text in texts)
        assert row["prompt"].endswith((":", '"""', "'''"))
