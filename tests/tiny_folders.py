"""Random tiny models as folders on disk, for the commands: a base with a tokenizer, and a draft."""

import dataclasses
from pathlib import Path

import jax

from clover_jax.checkpoints.base import fingerprint
from clover_jax.checkpoints.card import Card, write_native
from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.shapes import cast_shapes
from clover_jax.config import BaseConfig
from clover_jax.drafters import registry
from experiments.tiny_base.base_folder import save_base
from tests.tiny_checkpoints import random_leaves
from tests.tiny_models import TINY, init_head, random_base
from tests.tiny_tokenizers import save_byte_level

# One id for each token of the byte-level tokenizer, a short context, and no end of a sequence: a
# random model could emit one at any time.
SPEAKING = dataclasses.replace(
    TINY, vocab_size=261, num_layers=2, max_position_embeddings=128, bos_token_id=0
)


def save_tiny_base(folder: Path, config: BaseConfig = SPEAKING, template: str | None = None):
    """Write a random base with a tokenizer; return its folder."""
    folder.mkdir(parents=True)
    save_byte_level(folder, template)
    save_base(folder, config, random_base(config))
    return folder


def save_draft(folder: Path, config, params, tree, base, provenance):
    """Write a native draft directory; base: a fingerprint."""
    write_native(folder, Card(config, base, tree, provenance), params)


def save_random_head(folder: Path, base, kind, options=(), dtype="float32", **changes):
    """Write a native draft with params of any values; changes: what its maker does not offer."""
    config = registry.config_for_base(kind, base.config, **dict(options))
    config = dataclasses.replace(config, **changes)
    shapes = cast_shapes(registry.init_shapes(registry.head(config), base.params), dtype)
    save_draft(folder, config, random_leaves(shapes), None, fingerprint(base), {})


def save_tiny_draft(folder: Path, base_folder: Path, tree: str | None = "chain:2"):
    """Write a Clover-2 draft initialized from the base; return its folder."""
    base = load_base(str(base_folder))
    config = registry.config_for_base("clover2", base.config)
    params = init_head(registry.head(config), base.params, jax.random.key(1))
    save_draft(folder, config, params, tree, fingerprint(base), {})
    return folder
