"""What decoding needs of the models: base, tokenizer, draft, tree, and an engine for them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from clover_jax.array_types import Params
from clover_jax.config import BaseConfig
from clover_jax.data.chat_templates import with_chat_template
from clover_jax.data.training_data import template_hash
from clover_jax.decoding.adaptive_tree import AdaptiveTree
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.sampling import GREEDY, SamplingConfig
from clover_jax.decoding.tree import TreeConfig, default_tree, parse_tree, portable_name
from clover_jax.drafters.registry import DraftHead
from clover_jax.errors import UserError
from clover_jax.interchange.directory import Draft, load_draft
from clover_jax.loading.subject import NO_DRAFT
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.fingerprint import checksum, lm_head_hash
from clover_jax.quantization import load_rounded_base, parse_parts, round_params
from clover_jax.sharding.placement import param_shardings, place_on
from clover_jax.tokenizers.tokenizer import load_tokenizer, template_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class Models:
    """What one engine decodes with.

    tokenizer: the base's; None where its folder has none.
    draft: None for plain decoding, with the tree that has no nodes.
    mesh: the devices that the params are split over; None: a single one.
    int8: whose matrices are rounded, as `--int8` names them.
    """

    base: BaseModel
    tokenizer: PreTrainedTokenizerBase | None = dataclasses.field(repr=False)
    draft: Draft | None
    tree: TreeConfig | AdaptiveTree
    mesh: Mesh | None = None
    int8: tuple[str, ...] = ()

    def engine(
        self,
        batch_size: int,
        sampling: SamplingConfig = GREEDY,
        seed: int = 0,
        steps_per_chunk: int = 8,
    ) -> Engine:
        """Return an engine with that many slots; whatever the seed, its programs compile once."""
        head = self.draft.head if self.draft else None
        arguments = (sampling, batch_size, steps_per_chunk, self.mesh)
        return _engine(self.base.config, head, self.tree, *arguments).seeded(seed)

    @property
    def draft_params(self) -> Params | None:
        """The head's params; None without a head."""
        return self.draft.params if self.draft else None

    def identity(self) -> dict[str, Any]:
        """Return JSON values that differ where the decoded rows may differ."""
        head = self.draft.head.config if self.draft else None
        tree = dataclasses.replace(self.tree, name=portable_name(self.tree))
        return {
            "dtype": str(self.base.params["embedding"].dtype),
            "int8": list(self.int8),
            "base_hash": lm_head_hash(self.base),
            "base_params": checksum(self.base.params),
            "base_config": _config_hash(self.base.config),
            "chat_template": template_hash(self.tokenizer),
            "draft_hash": params_hash(self.draft_params) if self.draft else None,
            "draft_config": _config_hash(head) if head else None,
            "tree": tree.name,
            "tree_hash": _config_hash(tree),
        }


def load_models(
    base: str,
    draft: str,
    tree: str | None,
    dtype: jnp.dtype,
    *,
    allow_base_mismatch: bool = False,
    draft_rope_theta: float | None = None,
    mesh: Mesh | None = None,
    int8: Sequence[str] = (),
    chat_template: str | None = None,
) -> Models:
    """Load what the names stand for.

    base, draft: as `load_base` and `load_draft` take them; the draft "none" is plain decoding.
    tree: a tree's name; None takes the one that the draft was measured with, else `default_tree`.
    int8: as `--int8`: whose matrices to round.
    chat_template: as `--chat_template`; None takes the base's own.
    Raises UserError for what is missing, broken or does not fit together.
    """
    chosen = parse_tree(tree) if tree else None  # before anything large is read
    if draft == NO_DRAFT and chosen and chosen.num_nodes:
        raise UserError(
            f"tree {tree!r} has {chosen.num_nodes} nodes and there is no draft to fill them; "
            "give --draft=DIR, or leave the tree out"
        )
    plain = load_plain(base, dtype, mesh, int8, chat_template)
    if draft == NO_DRAFT:
        return plain
    return with_draft(
        plain,
        draft,
        tree,
        allow_base_mismatch=allow_base_mismatch,
        draft_rope_theta=draft_rope_theta,
    )


def load_plain(
    base: str,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    int8: Sequence[str] = (),
    chat_template: str | None = None,
) -> Models:
    """Load a base and its tokenizer, for plain decoding; on a mesh straight into shards.

    int8: as `--int8`; raises UserError for another word than these.
    chat_template: as `--chat_template`; raises UserError for one that does not exist.
    """
    parts = parse_parts(int8)
    loaded = load_rounded_base(base, dtype, place_on(mesh, dtype) if mesh else None, parts)
    tokenizer = with_chat_template(load_tokenizer(loaded.directory), chat_template)
    return Models(loaded, tokenizer, None, TreeConfig.root_only(), mesh, parts)


def with_draft(
    plain: Models,
    draft: str,
    tree: str | None,
    *,
    allow_base_mismatch: bool = False,
    draft_rope_theta: float | None = None,
) -> Models:
    """Return models that share the base and decode with a draft; see `load_models`."""
    dtype = plain.base.params["embedding"].dtype
    head = load_draft(draft, plain.base, dtype, allow_base_mismatch, draft_rope_theta)
    if not allow_base_mismatch:
        _check_template(head, plain.tokenizer)
    if plain.mesh is not None:
        there = param_shardings(head.params, plain.mesh)
        head = dataclasses.replace(head, params=jax.device_put(head.params, there))
    if "draft" in plain.int8:
        head = dataclasses.replace(head, params=round_params(head.params))
    chosen = parse_tree(tree or head.tree or default_tree(head.head.config.max_depth))
    if not chosen.num_nodes:
        raise UserError(
            f"tree {chosen.name!r} has no nodes for the draft to fill; give another tree, or no "
            "draft to decode plainly"
        )
    return dataclasses.replace(plain, draft=head, tree=chosen)


@functools.lru_cache(maxsize=8)
def _engine(
    base: BaseConfig,
    head: DraftHead | None,
    tree: TreeConfig | AdaptiveTree,
    sampling: SamplingConfig,
    batch_size: int,
    steps_per_chunk: int,
    mesh: Mesh | None,
) -> Engine:
    return Engine(
        base,
        head,
        tree,
        sampling,
        batch_size=batch_size,
        steps_per_chunk=steps_per_chunk,
        mesh=mesh,
    )


def _check_template(draft: Draft, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise UserError where a draft was trained with another chat template than the one in use.

    A draft does not bring its own: with it and without it a conversation is the same tokens.
    """
    flags = draft.provenance.get("flags") or {}
    name, trained, ours = flags.get("chat_template"), draft.chat_template, template_text(tokenizer)
    if tokenizer is None or (trained is None and (name is None or ours is not None)):
        return  # all is token ids, or nothing is known: older drafts have the flag's name at most
    if trained is None or ours is None or trained.strip("\n") != ours.strip("\n"):
        theirs = "the base's own" if name is None else f"--chat_template={name}"
        raise UserError(
            f"draft {draft.source} was trained with another chat template than the one in use: "
            f"{theirs}; decode with that (its draft.json has the text), or give "
            "--allow_base_mismatch"
        )


def _config_hash(config: Any) -> str:
    """Return SHA-256 over what a config says."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()


def params_hash(params: Params) -> str:
    """Return SHA-256 over the names and values of all params."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()
