"""Which part of every array lies on which device of a mesh (`meshes.py`).

Models, steps and losses are functions of arrays, and the compiler splits them by the placement of
their arguments. Where that splits badly, a module asks for the mesh in use. A run
does, in this order,

    shape = parse_mesh("data=2,fsdp=2,tensor=-1", len(jax.devices()))   # MeshShape(2, 2, 2)
    mesh = make_mesh(shape)                       # or make_mesh(shape, topology.devices)
    base = load_base(source, dtype, place_on(mesh, dtype))      # read straight into shards
    shardings = param_shardings(shapes, mesh)     # base, any draft, train states with optimizer
    state = jax.jit(init, out_shardings=shardings)(...)

To compile without devices, `with_shardings` adds the same placements to shapes; an `AbstractMesh`
(`make_abstract_mesh`) is enough for it. `param_layouts.py` decides how a parameter is split.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from clover_jax.array_types import Array, LeafPath, Params, Place, PyTree
from clover_jax.errors import UserError
from clover_jax.models.meshes import AXES, AnyMesh, make_abstract_mesh, shape_of
from clover_jax.models.param_layouts import leaf_path, param_spec

ROWS = ("data", "fsdp")  # the axes that split the rows of a batch


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Return the placement of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def put_whole(value: np.ndarray, mesh: Mesh) -> Array:
    """Put a value, the same in every process, whole on every device."""
    # Each process fills its own devices: nothing is sent.
    return jax.make_array_from_callback(value.shape, replicated(mesh), lambda index: value[index])


def param_shardings(params: PyTree, mesh: AnyMesh) -> PyTree:
    """Return the placement of every leaf of a base, a draft, or a train state with its optimizer.

    params: arrays or ShapeDtypeStructs. The optimizer's moments carry the names of their params,
        so they lie where those do; scalars are replicated.
    Raises UserError naming a leaf without a rule, or a dimension that its axis does not divide.
    """

    def place(path: tuple, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, param_spec(leaf_path(path), leaf.shape, mesh))

    return jax.tree.map_with_path(place, params)


def gathered(params: PyTree, mesh: AnyMesh | None) -> PyTree:
    """Gather params over fsdp, for use within a compiled step; without a mesh they are unchanged.

    Left to itself, the compiler may take the split of a weight's D for one of the activations' D
    and compute all rows on every device. Gathered one by one, weights are needed one layer at a
    time, and their gradients are scattered back.
    """
    if mesh is None or mesh.shape["fsdp"] == 1:
        return params

    def gather(path: tuple, leaf: Array) -> Array:
        # Only fsdp is undone: tensor splits the products themselves.
        spec = param_spec(leaf_path(path), leaf.shape, mesh)
        whole = PartitionSpec(*(None if axis == "fsdp" else axis for axis in spec))
        return _gather(NamedSharding(mesh, whole), NamedSharding(mesh, spec), leaf)

    return jax.tree.map_with_path(gather, params)


def gathered_in_use(params: PyTree) -> PyTree:
    """Gather params over fsdp where all axes of the mesh in use (`jax.set_mesh`) are above 1.

    For weights within a compiled program that has no mesh of its own. Where rows are split over
    data and fsdp, a weight over tensor and fsdp, and a product sums over tensor, XLA's partitioner
    may hand devices the rows of others (experiments/results/upstream/xla_partitioner_dot.md). It
    takes three axes; on fewer the weights stay, since the activations are less to send.
    """
    mesh = _mesh_in_use()
    return params if mesh is None or min(mesh.shape.values()) == 1 else gathered(params, mesh)


# The two placements are static arguments and get no gradient.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(whole: NamedSharding, at_rest: NamedSharding, leaf: Array) -> Array:
    """Lay out a leaf as `whole`, and its gradient as the leaf lies at rest.

    The gradient of a plain constraint has the same constraint: it would be summed up whole on every
    device, at twice the cost of a scattered sum.
    """
    return jax.lax.with_sharding_constraint(leaf, whole)


_gather.defvjp(
    lambda whole, at_rest, leaf: (_gather(whole, at_rest, leaf), None),
    lambda _, at_rest, __, gradient: (jax.lax.with_sharding_constraint(gradient, at_rest),),
)


def row_shardings(batch: PyTree, mesh: AnyMesh) -> PyTree:
    """Return the placement of a training batch, whose leaves all have B rows first.

    Raises UserError where the rows cannot be split evenly.
    """

    def place(leaf: Any) -> NamedSharding:
        shards = shape_of(mesh).num_row_shards
        if leaf.shape[0] % shards:
            raise UserError(
                f"--batch_size={leaf.shape[0]} must be divisible by data x fsdp = {shards} of the "
                "mesh, so that every device gets as many rows"
            )
        return NamedSharding(mesh, PartitionSpec(ROWS))

    return jax.tree.map(place, batch)


def parts_of_rows(batch: PyTree, count: int, mesh: AnyMesh | None) -> PyTree:
    """Split the rows of a batch in parts, for use within a compiled step: [count, B / count, ...].

    Part k has every count-th row from k on, so each device's rows go evenly to all parts.
    """

    def split(leaf: Array) -> Array:
        # Neighbors, which lie on one device, go to different parts.
        parts = jnp.swapaxes(leaf.reshape(-1, count, *leaf.shape[1:]), 0, 1)
        if mesh is None:
            return parts
        where = NamedSharding(mesh, PartitionSpec(None, ROWS))
        return jax.lax.with_sharding_constraint(parts, where)

    return jax.tree.map(split, batch)


def placed_as_params(params: PyTree, mesh: AnyMesh | None) -> PyTree:
    """Lay params or their gradient out as params lie at rest, for use within a compiled step."""
    if mesh is None:
        return params
    return jax.lax.with_sharding_constraint(params, param_shardings(params, mesh))


def place_rows(batch: PyTree, mesh: Mesh) -> PyTree:
    """Put a batch of NumPy arrays, the same in every process, on the devices of a mesh."""

    def place(leaf: np.ndarray, sharding: NamedSharding) -> Array:
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(place, batch, row_shardings(batch, mesh))


def rows_of_process(batch_size: int, mesh: Mesh) -> list[int]:
    """Return the rows of a batch that devices of this process hold."""
    # Which rows a process must read: the data of the others it never needs.
    places = NamedSharding(mesh, PartitionSpec(ROWS)).addressable_devices_indices_map((batch_size,))
    held = [range(batch_size)[index[0]] for index in places.values() if index is not None]
    return sorted(set().union(*held))


def decode_state_shardings(state: PyTree, mesh: AnyMesh) -> PyTree:
    """Return the placement of a decode state, or of its caches: rows first, then heads.

    A cache is [B, K, S, H]; no other leaf of a state has four dimensions. Rows that cannot be split
    evenly (the single one of a prefill) and heads that cannot are on every device.
    """

    def place(leaf: Any) -> NamedSharding:
        rows = _axes_of_rows(leaf.shape[0], mesh)
        if leaf.ndim < 4:
            return NamedSharding(mesh, PartitionSpec(rows))
        # Axis 1 of a cache is K, the key heads.
        heads = "tensor" if leaf.shape[1] % mesh.shape["tensor"] == 0 else None
        return NamedSharding(mesh, PartitionSpec(rows, heads))

    return jax.tree.map(place, state)


def logits_spec(shape: tuple[int, ...], least: int) -> PartitionSpec | None:
    """Return how logits [B, ..., V] lie on the mesh in use (`jax.set_mesh`); None without one.

    For functions that compute the shards apart, because the compiler would gather them: the last
    axis is split over `tensor` where it is a vocabulary, of `least` entries or more.
    """
    mesh = _mesh_in_use()
    if mesh is None or len(shape) < 2:
        return None
    tensor = mesh.shape["tensor"]
    is_split = tensor > 1 and shape[-1] >= least and shape[-1] % tensor == 0
    between = (None,) * (len(shape) - 2)
    return PartitionSpec(_axes_of_rows(shape[0], mesh), *between, "tensor" if is_split else None)


def by_rows(x: Array) -> Array:
    """Split the rows of activations over the mesh in use and keep their width whole.

    Left to itself, the compiler may split the width as some head's weights are, all the way through
    the base, and gather it again for every product. Without a mesh in use x is unchanged.
    """
    mesh = _mesh_in_use()
    if mesh is None:
        return x
    # Axes that are not named stay whole.
    rows = PartitionSpec(_axes_of_rows(x.shape[0], mesh))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, rows))


def over_rows(function: Callable[..., Array], *arrays: Array) -> Array:
    """Apply a function of rows to each device's rows on the mesh in use.

    For writes to computed positions, which the compiler would send to all devices.
    """
    mesh = _mesh_in_use()
    # Rows that cannot be split, as the single row of a prefill, lie whole on every device.
    if mesh is None or _axes_of_rows(arrays[0].shape[0], mesh) is None:
        return function(*arrays)
    rows = PartitionSpec(ROWS)
    return jax.shard_map(function, in_specs=rows, out_specs=rows, check_vma=False)(*arrays)


def over_rows_of(
    mesh: AnyMesh, function: Callable[..., PyTree], params: Params, *rows: Array
) -> PyTree:
    """Apply a function to the params and the rows that each device has.

    function: (params, gather, *rows), where gather(name, part) makes `part`, which lies as
        params[name] does, whole over fsdp. Over tensor params stay as they are split.
    """

    # Splits over tensor are not named: they stay with the compiler, as `axis_names` says below.
    def over_fsdp(path: tuple, leaf: Array) -> PartitionSpec:
        spec = param_spec(leaf_path(path), leaf.shape, mesh)
        return PartitionSpec(*(axis if axis == "fsdp" else None for axis in spec))

    specs = jax.tree.map_with_path(over_fsdp, params)

    def gather(name: str, part: PyTree) -> PyTree:
        def whole(leaf: Array, spec: PartitionSpec) -> Array:
            if "fsdp" not in spec:
                return leaf
            # tiled: the parts are joined along the axis, not stacked.
            return jax.lax.all_gather(leaf, "fsdp", axis=tuple(spec).index("fsdp"), tiled=True)

        return jax.tree.map(whole, part, specs[name])

    split = jax.shard_map(
        lambda params, *rows: function(params, gather, *rows),
        mesh=mesh,
        in_specs=(specs, *(PartitionSpec(ROWS) for _ in rows)),
        out_specs=PartitionSpec(ROWS),
        axis_names=set(ROWS),  # tensor is left to the compiler
        check_vma=False,
    )
    return split(params, *rows)


def over_rows_and_heads(function: Callable[..., PyTree], *arrays: PyTree) -> PyTree:
    """Apply a function to each device's rows and heads on the mesh in use.

    arrays: as in a decode state; results lie as the first of them.
    For kernels, which the compiler cannot split, and rows of a cache, which it would send around.
    """
    mesh = _mesh_in_use()
    if mesh is None or mesh.size == 1:
        return function(*arrays)
    in_specs = jax.tree.map(lambda place: place.spec, decode_state_shardings(arrays, mesh))
    split = jax.shard_map(function, in_specs=in_specs, out_specs=in_specs[0], check_vma=False)
    return split(*arrays)


def _axes_of_rows(count: int, mesh: AnyMesh) -> tuple[str, ...] | None:
    """Return the axes that split `count` rows; None where they cannot, and rows stay whole."""
    return None if count % shape_of(mesh).num_row_shards else ROWS


def _mesh_in_use() -> AnyMesh | None:
    # A mesh without AXES was not made by this package.
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or set(AXES) - set(mesh.axis_names) else mesh


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    """Return ShapeDtypeStructs with the placement of their arrays."""

    def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, shapes, shardings)


def place_on(mesh: Mesh | None, dtype: jnp.dtype) -> Place | None:
    """Return a placement for `load_base`: of each leaf only this process's slices are read.

    The slices of one leaf are read in parallel, each once for all devices that hold it. Without a
    mesh it is None: `load_base` then uses one device.
    """
    if mesh is None:
        return None

    def place(path: LeafPath, leaf: Any) -> Array:
        sharding = NamedSharding(mesh, param_spec(path, leaf.shape, mesh))
        places = sharding.addressable_devices_indices_map(leaf.shape)
        distinct = {_bounds(index): index for index in places.values()}
        with ThreadPoolExecutor(len(distinct)) as pool:
            parts = pool.map(lambda index: np.asarray(leaf[index], dtype), distinct.values())
            read = dict(zip(distinct, parts, strict=True))
        return jax.make_array_from_callback(leaf.shape, sharding, lambda i: read[_bounds(i)])

    return place


def _bounds(index: tuple[slice, ...] | None) -> tuple:
    """Return slices as a dictionary key; slices are hashable from Python 3.12 on."""
    return tuple((part.start, part.stop) for part in index or ())


def bytes_per_device(shapes: PyTree, shardings: PyTree) -> int:
    """Return the bytes of the shards that one device holds."""
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    )


def gathered_bytes(base: PyTree, mesh: AnyMesh) -> int:
    """Return the bytes of a base's weights that fsdp has gathered on a device at one time.

    Its matrices over the vocabulary for the whole step, one layer at work, and the next one.
    """
    # Nothing is split over fsdp, so nothing is gathered.
    if mesh.shape["fsdp"] == 1:
        return 0
    names = ("embedding", "lm_head", "token_embedding", "token_projection")
    vocabulary = {name: base[name] for name in names if name in base}
    layers = [part for name, part in base.items() if name.startswith("layers_")]
    largest = max(whole_over_rows(layer, mesh) for layer in layers)
    return whole_over_rows(vocabulary, mesh) + 2 * largest


def whole_over_rows(params: PyTree, mesh: AnyMesh) -> int:
    """Return the bytes on a device of params that are gathered over fsdp."""
    # The layout that the params would have on the same mesh with fsdp=1.
    whole = make_abstract_mesh(dataclasses.replace(shape_of(mesh), fsdp=1))
    return bytes_per_device(params, param_shardings(params, whole))
