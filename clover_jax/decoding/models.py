"""Models: a base, a draft head and a tree, loaded once; their hashes; states to time them with."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from clover_jax.array_types import Params
from clover_jax.checkpoints.base import BaseModel, checksum, lm_head_hash
from clover_jax.checkpoints.loading import describe_base
from clover_jax.checkpoints.quantization import (
    load_quantized_base,
    parse_parts,
    quantize_base,
    quantize_params,
)
from clover_jax.checkpoints.shapes import base_shapes, cast_shapes, random_params
from clover_jax.checkpoints.stored_head import Draft, find_head, load_draft
from clover_jax.data.chat_templates import clock_identity, with_chat_template
from clover_jax.data.records import json_hash
from clover_jax.data.tokenizer import load_tokenizer, template_hash, template_text
from clover_jax.decoding.cache_reading import resolve_attention
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.grammars import Grammars
from clover_jax.decoding.sampling_config import GREEDY, SamplingConfig
from clover_jax.decoding.spec import NO_DRAFT, RANDOM, ModelSpec
from clover_jax.decoding.state import EOS_ROOM, RUNNING, DecodeState, bucket, empty_state
from clover_jax.decoding.step import StepConfig, Weights, weights_for
from clover_jax.decoding.tree_config import (
    CopyTree,
    Tree,
    TreeConfig,
    default_tree,
    parse_tree,
    portable_name,
    with_copies,
)
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from clover_jax.models.meshes import mesh_for
from clover_jax.models.placement import param_shardings, place_on
from clover_jax.runtime.distributed import to_host
from clover_jax.runtime.dtypes import resolve_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_COPIED_FROM = 2**16  # tokens of --copy_from
SMALL_TREE = 8  # nodes; experiments/results/real_base.md has seconds of a CPU by nodes

MOST_CONTEXT = 1024  # the default


@dataclasses.dataclass(frozen=True)
class Models:
    """The models of one engine.

    tokenizer: the base's; None where its folder has none, or `spec.tokenizer` is False.
    draft: None for plain decoding, with the tree without nodes.
    mesh: the devices that hold the params, or None for a single device.
    int8: the models with quantized matrices, named as in `--int8`.
    copy_from: token ids of a text that every row may copy from.
    attention: the implementation that reads the KV cache, as in `StepConfig`.
    Params are arrays, or ShapeDtypeStructs where `load_shapes` made them.
    """

    base: BaseModel
    tokenizer: PreTrainedTokenizerBase | None = dataclasses.field(repr=False)
    draft: Draft | None
    tree: Tree
    mesh: Mesh | None = None
    int8: tuple[str, ...] = ()
    copy_from: tuple[int, ...] = ()
    attention: str = "xla"

    @property
    def copies(self) -> bool:
        """Whether drafts are copied from text, alone or in addition to a head's."""
        is_lookup = self.head is not None and self.head.config.kind == "lookup"
        return is_lookup or isinstance(self.tree, CopyTree)

    @property
    def head(self) -> registry.DraftHead | None:
        return self.draft.head if self.draft else None

    @property
    def draft_params(self) -> Params | None:
        return self.draft.params if self.draft else None

    @property
    def dtype(self) -> jnp.dtype:
        """The type of params that are not quantized, and of activations."""
        return self.base.dtype

    @functools.cached_property
    def weights(self) -> Weights:
        """The weights of a step: all params, and the gathered rows of a reduced vocabulary."""
        # Made once: the gathered rows are a copy, which several engines can share.
        return weights_for(self.head, self.base.params, self.draft_params)

    @functools.cached_property
    def grammars(self) -> Grammars | None:
        """The forms that texts may have to match; None without a tokenizer."""
        config = self.base.config
        if self.tokenizer is None:
            return None
        return Grammars(self.tokenizer, config.vocab_size, config.eos_token_ids)

    @property
    def levels(self) -> int:
        """Levels of the tree that this head drafts; 1 where all nodes are copies, made at once."""
        levels = self.tree.levels_within(self.head.config.max_depth if self.head else None)
        return max(1, levels) if isinstance(self.tree, CopyTree) else levels

    def step(self, sampling: SamplingConfig = GREEDY) -> StepConfig:
        """Return the speculative step; raises UserError where the tree does not suit the head."""
        return StepConfig(self.base.config, self.head, self.tree, sampling, self.attention)

    def plain(self) -> Models:
        return dataclasses.replace(self, draft=None, tree=TreeConfig.root_only())

    def with_tree(self, tree: Tree) -> Models:
        return dataclasses.replace(self, tree=tree)

    def engine(self, batch_size: int, sampling: SamplingConfig = GREEDY, **options: Any) -> Engine:
        options |= {"batch_size": batch_size, "mesh": self.mesh, "attention": self.attention}
        options["grammars"] = self.grammars
        return Engine(self.base.config, self.head, self.tree, sampling, **options)


