"""The identity of a set of models: the values that a row's text depends on."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np

from clover_jax.array_types import Params
from clover_jax.checkpoints.base import checksum, lm_head_hash
from clover_jax.data.records import json_hash
from clover_jax.data.tokenizer import template_hash
from clover_jax.decoding.models import Models
from clover_jax.decoding.tree_config import portable_name
from clover_jax.runtime.distributed import to_host


def identity_of(models: Models) -> dict[str, Any]:
    """Return JSON values that differ where the decoded rows may differ."""
    # A tree has the same name here, whichever file it was read from.
    tree = dataclasses.replace(models.tree, name=portable_name(models.tree))
    values = {
        "dtype": str(models.dtype),
        "int8": list(models.int8),
        # The hash is the same for any dtype of loading; the checksum shows any changed weight.
        "base_hash": lm_head_hash(models.base),
        "base_params": checksum(models.base.params),
        "base_config": json_hash(models.base.config.to_dict()),
        "chat_template": template_hash(models.tokenizer),
        "draft_hash": params_hash(models.draft_params) if models.draft else None,
        "draft_config": json_hash(models.head.config.to_dict()) if models.head else None,
        "tree": tree.name,
        "tree_hash": json_hash(tree.to_dict()),
    }
    # Only where they are used, so that older outputs resume.
    if models.copy_from:
        ids = np.array(models.copy_from, np.int32)
        values["copy_from"] = hashlib.sha256(ids.tobytes()).hexdigest()
    if models.attention != "xla":
        values["attention"] = models.attention
    return values


def params_hash(params: Params) -> str:
    """Return SHA-256 over the names and values of all params."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        # The name too: two matrices of one shape could have changed places.
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(to_host(leaf).tobytes())
    return digest.hexdigest()
