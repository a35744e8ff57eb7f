"""Write a stored head in another format, in the type in which it is stored, all or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.layout import Layout
from clover_jax.checkpoints.stored_head import StoredHead
from clover_jax.runtime.files import atomic_directory


def write_foreign(directory: Path, head: StoredHead, layout: Layout, base: BaseModel) -> None:
    """Write a head in a third-party layout.

    Raises UserError for a head that the layout cannot hold.
    """
    # Refused before the folder is created.
    layout.check_exportable(head.config, base.config)
    dtype = head.dtype
    tensors = {}
    for leaf in layout.leaves(head.config):
        params = head.read(leaf.path)
        for piece in leaf.pieces:
            tensors[piece.name] = piece.unpermuted(params).reshape(piece.shape)
    # Copies of the base's matrices are cast to the head's type.
    matrices = {"lm_head": base.lm_head, "embedding": base.params["embedding"]}
    for name, which in layout.copies.items():
        tensors[name] = np.asarray(matrices[which][: head.config.vocab_size]).astype(dtype)
    # Further weights have the head's type as well; ids and masks keep theirs.
    for name, value in layout.more_tensors(head.config).items():
        tensors[name] = value.astype(dtype) if value.dtype.kind == "f" else value

    # Servers run a head in the type named by `torch_dtype`, or in float16 without it.
    fields = layout.config_fields(head.config, base) | {"torch_dtype": str(dtype)}
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    with atomic_directory(directory) as unfinished:
        save_file(contiguous, unfinished / layout.file, metadata={"format": "pt"})
        text = json.dumps(fields, indent=2) + "\n"
        (unfinished / "config.json").write_text(text, encoding="utf-8")
