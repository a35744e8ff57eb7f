"""Tell whose layout a folder of draft weights has, by its config.json and its tensors' names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from clover_jax.errors import UserError
from clover_jax.pretrained.tensor_files import TensorFiles
from clover_jax.storage.json_files import read_json_object

CLOVER2, EAGLE, EAGLE3 = "clover2", "eagle", "eagle3"
SPECULATORS, SPECULATORS_EAGLE3 = "speculators", "speculators_eagle3"
MEDUSA, MEDUSA_VLLM = "medusa", "medusa_vllm"


def recognise(directory: Path) -> str:
    """Return the name of a layout that can be read, one of those above.

    Raises UserError that says what the folder is otherwise.
    """
    values = read_json_object(directory / "config.json")
    if "clover" in values:
        return CLOVER2
    if "speculators_model_type" in values:
        is_eagle3 = values["speculators_model_type"] == "eagle3"
        return SPECULATORS_EAGLE3 if is_eagle3 else SPECULATORS
    if "medusa_num_heads" in values:
        return MEDUSA
    if values.get("model_type") == "medusa":
        return MEDUSA_VLLM
    names = TensorFiles(directory).shapes
    if "d2t" in names or "midlayer.mlp.up_proj.weight" in names:
        return EAGLE3
    if "fc.weight" in names:
        return EAGLE
    for description, matches in _UNREADABLE.items():
        if matches(values, names):
            raise UserError(
                f"{directory} is {description}, which cannot be read as a draft; "
                "native draft folders and the official layouts of Clover-2, EAGLE and Medusa can"
            )
    raise UserError(
        f"{directory} is in no known draft layout: its config.json has no "
        f'"clover" object, and its first tensor is {min(names, default="missing")}'
    )


Matches = Callable[[dict[str, Any], dict[str, tuple[int, ...]]], bool]

_UNREADABLE: dict[str, Matches] = {
    'an official Clover-2 head without the "clover" object in its config.json': (
        lambda values, names: "clover_head_mlp.weight" in names
    ),
    "a base model": lambda values, names: "model.embed_tokens.weight" in names,
}
