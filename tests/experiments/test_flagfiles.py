"""Every flagfile parses and trains; every notebook runs; launch/accelerator, rehearsed."""

import importlib
import json
import math
import re
import shlex
import sys

import matplotlib
import pytest

from clover_jax import prepare, train
from clover_jax.cli.command_flags import parse_flags
from clover_jax.evaluation import dry_run
from experiments.accelerator import far_from_floor
from tests.conftest import REPOSITORY, rows_in, run_command, run_program
from tests.tiny_folders import save_tiny_base
from tests.tiny_tokenizers import CHAT_TEMPLATE

FLAGFILES = sorted((REPOSITORY / "experiments").rglob("*.flags"))


def command_of(flagfile):
    """Return the module that a flagfile's comments say it is for."""
    command = re.search(r"python -m ([\w.]+) --flagfile=(\S+)", flagfile.read_text())
    assert command, f"{flagfile.name} does not say its command"
    assert command[2] == flagfile.relative_to(REPOSITORY).as_posix()
    return importlib.import_module(command[1])


@pytest.mark.parametrize("flagfile", FLAGFILES, ids=lambda path: path.name)
def test_every_flagfile_parses_and_gives_no_flag_twice(flagfile):
    command = command_of(flagfile)
    flags = parse_flags(command.define_flags, [f"--flagfile={flagfile}"])
    assert flags.flagfile == [str(flagfile)]
    settings = [line for line in flagfile.read_text().splitlines() if line.startswith("--")]
    names = [line.partition("=")[0] for line in settings]
    assert len(names) == len(set(names)), "a flag is given twice"


def command_lines(flagfile):
    """Return the words of every command in a flagfile's comments, as pasted into a shell."""
    comments = re.sub(r"^# ?", "", flagfile.read_text(), flags=re.MULTILINE)
    lines = comments.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.lstrip().startswith("python -m ")]


RECIPES = [path for path in FLAGFILES if "clover_jax.prepare" in path.read_text()]


@pytest.mark.parametrize("flagfile", RECIPES, ids=lambda path: path.name)
def test_the_prepare_command_of_a_recipe_writes_what_it_trains_on(flagfile):
    (words,) = [words for words in command_lines(flagfile) if words[2] == "clover_jax.prepare"]
    made = parse_flags(prepare.define_flags, words[3:])
    flags = parse_flags(train.define_flags, [f"--flagfile={flagfile}"])
    for name in ("base", "seq_len", "chat_template"):
        assert made[name].value == flags[name].value
    assert made.output == flags.data


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Flags that shrink any training run: a random base of 32 dimensions, two rows of 64 tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    base = save_tiny_base(folder / "base", template=CHAT_TEMPLATE)
    rows = [{"prompt": f"what {i}", "response": "the hat he had " * 3} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"base": base, "data": folder / "rows.jsonl", "seq_len": 64, "batch_size": 2}
    values |= {"mesh": "fsdp=1", "steps": 2, "warmup_steps": 1, "log_every": 1, "eval_every": 0}
    return [f"--{name}={value}" for name, value in values.items()]


RUN_BY_DEFAULT = "clover2_llama3_8b"  # of the recipes


def marked(path):
    """Mark what is like another flagfile as slow: its variations, and recipes but for one."""
    varies = "--flagfile=" in path.read_text().split(path.name, 1)[1]
    is_alike = varies or (path in RECIPES and path.stem != RUN_BY_DEFAULT)
    return pytest.param(path, id=path.name, marks=[pytest.mark.slow] if is_alike else [])


TRAINED = [marked(path) for path in FLAGFILES if command_of(path) is train]