def load(spec: ModelSpec, plain: Models | None = None) -> Models:
    """Load the models that a spec names.

    plain: models whose base, tokenizer, mesh and int8 are shared; None loads the spec's.
    """
    # A mistake in a name should be reported before a base is loaded, which may take minutes.
    check_names(spec)
    # Several drafts can be measured on one base.
    if plain is None:
        parts, dtype, mesh = parse_parts(spec.int8), resolve_dtype(spec.dtype), mesh_for(spec.mesh)
        # Tensors go to their devices one by one, so no device ever holds the whole base.
        base = load_quantized_base(spec.base, dtype, place_on(mesh, dtype), parts)
        tokenizer = load_tokenizer(base.directory) if spec.tokenizer else None
        tokenizer = with_chat_template(tokenizer, spec.chat_template)
        attention = resolve_attention(spec.attention)
        root = TreeConfig.root_only()
        plain = Models(base, tokenizer, None, root, mesh, parts, attention=attention)
    if spec.draft == NO_DRAFT:
        return plain

    # The draft is placed on its devices first and quantized there, as the base is.
    draft = _head_of(spec, plain.base, plain.tokenizer)
    params = draft.params
    if plain.mesh is not None:
        params = jax.device_put(params, param_shardings(params, plain.mesh))
    if "draft" in plain.int8:
        params = quantize_params(params)
    return _with_draft(plain, dataclasses.replace(draft, params=params), spec)


def load_shapes(spec: ModelSpec, platform: str | None = None) -> Models:
    """Return models of shapes alone, for a base and a draft of "random:KIND..." or none.

    platform: the target of compilation; None is this process's.
    Allocates nothing, reads no weights and splits nothing over a mesh. Raises UserError as `load`.
    """
    if spec.draft != NO_DRAFT and not needs_no_file(spec.draft):
        raise UserError(
            f"--draft={spec.draft}: to compile for other hardware only shapes are needed; give "
            f"{RANDOM}KIND, such as {RANDOM}clover2, or {NO_DRAFT}"
        )
    base, parts = describe_base(spec.base), parse_parts(spec.int8)
    # The same functions as in `load`, traced, so that the shapes equal loaded params'.
    shapes = base_shapes(base.config, resolve_dtype(spec.dtype))
    params = jax.eval_shape(functools.partial(quantize_base, parts=parts), shapes)
    base = dataclasses.replace(base, params=params)
    attention = resolve_attention(spec.attention, platform)
    plain = Models(base, None, None, TreeConfig.root_only(), int8=parts, attention=attention)
    if spec.draft == NO_DRAFT:
        return plain

    draft = fresh_head(spec.draft, plain.base)
    if "draft" in parts:
        draft = dataclasses.replace(draft, params=jax.eval_shape(quantize_params, draft.params))
    # The rows of a reduced vocabulary, which `Models.weights` gathers from arrays.
    weights = jax.eval_shape(functools.partial(weights_for, draft.head), params, draft.params)
    base = dataclasses.replace(base, params=weights.base)
    return _with_draft(dataclasses.replace(plain, base=base), draft, spec)


