"""The library's front door: its docstring's example runs, and texts are those of the commands."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax import api
from clover_jax import generate as command
from clover_jax.data.detokenization import decode_text
from clover_jax.errors import UserError
from clover_jax.runtime.compile_clock import CompileClock
from tests.conftest import rows_in, run_command
from tests.tiny_folders import save_tiny_base, save_tiny_draft


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random base and a draft for it."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_base(folder / "base")
    save_tiny_draft(folder / "draft", folder / "base")
    return folder


@pytest.fixture(scope="module")
def models(folder):
    return api.load_base(str(folder / "base"))


def test_the_example_of_the_docstring_runs(capsys, tmp_path, monkeypatch):
    lines = api.__doc__.splitlines()
    program = "\n".join(line[4:] for line in lines if line.startswith("    "))
    assert program.count("api.") == 5
    monkeypatch.chdir(tmp_path)
    scope = {}
    row = json.dumps({"text": "for word in words: count[word] += 1  # and so on " * 20}) + "\n"
    (tmp_path / "some.jsonl").write_text(row * 40)
    # The same call for seconds in place of minutes.
    program = program.replace("steps=1000", "steps=2, seq_len=32, batch_size=2")
    exec(program.replace("builtin:python", "some.jsonl"), scope)
    *_, last = shown = capsys.readouterr().out.splitlines()
    assert "16 tokens, length" in shown
    assert any("drafted tokens accepted" in line for line in shown)
    assert last.startswith("16 tokens in ")
    assert scope["models"].draft.provenance["steps"] == 2


def all_ids(pieces):
    return [id_ for piece in pieces for id_ in piece.ids]


def test_pieces_join_to_the_text_and_figures_add_up(models):
    pieces = list(api.generate(models, "def f(", max_new_tokens=20))
    ids = all_ids(pieces)
    prompt = models.tokenizer("def f(").input_ids
    assert "".join(piece.text for piece in pieces) == decode_text(models.tokenizer, ids, prompt)
    assert (pieces[-1].tokens, pieces[-1].forwards, pieces[-1].tau) == (20, 19, 1.0)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_a_stop_string_ends_the_text_before_itself_and_cuts_the_figures_too(folder, models):
    drafting = api.load_draft(models, folder / "draft")
    (whole,) = api.generate_rows(models, ["def f("], max_new_tokens=30)
    settings = {"max_new_tokens": 30, "stop": whole["text"][4:6]}
    for chosen in (models, drafting):
        (row,) = api.generate_rows(chosen, ["def f("], **settings)
        *_, last = pieces = list(api.generate(chosen, "def f(", **settings))
        assert "".join(piece.text for piece in pieces) == whole["text"].split(settings["stop"])[0]
        assert row["finish_reason"] == last.finish_reason == "stop"
        assert last.tokens == len(row["output_ids"]) < 30
        assert (last.forwards, last.tau) == (row["target_forwards"], row["tau"])


def test_ids_may_be_an_array(models):
    ids = [5, 6, 7]
    (row,) = api.generate_rows(models, [np.array(ids)], max_new_tokens=3)
    assert row["prompt_ids"] == ids
    pieces = api.generate(models, jnp.array(ids), max_new_tokens=np.int64(3))
    assert all_ids(pieces) == row["output_ids"]


def test_a_row_may_hold_what_numpy_jax_and_tuples_hold(models):
    plain = {"prompt_ids": [5, 7, 9], "seed": 3, "temperature": 1.0, "logit_bias": {"6": -5}}
    array = {"prompt_ids": jnp.array([5, 7, 9]), "seed": np.int64(3), "temperature": np.float32(1)}
    rows = [plain, array | {"logit_bias": {6: -5}}, plain | {"prompt_ids": (5, 7, 9)}]
    first, *others = api.generate_rows(models, rows, max_new_tokens=4, batch_size=np.int32(3))
    assert [row["output_ids"] for row in others] == [first["output_ids"]] * 2
    with pytest.raises(UserError, match="prompt 0: temperature must be a number, not NaN"):
        list(api.generate_rows(models, [{"prompt": "a", "temperature": float("nan")}]))


def test_seeds_and_biases_may_be_what_a_user_of_jax_has(models):
    def ids(**given):
        return all_ids(api.generate(models, [5, 7], max_new_tokens=4, temperature=1.0, **given))

    wanted = ids(seed=3, logit_bias=((6, 50.0),))
    assert ids(seed=jnp.int32(3), logit_bias={6: 50.0}) == wanted
    assert ids(seed=np.uint32(3), logit_bias=[[6, 50.0]]) == wanted
    for seed in (None, 1.5, True, jax.random.PRNGKey(0), jax.random.key(0)):
        with pytest.raises(UserError, match="seed must be a whole number, not"):
            ids(seed=seed)
    for bias in (((6,),), "6", 6, {"6": 1}):
        with pytest.raises(UserError, match=r"logit_bias must be \{token id: number, \.\.\.\}"):
            ids(logit_bias=bias)


def test_what_is_loaded_may_be_named_by_a_path(folder, models):
    loaded = api.load_base(folder / "base", dtype=np.dtype("float32"), int8=None)
    assert loaded.base.config == models.base.config
    for given, message in (
        ({"copy": -3}, r"copy \(-3\) must be at least 0"),
        ({"copy": 2.5}, r"copy must be a whole number, not 2\.5"),
        ({"draft_rope_theta": "1e4"}, "draft_rope_theta must be a number or None, not '1e4'"),
    ):
        with pytest.raises(UserError, match=message):
            api.load_draft(models, "recycle", **given)
    assert api.load_draft(models, "recycle", copy=np.int64(3)).tree.name.endswith("+copy:3")
    with pytest.raises(UserError, match="mesh must be text or None, not Mesh"):
        api.load_base(folder / "base", mesh=jax.make_mesh((1,), ("tensor",)))


def test_a_caller_s_settings_of_jax_change_no_text(models):
    def ids():
        return all_ids(api.generate(models, [5, 7], max_new_tokens=4, temperature=1.0))

    wanted = ids()
    with jax.enable_x64(True):
        assert ids() == wanted
    with jax.default_prng_impl("rbg"):  # as many set it on TPU
        assert ids() == wanted


def test_every_turn_comes_whole_and_draws_anew(models):
    turns = {"turns": ["a", "b"]}
    pieces = list(api.generate(models, turns, max_new_tokens=12))
    (row,) = api.generate_rows(models, [turns], max_new_tokens=12)
    assert all_ids(pieces) == [id_ for ids in row["output_ids"] for id_ in ids]
    assert "".join(piece.text for piece in pieces) == "".join(row["text"])
    # Contexts cut to one length: each turn draws at the positions of the one before.
    longest = models.base.config.max_position_embeddings
    row = {"turns": ["a" * 2 * longest, "b" * 2 * longest]}
    settings = {"context_overflow": "truncate_left", "temperature": 1e6, "max_new_tokens": 12}
    (row,) = api.generate_rows(models, [row], **settings)
    assert len(set(map(len, row["prompt_ids"]))) == 1
    first, second = row["output_ids"]
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 4


def test_a_draft_gives_the_same_text_in_fewer_forwards(models):
    plain = list(api.generate(models, [5, 6, 7], max_new_tokens=24))
    drafting = api.load_draft(models, "lookup")
    drafted = list(api.generate(drafting, [5, 6, 7], max_new_tokens=24))
    assert all_ids(drafted) == all_ids(plain)
    assert drafted[-1].forwards < plain[-1].forwards
    assert drafted[-1].tau == 23 / drafted[-1].forwards
    assert sum(piece.accepted for piece in drafted) >= 23 - drafted[-1].forwards
    assert all(piece.accepted <= piece.drafted for piece in drafted)
    assert {(piece.drafted, piece.accepted) for piece in plain} == {(0, 0)}


def test_models_show_in_a_notebook_what_they_are_not_all_they_hold(models, folder):
    shown = repr(api.load_draft(models, folder / "draft"))
    assert "Clover2Config" in shown
    assert f"source='{folder / 'base'}'" in shown
    assert "Array" not in shown
    assert "AddedToken" not in shown


def test_rows_are_those_of_the_command(models, folder, tmp_path, capsys):
    rows = [{"prompt": "def f("}, {"turns": ["a", "b"], "max_new_tokens": 5}, {"prompt_ids": [7]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"max_new_tokens": 12, "temperature": 0.7, "batch_size": 2, "seed": 3}
    flags = {"base": folder / "base", "draft": folder / "draft", **settings}
    flags |= {"prompts": tmp_path / "prompts.jsonl", "output": tmp_path / "rows.jsonl"}
    argv = [f"--{name}={value}" for name, value in flags.items()]
    assert run_command(capsys, command, *argv)[0] == 0
    written = rows_in(tmp_path / "rows.jsonl")
    drafting = api.load_draft(models, folder / "draft")
    found = api.generate_rows(drafting, ["def f(", *rows[1:]], **settings)
    found = sorted(found, key=lambda row: row["index"])
    assert [row | {"seconds": 0} for row in found] == [row | {"seconds": 0} for row in written]


def test_the_same_call_again_compiles_nothing(models):
    list(api.generate(models, "def f(", max_new_tokens=9))
    with CompileClock() as clock:
        list(api.generate(models, "def g(x", max_new_tokens=11))
    assert clock.seconds == 0


def test_mistakes_are_user_errors(models):
    for prompt, settings, message in (
        ([], {}, "prompt_ids must be a list of token ids, at least one"),
        (5, {}, "prompt 0 must be text, token ids, messages or a row, not 5"),
        (b"bytes", {}, "prompt 0 must be text, token ids"),
        (np.array(3), {}, "prompt 0 must be text, token ids.*, not 3"),
        ("a", {"max_tokens": 5}, "'max_tokens' is not a setting; the settings are .*max_n"),
        ([5] * 5000, {"context_overflow": "skip"}, "the prompt has 5000 tokens"),
    ):
        with pytest.raises(UserError, match=message):
            list(api.generate(models, prompt, **settings))
    for size, message in ((2.5, r"must be a whole number, not 2\.5"), (0, r"\(0\) must be at le")):
        with pytest.raises(UserError, match=f"batch_size {message}"):
            list(api.generate_rows(models, ["a"], batch_size=size))
    with pytest.raises(UserError, match="'step' is not a setting; the settings are base, "):
        api.train("nowhere", step=5)
    with pytest.raises(UserError, match="dtype 'int8' is not one of auto, float32, bfloat16"):
        api.load_base(dtype="int8")
    with pytest.raises(UserError, match="the folder no such/folder/here does not exist"):
        api.load_draft(models, "no such/folder/here")


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("batch_size", 0, r"batch_size \(0\) must be at least 1"),
        ("batch_size", True, "batch_size must be a whole number, not True"),
        ("learning_rate", "1e-3", "learning_rate must be a number, not '1e-3'"),
        ("learning_rate", float("nan"), r"learning_rate \(nan\) must be at least 0"),
        ("drafter_options", {"a": 1}, "drafter_options must be text or None, not {'a': 1}"),
    ],
)
def test_a_wrong_setting_of_training_is_a_user_error(tmp_path, name, value, message):
    with pytest.raises(UserError, match=message):
        api.train(tmp_path / "w", **{name: value})
    assert not (tmp_path / "w").exists()


def test_one_prompt_in_place_of_several_is_refused(models):
    for prompts in ("text", {"prompt": "text"}):
        with pytest.raises(UserError, match=r"prompts must be several, not .*; give \["):
            list(api.generate_rows(models, prompts))


def test_a_prompt_that_fails_is_a_row_where_that_is_asked_for(models):
    prompts = ["a", 5, [5] * 5000, "b"]
    rows = list(api.generate_rows(models, prompts, max_new_tokens=2, strict=False))
    rows = {row["index"]: row for row in rows}
    failed = [index for index in range(4) if set(rows[index]) == {"index", "error"}]
    assert failed == [1, 2]
    assert rows[1]["error"].startswith("prompt 1 must be text, token ids")
    assert rows[2]["error"].startswith("prompt 2: the prompt has 5000 tokens")


def test_the_library_measures_prepares_and_converts(folder, tmp_path):
    base = str(folder / "base")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "he"}\n')
    settings = {"base": base, "prompts": tmp_path / "prompts.jsonl", "max_new_tokens": 4}
    settings |= {"repeats": 1, "baselines": "none"}
    figures = api.evaluate(tmp_path / "out", {"a": folder / "draft"}, **settings)
    assert (tmp_path / "out" / "report.md").is_file()
    assert figures["problems"] == []
    text = json.dumps({"text": "some text for everybody " * 20}) + "\n"
    (tmp_path / "some.jsonl").write_text(text * 40)
    counts = api.prepare(tmp_path / "data", base=base, data=tmp_path / "some.jsonl", seq_len=32)
    assert counts["samples"] > 0
    report = api.convert(folder / "draft", tmp_path / "head", base=base, to="clover2")
    assert (report["drafter"], report["to"]) == ("clover2", "clover2")


def test_a_wrong_setting_of_a_command_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="'bases' is not a setting; the settings are allow_base"):
        api.convert("a", "b", bases="c")
    for settings, message in (
        ({"repeats": 0}, r"repeats \(0\) must be at least 1"),
        ({"repeats": "2"}, "repeats must be a whole number, not '2'"),
        ({"dtype": "int8"}, "dtype 'int8' is not one of auto, float32, bfloat16"),
        ({"temperature": float("nan")}, r"temperature \(nan\) must be at least 0"),
    ):
        with pytest.raises(UserError, match=message):
            api.evaluate(tmp_path / "out", **settings)


def test_the_names_of_its_signatures_are_there_and_importing_the_package_loads_nothing(run_python):
    assert {"GenerationSettings", "TrainSettings", "Models"} <= set(api.__all__)
    assert all(hasattr(api, name) for name in api.__all__)
    run_python("import clover_jax, sys; assert 'jax' not in sys.modules")
