"""Every notebook, its code cells run one after the other in one process, at tiny size."""

import json

import matplotlib
import pytest

from tests.conftest import REPOSITORY
from tests.tiny_folders import save_tiny_base

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
        "MORE_SETTINGS": {
            "drafter_options": "num_augmenting_layers=1",
            "num_positions": 2,
            "tree": "chain:2",
            "eval_max_new_tokens": 4,
            "log_every": 1,
            "eval_prompts": "prompts.jsonl",
        },
    }
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