def tree_notice(spec: ModelSpec, models: Models) -> str | None:
    """Return a warning where a tree that nobody named is too large for a CPU; None elsewhere."""
    if spec.tree or models.tree.num_nodes <= SMALL_TREE or jax.default_backend() != "cpu":
        return None
    tree = models.tree
    return (
        f"on a CPU a forward takes longer the more tokens it reads, and the tree {tree.name} has "
        f"{tree.num_nodes} nodes; --tree=auto (generate, evaluate) finds the fastest"
    )


def check_names(spec: ModelSpec) -> None:
    """Raise UserError for a tree or a draft that does not exist, before a base is read."""
    # A tree without nodes needs no draft: it decodes plainly.
    tree = parse_tree(spec.tree) if spec.tree else None
    if spec.draft == NO_DRAFT:
        if tree is not None and tree.num_nodes:
            raise UserError(
                f"tree {spec.tree!r} has {tree.num_nodes} nodes and there is no draft to fill "
                "them; give --draft=DIR, or leave the tree out"
            )
        if spec.copy:
            raise UserError(f"--copy={spec.copy} needs a draft; --draft=lookup drafts copies only")
    elif not needs_no_file(spec.draft):
        # The head is found and recognized, but not opened, which needs the base.
        try:
            find_head(spec.draft, spec.draft_rope_theta)
        except UserError as error:
            raise UserError(f"--draft={spec.draft}: {error}") from error


def needs_no_file(draft: str) -> bool:
    """Return whether a draft has no folder: random weights, or none at all."""
    return draft.startswith(RANDOM) or draft in registry.TRAINING_FREE


def _head_of(spec: ModelSpec, base: BaseModel, tokenizer: PreTrainedTokenizerBase | None) -> Draft:
    """Return the head that a spec names, in the base's dtype."""
    if needs_no_file(spec.draft):
        # The seed differs from that of a base with random weights, which is 0.
        draft = fresh_head(spec.draft, base)
        return dataclasses.replace(draft, params=random_params(draft.params, seed=1))

    mismatch, theta = spec.allow_base_mismatch, spec.draft_rope_theta
    draft = load_draft(spec.draft, base, base.dtype, allow_base_mismatch=mismatch, rope_theta=theta)
    # A head cannot know another template than that of its training. Older drafts recorded the flag
    # at most, so the text of their template is unknown.
    flags = draft.provenance.get("flags") or {}
    name, trained, ours = flags.get("chat_template"), draft.chat_template, template_text(tokenizer)
    unknown = trained is None and (name is None or ours is not None)
    if mismatch or tokenizer is None or unknown:
        return draft
    if trained is None or ours is None or trained.strip("\n") != ours.strip("\n"):
        theirs = "the base's own" if name is None else f"--chat_template={name}"
        raise UserError(
            f"draft {draft.source} was trained with another chat template than the one in use: "
            f"{theirs}; decode with that (its draft.json has the text), or give "
            "--allow_base_mismatch"
        )
    return draft


def fresh_head(name: str, base: BaseModel) -> Draft:
    """Return a draft of shapes: a head as `train` would initialize it for this base."""
    # "random:KIND:NAME=VALUE,...", or the bare kind of a head without weights.
    kind, _, text = name.removeprefix(RANDOM).partition(":")
    options = registry.parse_options(f"--draft={RANDOM}{kind}:", text, kind, draft_vocab=int)
    size = options.pop("draft_vocab", None)
    try:
        config = registry.config_for_base(kind, base.config, **options)
        if size is not None:  # any tokens will do: the shapes are the same
            config = dataclasses.replace(config, draft_to_target=tuple(range(size)))
        head = registry.head(config)
    except ValueError as error:
        raise UserError(f"--draft={name}: {error}") from error
    # In the base's type, like a head that is read.
    shapes = cast_shapes(registry.init_shapes(head, base.params), base.dtype)
    return Draft(head, shapes, head.config.default_tree, {}, name)


