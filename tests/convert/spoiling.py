"""Ways to spoil what the convert command reads.

Each returns a function of a folder with `head` and `base`.
"""

import json

from tests.tiny_checkpoints import edit_json, edit_tensors

WEIGHTS = "model.safetensors"
MLP = "clover_head_mlp.weight"
DOWN = "layers.1.mlp.down_proj.weight"


def tensors(edit):
    return lambda folder: edit_tensors(folder / "head", edit)


def config(**changes):
    return lambda folder: edit_json(folder / "head" / "config.json", **changes)


def base_config(**changes):
    return lambda folder: edit_json(folder / "base" / "config.json", **changes)


def text(name, value):
    return lambda folder: (folder / name).write_text(value)


def cut_file(name, size):
    def spoil(folder):
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return spoil


def remove(name):
    return lambda folder: (folder / name).unlink()


def set_value(name, value, index=(0, 0)):
    def edit(stored):
        stored[name][index[: stored[name].ndim]] = value

    return tensors(edit)


def cast(name, dtype):
    return tensors(lambda stored: stored.update({name: stored[name].astype(dtype)}))


def base_tensors(edit):
    return lambda folder: edit_tensors(folder / "base", edit)


def other_lm_head(folder):
    base_tensors(lambda stored: stored["lm_head.weight"].__iadd__(0.5))(folder)


def index_with(name):
    def spoil(folder):
        head = folder / "head"
        (head / WEIGHTS).rename(folder / "elsewhere.safetensors")
        index = {"weight_map": {MLP: name}}
        (head / (WEIGHTS + ".index.json")).write_text(json.dumps(index))

    return spoil


def header_of(text):
    """A safetensors file with this header and no values."""

    def spoil(folder):
        data = text.encode()
        (folder / "head" / WEIGHTS).write_bytes(len(data).to_bytes(8, "little") + data)

    return spoil
