"""The drafters by name, and drafters in a user's own file; imported only when used.

A drafter in a file is named FILE.py:CLASS. Its draft records that name, with an absolute path.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clover_jax.array_types import Array, Params
from clover_jax.config import BaseConfig, DrafterConfig, LayerConfig
from clover_jax.drafters.drafter import Drafter, frozen_from_base
from clover_jax.errors import UserError
from clover_jax.field_types import parse_values
from clover_jax.models.batch import Batch

# A drafter's name, which is its file's, and its class; that of its config is called CLASSConfig.
DRAFTERS = {
    "clover2": "Clover2",
    "clover_lr": "CloverLR",
    "clover": "Clover",
    "medusa": "Medusa",
    "eagle": "Eagle",
    "eagle3": "Eagle3",
    "dflash2": "DFlash2",
    "mtp": "MTP",
}
# The same for drafters without weights; --draft takes these names.
TRAINING_FREE = {"lookup": "Lookup", "recycle": "Recycle"}
# Files of drafters that a stored draft may name, separated as in PATH: importing one runs its code.
TRUSTED_VARIABLE = "CLOVER_JAX_DRAFTER_FILES"


@dataclasses.dataclass(frozen=True)
class DraftHead:
    """A drafter's module and config, without params."""

    config: DrafterConfig
    module: Drafter

    def apply(self, params: Params, method: str, *arguments: Any) -> Any:
        """Call a method of the contract."""
        return self.module.apply({"params": params}, *arguments, method=method)

    def rescored(self, params: Params, hidden: Array, logits: Array) -> Array:
        """Return the scores that the head proposes with: of `rescore`, or its logits."""
        return self.apply(params, "rescore", hidden, logits) if self.module.rescores else logits


class _Kind(NamedTuple):
    """The imported file of a kind, and the classes of its config and its module."""

    file: Any
    config: type[DrafterConfig]
    module: type[Drafter]


def _load(kind: str) -> _Kind:
    known = DRAFTERS | TRAINING_FREE
    path, colon, name = kind.rpartition(":")
    if colon and path.endswith(".py"):
        return _load_file(str(Path(path).expanduser().resolve()), name)
    if kind not in known:
        raise UserError(
            f"drafter {kind!r} is unknown; the drafters are {', '.join(DRAFTERS)}, or FILE.py:CLASS"
        )
    file, name = importlib.import_module(f"clover_jax.drafters.{kind}"), known[kind]
    return _Kind(file, getattr(file, f"{name}Config"), getattr(file, name))


