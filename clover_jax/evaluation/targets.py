"""Targets: hardware that programs are compiled for without having it.

`prepare_environment` runs before JAX is imported, so nothing here imports JAX at the top.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from clover_jax.errors import UserError, reason_of

if TYPE_CHECKING:
    import jax

GIGA, TERA = 1e9, 1e12


class NoCompiler(UserError):
    """The compiler for a target is not installed."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, from its data sheet.

    bandwidth: bytes a second. matrix_rate: bfloat16 operations a second. memory: bytes.
    clock: of the compiler's cycle estimates, in Hz; 0 without estimates.
    """

    name: str
    bandwidth: float
    matrix_rate: float
    memory: float
    clock: float = 0.0

    def floor(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.bandwidth, flops / self.matrix_rate)


CHIPS = {
    "v4": Chip("TPU v4", 1228 * GIGA, 275 * TERA, 32 * 2**30, 1.05e9),
    "v5e": Chip("TPU v5e", 819 * GIGA, 197 * TERA, 16 * 2**30, 1.5e9),
    "v5p": Chip("TPU v5p", 2765 * GIGA, 459 * TERA, 95 * 2**30, 1.75e9),
    "v6e": Chip("TPU v6e", 1640 * GIGA, 918 * TERA, 32 * 2**30, 1.75e9),
    "h200": Chip("H200", 4800 * GIGA, 989 * TERA, 141 * GIGA),
}
EXAMPLES = "tpu-v6e:2x2, tpu-v5e:4x4, tpu-v5p:2x2x1, gpu-h200"

# XLA's description of the device, in the format of its own tools.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """Hardware to compile for. platform: "tpu" or "cuda". topology: the compiler's name of it."""

    name: str
    platform: str
    chip: Chip
    topology: str

    @property
    def num_chips(self) -> int | None:
        """The chips of a TPU's topology; None for GPUs, of which a mesh takes any number."""
        if self.platform != "tpu":
            return None
        return math.prod(int(n) for n in self.topology.partition(":")[2].split("x"))


def parse_target(name: str) -> Target:
    """Return the target of `--target`; raises UserError for an unknown one."""
    tpu = re.fullmatch(r"tpu-(v\d\w*):(\d+(?:x\d+){1,2})", name)
    if tpu and tpu[1] in CHIPS:
        return Target(name, "tpu", CHIPS[tpu[1]], f"{tpu[1]}:{tpu[2]}")
    if name == "gpu-h200":
        return Target(name, "cuda", CHIPS["h200"], "1x1x1")
    raise UserError(f"--target={name} is unknown; give a chip and an arrangement: {EXAMPLES}")


def prepare_environment(target: Target, environment: MutableMapping[str, str]) -> None:
    """Let JAX start without the hardware; call it before JAX is imported."""
    environment.setdefault("JAX_PLATFORMS", "cpu")
    # Otherwise the compiler for TPUs looks for the machine around it.
    environment.setdefault("TPU_SKIP_MDS_QUERY", "1")
    environment.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    environment.setdefault("TPU_MIN_LOG_LEVEL", "4")
    # It uses no device, so several processes may compile at the same time.
    environment.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    if target.platform == "cuda":
        environment["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        # Nothing here can time kernels.
        flags = environment.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()


def find_devices(target: Target, count: int = 1) -> list[jax.Device]:
    """Return the devices of a target.

    count: GPUs of one machine; a TPU's topology has its own count.
    Raises NoCompiler if the compiler is not installed, UserError if it rejects the arrangement.
    """
    import jax
    from jax.experimental import topologies

    options = {"topology_name": target.topology}
    if target.platform == "cuda":
        sizes = {"target_config": _H200, "topology": f"1x1x{count}"}
        options = {"topology_name": "cuda"} | sizes
    try:
        topology = topologies.get_topology_desc(platform=target.platform, **options)
    except Exception as error:  # plugins raise errors of every kind
        reason = reason_of(error)[:150]
        # An installed compiler for TPUs rejects an arrangement with this error.
        if target.platform == "tpu" and reason.startswith("INVALID_ARGUMENT"):
            raise UserError(
                f"--target={target.name}: the chips cannot be arranged like this ({reason}); give "
                "another arrangement, such as 2x2 or 4x4"
            ) from error
        package = "jax[tpu]" if target.platform == "tpu" else "jax[cuda13]"
        raise NoCompiler(
            f"--target={target.name}: its compiler is not installed ({reason}); "
            f'pip install "{package}=={jax.__version__}" in a separate environment'
        ) from error
    return list(topology.devices)
