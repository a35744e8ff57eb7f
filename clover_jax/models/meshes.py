"""Meshes: how many devices lie along each axis, from `--mesh` to JAX's own.

Three axes: `data` splits the rows of a batch; `fsdp` splits them as well, and the params with them,
which are gathered when they are used; `tensor` splits heads, the MLP's inner width and the
vocabulary. Which part of an array then lies where is `param_layouts.py` and `placement.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from clover_jax.errors import UserError
from clover_jax.runtime.progress import say

AXES = ("data", "fsdp", "tensor")
AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How many devices lie along each axis."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def num_row_shards(self) -> int:
        """Parts into which the rows of a batch are split."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        # The form that `--mesh` takes.
        return f"data={self.data},fsdp={self.fsdp},tensor={self.tensor}"


def parse_mesh(text: str, num_devices: int | None) -> MeshShape:
    """Return the mesh that `--mesh` describes; axes that are not named have one device.

    num_devices: the available devices; None accepts any number, and then -1 is refused.
    Raises UserError with the values for text that is not a mesh, or asks for more devices.

    Example: "data=2,tensor=-1" on 8 devices is MeshShape(data=2, fsdp=1, tensor=4).
    """
    sizes = _read_sizes(text)
    open_axes = [name for name, size in sizes.items() if size == -1]
    given = math.prod(size for size in sizes.values() if size != -1)

    # -1 takes what the other axes leave.
    if open_axes:
        if len(open_axes) > 1 or num_devices is None:
            why = "is for one axis only" if num_devices else "needs a known number of devices"
            raise UserError(f"--mesh={text}: -1 {why}; give a number for every other axis")
        if num_devices % given:
            raise UserError(
                f"--mesh={text}: {num_devices} devices cannot be divided by {given}, the product "
                f"of the other axes, to find {open_axes[0]}"
            )
        sizes[open_axes[0]] = num_devices // given

    shape = MeshShape(**sizes)
    if num_devices is not None and shape.size > num_devices:
        raise UserError(
            f"--mesh={text} asks for {shape.size} devices, but {num_devices} "
            f"{'is' if num_devices == 1 else 'are'} here; the product of the axes must fit"
        )
    return shape


def _read_sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        # An axis twice would silently take the later size.
        is_size = size == "-1" or (size.isdecimal() and int(size) > 0)
        if name not in AXES or name in sizes or not is_size:
            raise UserError(
                f"--mesh={text}: {part.strip()!r} must be one of {', '.join(AXES)}, each once, "
                "with a number from 1 up or -1 for the rest, as in data=2,fsdp=2,tensor=-1"
            )
        sizes[name] = int(size)
    return sizes


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh over the first devices, of this machine or of a compiler's topology.

    Neighbors lie along `tensor`, which communicates most.
    """
    devices = list(jax.devices() if devices is None else devices)[: shape.size]
    if len(devices) < shape.size:
        raise UserError(f"a mesh of {shape} needs {shape.size} devices; there are {len(devices)}")
    # Auto: the compiler decides every split that is not given.
    sizes, types = dataclasses.astuple(shape), (AxisType.Auto,) * 3
    try:
        return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)
    except NotImplementedError:
        # An axis is not a whole side of the chips' torus, such as tensor=8 of 4 x 4.
        arranged = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return Mesh(arranged, AXES, axis_types=types)


def mesh_for(text: str | None) -> Mesh | None:
    """Return the mesh over this run's devices that `--mesh` describes; None: a single device.

    Several processes without a mesh split the rows only. Raises UserError as `parse_mesh` does, and
    where a process would have no part of the mesh.
    """
    if text is None:
        if jax.process_count() == 1:
            return None
        text = "data=-1"

    # More than available is an error already; fewer are a waste that a user should know about.
    num_devices = len(jax.devices())
    shape = parse_mesh(text, num_devices)
    if shape.size < num_devices:
        if jax.process_count() > 1:
            raise UserError(
                f"--mesh={text} uses {shape.size} devices, but the {jax.process_count()} processes "
                f"have {num_devices}; all must be used, as with data=-1"
            )
        say(f"--mesh={text} uses {shape.size} of {num_devices} devices")
    return make_mesh(shape)


def make_abstract_mesh(shape: MeshShape) -> AbstractMesh:
    """Return a mesh without devices, for shapes of shards."""
    return AbstractMesh(dataclasses.astuple(shape), AXES, axis_types=(AxisType.Auto,) * 3)


def shape_of(mesh: AnyMesh | None) -> MeshShape:
    """Return how many devices lie along each axis of a mesh; None is a single device."""
    return MeshShape() if mesh is None else MeshShape(**mesh.shape)
