"""A base in bfloat16 that two processes load onto a mesh, each its own slices.

The table in clover_jax/checkpoints/README.md, with 20 GB of memory and of disk to spare:

    LAYERS=14 python -m pytest -n0 -s -m slow tests/checkpoints/test_loading_on_meshes.py
"""

import json
import os
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from clover_jax.checkpoints.llama_tensors import base_leaves
from clover_jax.checkpoints.tensor_map import stored_shapes
from clover_jax.config import BaseConfig
from experiments.tiny_base.base_folder import llama_config_values
from tests.conftest import PYTHON, devices_flag, run_program
from tests.killed_processes import LAUNCH

# 1.5 GB of the shape of Llama-3-8B with a quarter of its vocabulary; by LAYERS all of that.
LAYERS = int(os.environ.get("LAYERS", "0"))
WIDTHS = {"hidden_size": 4096, "intermediate_size": 14_336, "head_dim": 128}
SIZES = {"vocab_size": 128_256 if LAYERS else 32_064, "num_layers": LAYERS or 2}
BASE = BaseConfig(**WIDTHS, **SIZES, num_heads=32, num_kv_heads=8)
MATRIX = BASE.vocab_size * BASE.hidden_size * 2  # bytes of the embedding

PROGRAM = """
import json, sys, time
from clover_jax.runtime.distributed import joined_processes

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

with joined_processes():
    import jax
    import jax.numpy as jnp
    from clover_jax.checkpoints.quantization import load_quantized_base
    from clover_jax.runtime.distributed import wait_for_all
    from clover_jax.models.meshes import mesh_for
    from clover_jax.models.placement import place_on

    place, read = place_on(mesh_for(sys.argv[2]), jnp.bfloat16), []

    class Counted:
        def __init__(self, leaf):
            self.leaf, self.shape = leaf, leaf.shape

        def __getitem__(self, box):
            part = self.leaf[box]
            read.append(part.nbytes)
            return part

    wait_for_all("started")
    before, start = peak(), time.perf_counter()
    parts = ("base",) if sys.argv[3] == "int8" else ()
    params = load_quantized_base(
        sys.argv[1], jnp.bfloat16, lambda path, leaf: place(path, Counted(leaf)), parts
    ).params
    jax.block_until_ready(params)
    said = {"seconds": time.perf_counter() - start, "read": sum(read), "peak": peak() - before}
    shards = [shard for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
    said["own"] = sum(shard.data.nbytes for shard in shards)
    print("said " + json.dumps(said) + " end", flush=True)
    wait_for_all("loaded")
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    block = np.random.default_rng(0).standard_normal(2**22, np.float32).astype(ml_dtypes.bfloat16)
    yield from written(folder, {}, lambda name, shape: {name: np.resize(block, shape)})


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The same in four bits, groups of 128, as compressed-tensors packs them."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    rng = np.random.default_rng(0)
    words = rng.integers(-(2**31), 2**31, size=2**20).astype(np.int32)
    scales = rng.random(2**16, np.float32).astype(ml_dtypes.bfloat16)

    def tensors(name, shape):
        if "_proj" not in name:
            return {name: np.resize(scales, shape)}
        rows, columns = shape
        return {
            f"{name}_packed": np.resize(words, (rows, columns // 8)),
            f"{name}_scale": np.resize(scales, (rows, columns // 128)),
            f"{name}_shape": np.array(shape),
        }

    folder = tmp_path_factory.mktemp("packed")
    yield from written(folder, {"quantization_config": config}, tensors)


def written(folder, values, tensors):
    """Write a base whose stored tensors `tensors(name, shape)` makes; yield it, and delete it."""
    (folder / "config.json").write_text(json.dumps(llama_config_values(BASE) | values))
    # A file for each tensor, so that one is in memory at a time.
    places = {}
    for number, (name, shape) in enumerate(stored_shapes(base_leaves(BASE)).items()):
        made, file = tensors(name, shape), f"model-{number}.safetensors"
        save_file(made, folder / file)
        places |= dict.fromkeys(made, file)
    index = {"weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    yield folder
    for file in set(places.values()):  # pytest keeps folders
        (folder / file).unlink()


def load(base, mesh, kind="bfloat16"):
    program = *PYTHON, "-c", PROGRAM, base, mesh, kind
    finished = run_program(LAUNCH, "2", *program, **devices_flag(4))
    # Gloo's own lines are on the same stdout.
    said = [json.loads(text) for text in re.findall(r"said ({.*?}) end", finished.stdout)]
    assert len(said) == 2
    for process in said:
        gigabytes = {name: f"{process[name] / 1e9:.2f} GB" for name in ("read", "own", "peak")}
        print(mesh, kind, f"{process['seconds']:.1f} s", gigabytes)
    return said, finished.stderr


def bytes_of(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=4", "fsdp=8", "tensor=8"])
def test_each_process_reads_its_own_slices_and_holds_little_more(base, mesh):
    stored = bytes_of(base)
    said, shown = load(base, mesh)
    for process in said:
        # Norms are on all devices, and read once.
        assert process["read"] == pytest.approx(stored / 2, rel=0.001)
        # Half of the largest leaf in flight, all of its file at most in the page cache, and what
        # the allocator keeps.
        assert process["peak"] < process["own"] + 1.5 * MATRIX + 2**29
    assert shown.count(f"{stored / 1e9:.1f} of {stored / 1e9:.1f} GB") == 1


@pytest.mark.slow
def test_int8_rounds_slices_where_they_lie(base):
    said, _ = load(base, "fsdp=2,tensor=4", "int8")
    for process in said:
        assert process["read"] == pytest.approx(bytes_of(base) / 2, rel=0.001)
        assert process["own"] < 0.75 * process["read"]


@pytest.mark.slow
def test_quantized_weights_are_widened_slice_by_slice(packed):
    print(f"{bytes_of(packed) / 1e9:.2f} GB stored")
    said, _ = load(packed, "fsdp=2,tensor=4")
    for process in said:
        # As a base that is stored in bfloat16.
        assert process["read"] == pytest.approx(process["own"], rel=0.001)
        assert process["peak"] < process["own"] + 1.5 * MATRIX + 2**29
