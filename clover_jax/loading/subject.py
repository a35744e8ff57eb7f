"""What is measured: a base, a draft head, a tree, and their weights or only the shapes of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from clover_jax.array_types import Params
from clover_jax.config import BaseConfig
from clover_jax.decoding.adaptive_tree import AdaptiveTree
from clover_jax.decoding.engine import bucket
from clover_jax.decoding.sampling import GREEDY, SamplingConfig
from clover_jax.decoding.state import RUNNING, DecodeState, empty_state
from clover_jax.decoding.step import StepConfig, Weights, weights_for
from clover_jax.decoding.tree import TreeConfig, default_tree, parse_tree
from clover_jax.drafters import registry
from clover_jax.drafters.registry import DraftHead
from clover_jax.errors import UserError
from clover_jax.interchange.directory import load_draft
from clover_jax.pretrained.families import read_base_config
from clover_jax.pretrained.shapes import (
    base_shapes,
    cast_shapes,
    is_shape,
    random_params,
    shape_config,
)
from clover_jax.pretrained.sources import find_directory
from clover_jax.quantization import load_rounded_base, parse_parts, round_base, round_params

RANDOM = "random:"  # before a drafter's kind: a head with random weights
NO_DRAFT = "none"  # what --draft says for plain decoding
MAX_EOS = 8  # as in an engine
MOST_CONTEXT = 1024  # that is taken where none is given


@dataclasses.dataclass(frozen=True)
class Subject:
    """A step without a batch size.

    head: None for plain decoding, with the tree that has no nodes.
    weights: arrays, or ShapeDtypeStructs where only shapes are wanted.
    int8: whose matrices are rounded, as `--int8` names them.
    """

    base: BaseConfig
    head: DraftHead | None
    tree: TreeConfig | AdaptiveTree
    weights: Weights
    dtype: jnp.dtype
    int8: tuple[str, ...] = ()

    @property
    def levels(self) -> int:
        """How many levels a step drafts: those of the tree that the head goes down to."""
        if isinstance(self.tree, AdaptiveTree) and self.head is not None:
            return self.tree.levels_within(self.head.config.max_depth)
        return self.tree.depth

    def step(self, sampling: SamplingConfig = GREEDY) -> StepConfig:
        """Return the speculative step; raises UserError where the tree does not suit the head."""
        try:
            return StepConfig(self.base, self.head, self.tree, sampling)
        except ValueError as error:
            raise UserError(str(error)) from error

    def plain(self) -> Subject:
        """Return the base alone."""
        weights = Weights(self.weights.base, {})
        return dataclasses.replace(self, head=None, tree=TreeConfig.root_only(), weights=weights)

    def with_tree(self, tree: TreeConfig | AdaptiveTree) -> Subject:
        """Return the same models with another tree."""
        return dataclasses.replace(self, tree=tree)


def load_subject(
    base: str, draft: str, tree: str | None, dtype: jnp.dtype, int8: Sequence[str] = ()
) -> Subject:
    """Load a base and a draft: folders as everywhere, or `shape:NAME` and `random:KIND`.

    tree: None takes the one that the draft was measured with, else `default_tree`.
    int8: whose matrices to round, as `--int8` names them.
    Raises UserError for what is missing or does not fit together.
    """
    parts = parse_parts(int8)
    model = load_rounded_base(base, dtype, None, parts)
    if draft == NO_DRAFT:
        return _plain_subject(model.params, model.config, dtype, parts)
    if draft.startswith(RANDOM):
        head = _random_head(draft, model.config)
        shapes = cast_shapes(registry.init_shapes(head, model.params), dtype)
        draft_params = random_params(shapes, seed=1)
        chosen = tree or default_tree(head.config.max_depth)
    else:
        loaded = load_draft(draft, model, dtype, allow_base_mismatch=is_shape(base))
        head, draft_params = loaded.head, loaded.params
        chosen = tree or loaded.tree or default_tree(head.config.max_depth)
    if "draft" in parts:
        draft_params = round_params(draft_params)
    weights = weights_for(head, model.params, draft_params)
    return Subject(model.config, head, parse_tree(chosen), weights, dtype, parts)


def shape_subject(
    base: str, draft: str, tree: str | None, dtype: jnp.dtype, int8: Sequence[str] = ()
) -> Subject:
    """Return the shapes alone of a base (a folder or `shape:NAME`) and of `random:KIND` or none.

    Allocates nothing; int8 as for `load_subject`. Raises UserError as `load_subject` does.
    """
    config = _base_config(base)
    parts = parse_parts(int8)
    params = jax.eval_shape(functools.partial(round_base, parts=parts), base_shapes(config, dtype))
    if draft == NO_DRAFT:
        return _plain_subject(params, config, dtype, parts)
    if not draft.startswith(RANDOM):
        raise UserError(
            f"--draft={draft}: to compile for other hardware only shapes are needed; give "
            f"{RANDOM}KIND, such as {RANDOM}clover2, or {NO_DRAFT}"
        )
    head = _random_head(draft, config)
    draft_params = cast_shapes(registry.init_shapes(head, params), dtype)
    if "draft" in parts:
        draft_params = jax.eval_shape(round_params, draft_params)
    weights = Weights(params, draft_params)
    chosen = parse_tree(tree or default_tree(head.config.max_depth))
    return Subject(config, head, chosen, weights, dtype, parts)


def _plain_subject(
    params: Params, config: BaseConfig, dtype: jnp.dtype, int8: tuple[str, ...]
) -> Subject:
    return Subject(config, None, TreeConfig.root_only(), Weights(params, {}), dtype, int8)


def _base_config(source: str) -> BaseConfig:
    return shape_config(source) if is_shape(source) else read_base_config(find_directory(source))


def _random_head(draft: str, base: BaseConfig) -> DraftHead:
    kind = draft.removeprefix(RANDOM)
    return registry.head(registry.config_for_base(kind, base))


def fitting_context(subject: Subject, room: int) -> int:
    """Return how many committed positions to measure at where nobody says: what the base has left.

    Example: of a base of 1024 positions 112 where the room is 912; at most MOST_CONTEXT.
    """
    return max(1, min(MOST_CONTEXT, subject.base.max_position_embeddings - room))


def cache_size(subject: Subject, context: int, room: int) -> int:
    """Return the buffer length for `context` committed positions and `room` more.

    room: positions that the rounds of a measurement take, 0 where all are at one place.
    Raises UserError where the base's context is shorter.
    """
    longest = subject.base.max_position_embeddings
    if context + room > longest:
        needed = f" and the {room} positions that --rounds takes need" if room else " needs"
        fewer = " or --rounds" if room else ""
        raise UserError(
            f"--context={context}{needed} more than {longest}, the base's context; give a smaller "
            f"--context{fewer}"
        )
    depth = subject.tree.depth
    return bucket(context + room + depth, longest + depth)  # as an engine has it


def state_shapes(subject: Subject, batch: int, size: int) -> DecodeState:
    """Return a decode state as ShapeDtypeStructs."""
    base, head, tree = subject.base, subject.head, subject.tree
    return jax.eval_shape(
        lambda: empty_state(base, head, tree, batch, size, MAX_EOS, subject.dtype)
    )


def running_state(subject: Subject, batch: int, size: int, context: int) -> DecodeState:
    """Return a state whose rows have `context` committed positions and run without end.

    Caches are zero: what is read costs the same. Tokens and features are random, and all positions
    that a step may have accepted wait for the head.
    """
    make = jax.jit(
        lambda: empty_state(
            subject.base, subject.head, subject.tree, batch, size, MAX_EOS, subject.dtype
        )
    )
    state = make()
    tokens, features = jax.random.split(jax.random.key(2))
    vocabulary, pending = subject.base.vocab_size, state.next_tokens.shape[1]
    full = jnp.full((batch,), context, jnp.int32)
    return state.replace(
        tokens=jax.random.randint(tokens, (batch, size), 0, vocabulary, jnp.int32),
        length=full,
        end=full + 1,
        limit=full + size,
        finish=jnp.full((batch,), RUNNING, jnp.int32),
        features=jax.random.normal(features, state.features.shape, subject.dtype),
        next_tokens=jax.random.randint(tokens, state.next_tokens.shape, 0, vocabulary, jnp.int32),
        count=jnp.full((batch,), pending, jnp.int32),
    )