@functools.cache
def _load_file(path: str, name: str) -> _Kind:
    """Import a drafter from a user's file; raises UserError where the file has none by that name.

    The config's class is the annotation of the module's field `config`.
    """
    spec = importlib.util.spec_from_file_location(f"drafter_file_{Path(path).stem}", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise UserError(f"drafter {path}:{name}: no such file")
    file = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = file  # annotations are looked up there
    spec.loader.exec_module(file)

    module = getattr(file, name, None)
    if not (isinstance(module, type) and issubclass(module, Drafter)):
        raise UserError(f"{path} has no class {name!r} that extends Drafter")
    config = typing.get_type_hints(module).get("config")
    if not (isinstance(config, type) and issubclass(config, DrafterConfig)):
        raise UserError(f"{path}: {name} needs a field 'config: CONFIG', a DrafterConfig")
    missing = [each for each in ("make_config", "init_from_base") if not hasattr(file, each)]
    if missing:
        raise UserError(f"{path} has no function {missing[0]}; see drafters/README.md")
    _FILES.add(path)
    return _Kind(file, config, module)


_FILES: set[str] = set()  # imported in this process, so trusted by its user


def config_for_base(kind: str, base: BaseConfig, **options: Any) -> DrafterConfig:
    """Return the config of a head of this kind for a base, with options of the kind.

    Raises UserError for an option that the kind does not have, ValueError for a bad value.
    """
    known = _options(kind)
    # Checked here to name the known options; `make_config` would raise a bare TypeError.
    for name in options:
        if name not in known:
            raise UserError(f"a {kind} head has no option {name}; its options: {', '.join(known)}")
    config = of_base(_load(kind).file.make_config(base, **options), base)
    path, _, name = kind.rpartition(":")
    if path:
        # The draft is read from other folders too.
        kind = f"{Path(path).expanduser().resolve()}:{name}"
        config = dataclasses.replace(config, kind=kind)
    return config


def _options(kind: str) -> dict[str, Any]:
    """Return name -> type of a kind's options: the parameters of its `make_config`.

    `**options` stands for the fields of its config that no other kind has, and num_positions.
    """
    file, config, _ = _load(kind)
    # These files have annotations as strings; eval_str turns them into types.
    parameters = inspect.signature(file.make_config, eval_str=True).parameters
    hints = {name: each.annotation for name, each in parameters.items() if name != "base"}
    if hints.pop("options", None) is None:
        return hints

    of_config, of_any = typing.get_type_hints(config), typing.get_type_hints(DrafterConfig)
    own = (each.name for each in dataclasses.fields(config) if each.name not in of_any)
    return {name: of_config[name] for name in ("num_positions", *own)} | hints


def of_base(config: DrafterConfig, base: BaseConfig) -> DrafterConfig:
    """Return a head's config with the properties of its base that are not shapes."""

    # Layers may differ in rotation, heads and experts: the deepest one like the head's layers,
    # which have attention.
    def kind(layer: LayerConfig) -> tuple[Any, ...]:
        heads = layer.num_kv_heads, layer.head_dim, layer.keys_as_values, layer.shares_keys
        return layer.rope, layer.unrotated, layer.num_experts, heads

    with_attention = [i for i in range(base.num_layers) if base.layer_at(i).delta is None]
    alike = [i for i in with_attention if kind(base.layer_at(i)) == kind(base)]
    begins_as = max(alike, default=base.num_layers - 1)
    return dataclasses.replace(
        config,
        embedding_scale=base.embedding_scale,
        logit_cap=base.logit_cap,
        base_layer=None if begins_as == base.num_layers - 1 else begins_as,
    )


def plain_options(kind: str) -> dict[str, type]:
    """Return the options of a kind that a user may set by name: name -> str, int, float or bool."""
    plain = {}
    for name, hint in _options(kind).items():
        # Only a single type, or None, can be read from a string.
        arms = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
        one = arms[0] if isinstance(hint, types.UnionType) and len(arms) == 1 else hint
        if one in (str, int, float, bool):
            plain[name] = one
    return plain


def parse_options(given: str, text: str, kind: str, **more: type) -> dict[str, Any]:
    """Return the options that "name=value,..." sets, each of the type that the kind declares.

    given: the words before the text in an error, such as "--drafter_options=".
    more: further names that are known here, and their types.
    Example: "order=block_first,output_projector=false" for clover2 gives
    {"order": "block_first", "output_projector": False}.
    Raises UserError, with a list of the kind's options, for an unknown one or a bad value.
    """
    return parse_values(given, text, plain_options(kind) | more, f"a {kind} head has no option")


def config_from_dict(values: dict[str, Any]) -> DrafterConfig:
    """Rebuild a config written by `DrafterConfig.to_dict`.

    Raises UserError for an unknown kind, and for a file that the user has not named: a draft from
    elsewhere must not run code.
    """
    kind = str(values.get("kind", "missing"))
    path, _, name = kind.rpartition(":")
    trusted = os.environ.get(TRUSTED_VARIABLE, "").split(os.pathsep)
    if path and path not in _FILES | {str(Path(one).resolve()) for one in trusted if one}:
        raise UserError(
            f"this draft runs the code of {path} (class {name}); if you trust that file, set "
            f"{TRUSTED_VARIABLE}={path}"
        )
    return _load(kind).config.from_dict(values)


def head(config: DrafterConfig) -> DraftHead:
    """Return the head that a config describes."""
    return DraftHead(config=config, module=_load(config.kind).module(config))


def init_shapes(draft: DraftHead, base_params: Params) -> Params:
    """Return the head's params as ShapeDtypeStructs (float32), allocating nothing."""
    if draft.config.kind in TRAINING_FREE:
        return {}
    return jax.eval_shape(lambda base: _random_params(draft, base, jax.random.key(0)), base_params)


def init_params(draft: DraftHead, base_params: Params, rng: Array) -> Params:
    """Return float32 params, initialized from the base as the method defines."""
    if draft.config.kind in TRAINING_FREE:
        return {}
    # Random params first, then the ones that the method takes from the base.
    fresh, noise = jax.random.split(rng)
    params = _random_params(draft, base_params, fresh)
    file = _load(draft.config.kind).file
    begun = file.init_from_base(draft.config, params, base_params, noise)
    # In the dtype of the head, not of the base.
    return jax.tree.map(lambda old, x: jnp.array(x, old.dtype), params, {**params, **begun})


def _random_params(draft: DraftHead, base_params: Params, rng: Array) -> Params:
    # Two tokens more than positions: the root and the last target.
    width = draft.config.layer.hidden_size * len(draft.config.features)
    ids = jnp.zeros((1, draft.config.num_positions + 2), jnp.int32)
    features = jnp.zeros((*ids.shape, width))
    frozen = frozen_from_base(base_params)
    # Values do not matter: params follow from shapes and the key.
    batch = Batch(ids, ids, ids, ids > 0)
    return draft.module.init(rng, frozen, features, batch, None, method="train_forward")["params"]