def _with_draft(plain: Models, draft: Draft, spec: ModelSpec) -> Models:
    # The user's tree, else the tree with which the draft was measured, else a default.
    name = spec.tree or draft.tree or default_tree(draft.head.config.max_depth)
    chosen = parse_tree(name)
    # --copy replaces the copies of a draft's recorded tree, but not those that --tree names.
    if spec.copy:
        if spec.tree and isinstance(chosen, CopyTree):
            raise UserError(f"tree {name!r} has copies already: give it without --copy={spec.copy}")
        chosen = with_copies(chosen, spec.copy)
    # A draft without nodes would decode plainly and be reported as speculation.
    if not chosen.num_nodes:
        raise UserError(
            f"tree {chosen.name!r} has no nodes for the draft to fill; give another tree, or no "
            "draft to decode plainly"
        )

    # After the tree: reading the text takes time, and a wrong tree should be reported first.
    source = _read_source(spec.copy_from, plain.tokenizer)
    models = dataclasses.replace(plain, draft=draft, tree=chosen, copy_from=source)
    if source and not models.copies:
        raise UserError(
            f"--copy_from={spec.copy_from}: the tree {chosen.name} has no copies; give --copy=16, "
            "or --draft=lookup"
        )
    return models


def _read_source(path: str | None, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Return the token ids of a file that every row may copy from."""
    if path is None:
        return ()
    if tokenizer is None:
        raise UserError(
            f"--copy_from={path} needs a tokenizer, and the base has no tokenizer files"
        )
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--copy_from={path} cannot be read as UTF-8 text: {error}") from error

    # Copies may begin anywhere in it, so no token marks its beginning.
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) > MOST_COPIED_FROM:
        raise UserError(
            f"--copy_from={path} has {len(ids)} tokens, and every step compares them all; give a "
            f"file of at most {MOST_COPIED_FROM} tokens"
        )
    return tuple(ids)


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
    values |= clock_identity(models.tokenizer)
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


def fitting_context(models: Models, room: int) -> int:
    """Return the default number of committed positions of a measurement, at most MOST_CONTEXT.

    Example: 112 for a base of 1024 positions where the room is 912.
    """
    # At least 1: if even that does not fit, `cache_size` raises the error.
    return max(1, min(MOST_CONTEXT, models.base.config.max_position_embeddings - room))


def cache_size(models: Models, context: int, room: int) -> int:
    """Return the buffer length for `context` committed positions and `room` more.

    room: positions that a measurement advances by, 0 where it stays in place.
    Raises UserError where the base's context is shorter.
    """
    longest = models.base.config.max_position_embeddings
    if context + room > longest:
        needed = f" and the {room} positions that --rounds takes need" if room else " needs"
        fewer = " or --rounds" if room else ""
        raise UserError(
            f"--context={context}{needed} more than {longest}, the base's context; give a smaller "
            f"--context{fewer}"
        )
    depth = models.tree.depth
    return bucket(context + room + depth, longest + depth)  # as in an engine


def running_state(models: Models, batch: int, size: int, context: int) -> DecodeState:
    """Return a state whose rows have `context` committed positions and run without end.

    KV caches are zero, since their values do not change the cost. Tokens and features are random,
    and the largest number of accepted positions waits for `absorb`.
    """
    # One program makes all buffers; without jit each would compile a program of its own.
    state = jax.jit(functools.partial(idle_state, models, batch, size))()
    tokens, features = jax.random.split(jax.random.key(2))
    vocabulary, pending = models.base.config.vocab_size, state.next_tokens.shape[1]
    full = jnp.full((batch,), context, jnp.int32)
    # No row reaches the limit: a row that ends would cost less than one that runs.
    return state.replace(
        tokens=jax.random.randint(tokens, (batch, size), 0, vocabulary, jnp.int32),
        length=full,
        end=full + 1,
        limit=full + size,
        finish=jnp.full((batch,), RUNNING, jnp.int32),
        features=jax.random.normal(features, state.features.shape, models.dtype),
        next_tokens=jax.random.randint(tokens, state.next_tokens.shape, 0, vocabulary, jnp.int32),
        count=jnp.full((batch,), pending, jnp.int32),
    )


def idle_state(models: Models, batch: int, size: int) -> DecodeState:
    """Return empty slots with the shapes of an engine's."""
    base, head, tree = models.base.config, models.head, models.tree
    return empty_state(base, head, tree, batch, size, EOS_ROOM, models.dtype)