@pytest.mark.parametrize("flagfile", TRAINED)
def test_every_training_flagfile_runs_two_steps_with_its_shapes_shrunk(
    flagfile, tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(REPOSITORY)  # a flagfile may name another one
    arguments = [f"--flagfile={flagfile}", *tiny, f"--workdir={tmp_path}"]
    flags = parse_flags(train.define_flags, arguments)
    if flags.draft_vocab:
        arguments.append("--draft_vocab=64")
    # Each position is compiled by itself. Other heads may have a tree that needs all of theirs.
    if flags.drafter in ("clover2", "eagle3"):
        arguments.append("--num_positions=2")
    status, _, error = run_command(capsys, train, *arguments)
    assert status == 0, error
    rows = rows_in(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert (tmp_path / "draft" / "draft.json").is_file()


# What stands for a base that tests cannot download, and the devices that the flagfile speaks of.
AT_FULL_SIZE = {
    "clover2_llama3_8b": ("shape:llama3-8b", "fsdp=16", "tpu-v5e:4x4"),
    "clover2_vicuna7b": ("shape:vicuna-7b", "fsdp=4", "gpu-h200"),
    "clover_baichuan7b": ("shape:4096x32x125696", "fsdp=4", "gpu-h200"),
    "clover2_qwen3_0p6b": ("shape:1024x28x151936", "fsdp=1", "gpu-h200"),
    "clover_lr_llama3_70b": ("shape:llama3-70b", "fsdp=16", "tpu-v5p:2x2x4"),
    "clover_lr_llama3_405b": ("shape:llama3-405b", "fsdp=16,tensor=4", "tpu-v5p:4x4x4"),
    "clover_lr_gemma3_27b": ("shape:gemma3-27b", "fsdp=16", "tpu-v6e:4x4"),
    "clover_lr_mixtral_8x7b": ("shape:mixtral-8x7b", "fsdp=16", "tpu-v6e:4x4"),
    "clover_lr_qwen3_30b_a3b": ("shape:qwen3-30b-a3b", "fsdp=16", "tpu-v5e:4x4"),
    "clover_lr_gpt_oss_20b": ("shape:gpt-oss-20b", "fsdp=16", "tpu-v5e:4x4"),
}


USUAL = [pytest.param(n, marks=[pytest.mark.slow] * (n != RUN_BY_DEFAULT)) for n in AT_FULL_SIZE]


@pytest.mark.parametrize("name", USUAL)
def test_every_recipe_fits_its_devices_at_full_size(name, capsys, monkeypatch):
    # Where the target's compiler is installed, compiling would take many minutes.
    monkeypatch.setattr(dry_run, "dry_run_compiled", lambda *_: None)
    base, mesh, target = AT_FULL_SIZE[name]
    flagfile = REPOSITORY / "experiments" / f"{name}.flags"
    arguments = [f"--flagfile={flagfile}", f"--base={base}", f"--mesh={mesh}", "--dry_run"]
    status, lines, error = run_command(capsys, train, *arguments, f"--target={target}")
    assert status == 0, error
    report = json.loads(lines[-1])
    assert report["total_bytes"] < report["device_memory"]
    # The file says what was computed, to a tenth of a gigabyte.
    assert f"{report['total_bytes'] / 1e9:.1f} GB" in flagfile.read_text()


NOTEBOOKS = sorted((REPOSITORY / "experiments" / "notebooks").glob("*.ipynb"))


def code_cells(notebook):
    """Yield (source, tags) of the code cells."""
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"]), cell["metadata"].get("tags", ())


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_without_outputs(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    assert sum("parameters" in tags for _, tags in code_cells(notebook)) == 1


def test_the_colab_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    (tmp_path / "text.txt").write_text("the hat he had the hat. " * 60)
    tiny = {
        "BASE": str(save_tiny_base(tmp_path / "base")),
        "DATA": "text.txt",
        "STEPS": 2,
        "BATCH_SIZE": 2,
        "SEQ_LEN": 32,
        "PROMPT": "the hat",
    }
    more = {"num_positions": 2, "tree": "chain:2", "drafter_options": "num_augmenting_layers=1"}
    more |= {"eval_max_new_tokens": 4, "log_every": 1, "eval_prompts": "prompts.jsonl"}
    tiny["MORE_SETTINGS"] = more
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the"}\n')
    names = {}
    for source, tags in code_cells(REPOSITORY / "experiments/notebooks/clover2_colab_tpu.ipynb"):
        exec(compile(source, "cell", "exec"), names)
        if "parameters" in tags:
            assert tiny.keys() <= names.keys()
            names.update(tiny)
    assert [row["step"] for row in names["measured"]] == [1, 2]
    names["plt"].close("all")
    assert names["texts"][0] == names["texts"][1] != ""
    assert names["exported"]["to"] == "clover2"
    assert (tmp_path / "runs/notebook/exported/model.safetensors").is_file()
    sources = [source for source, _ in code_cells(NOTEBOOKS[0])]
    assert not any("cli" in source for source in sources), "the library does all of it"


def rehearse(folder, seconds):
    """Return the report's JSON, its page and what was printed."""
    flags = "--rehearse", f"--output={folder}", f"--seconds={seconds}"
    finished = run_program(sys.executable, "-m", "experiments.accelerator", *flags)
    return json.loads((folder / "cpu.json").read_text()), (folder / "cpu.md").read_text(), finished


def test_when_the_time_is_over_it_ends_with_a_page_of_what_it_has(tmp_path):
    report, page, finished = rehearse(tmp_path, 9)
    stages = report["stages"]
    assert {"tests", "train", "evaluate", "clover_lr, batch 16, pallas"} < set(stages)
    assert {row["status"] for row in stages.values()} & {"not begun", "stopped"}
    assert all(f"| {name} | {row['status']} |" in page for name, row in stages.items())
    assert f"{tmp_path}/cpu.md" in finished.stdout


@pytest.mark.slow
def test_with_time_enough_everything_is_measured(tmp_path):
    report, page, finished = rehearse(tmp_path, 3600)
    for name, row in report["stages"].items():
        # Only an environment with the TPU's compiler has figures ahead of time.
        compiled = "no compiler for it" not in row.get("said", "")
        assert row["status"] == ("done" if compiled else "failed"), (name, row)
        assert compiled or name.endswith("ahead of time")
    assert "passed" in report["stages"]["tests"]["said"]
    assert report["stages"]["clover2, batch 16, pallas"]["attention"] == "pallas"
    assert "tau " in page
    assert len(report["far_from_floor"]) == 3
    assert all(line in page and line in finished.stdout for line in report["far_from_floor"])


def test_the_parts_that_lose_most_time_are_named_once_each():
    def timed(**milliseconds):
        parts = {
            name.replace("_", " "): {"ms": ms, "floor_ms": f, "over_floor": f and ms / f}
            for name, (ms, f) in milliseconds.items()
        }
        return {"status": "done", "parts": parts}

    stages = {
        "tests": {"status": "done", "said": "4 passed"},
        "a": timed(step=(90, 10), draft_level_1=(80, 1), verify=(20, 10), accept=(3, 0)),
        "b": timed(verify=(24, 10), draft=(9, 8), absorb=(5, 4.5), plain_step=(9, 9)),
    }
    assert far_from_floor(stages) == [
        "verify (b): 24.000 ms, 2.40 x its floor",
        "accept (a): 3.000 ms",
        "draft (b): 9.000 ms, 1.12 x its floor",
    ]
