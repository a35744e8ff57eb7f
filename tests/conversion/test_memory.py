"""Converting a checkpoint larger than one likes to have in memory, tensor by tensor."""

import json
import math

import numpy as np
import pytest

from clover_jax.config import BaseConfig
from clover_jax.drafters import registry
from clover_jax.interchange.clover2 import COPIES, clover2_leaves, config_fields
from clover_jax.interchange.write_head import StreamedTensor, write_safetensors
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.llama_tensors import base_leaves
from clover_jax.pretrained.tensor_map import stored_shapes
from experiments.tiny_base.base_folder import llama_config_values

BASE = BaseConfig(
    vocab_size=80_000,
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=1,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    tie_word_embeddings=True,
)
LARGEST = BASE.vocab_size * BASE.hidden_size * 4

# Memory that is the process's own, sampled: a peak over all its life would count the imports.
PROGRAM = """
import sys, threading
from clover_jax import cli
from clover_jax import convert
import clover_jax.conversion.conversion
def own():
    with open("/proc/self/status") as status:
        return next(int(l.split()[1]) for l in status if l.startswith("RssAnon")) * 1024
peak, done = [0], threading.Event()
def watch():
    while not done.wait(0.005):
        peak[0] = max(peak[0], own())
sys.stderr = sys.stdout  # the bar
before = own()
watcher = threading.Thread(target=watch)
watcher.start()
status = cli.run(convert.main, convert.define_flags, sys.argv[1:])
done.set()
watcher.join()
assert status == 0
print(peak[0] - before)
"""


def write_random(path, shapes):
    def parts(name, shape):
        # The embedding and its copies are the same numbers.
        rng = np.random.default_rng(0 if math.prod(shape) * 4 == LARGEST else abs(hash(name)))
        for start in range(0, shape[0], 4096):
            size = (min(4096, shape[0] - start), *shape[1:])
            yield rng.standard_normal(size, np.float32)

    float32 = np.dtype(np.float32)
    tensors = [StreamedTensor(n, float32, s, parts(n, s)) for n, s in shapes.items()]
    for _ in write_safetensors(path, tensors):
        pass


@pytest.mark.slow
def test_two_gigabytes_need_little_more_than_the_largest_tensor(tmp_path, run_python):
    base, head, native = tmp_path / "base", tmp_path / "head", tmp_path / "native"
    base.mkdir()
    head.mkdir()
    config = registry.config_for_base("clover2", BASE)
    write_random(base / "model.safetensors", stored_shapes(base_leaves(BASE)))
    (base / "config.json").write_text(json.dumps(llama_config_values(BASE)))
    copies = dict.fromkeys(COPIES, (BASE.vocab_size, BASE.hidden_size))
    write_random(head / "model.safetensors", stored_shapes(clover2_leaves(config)) | copies)
    fields = config_fields(config, BaseModel(BASE, {}, base, "base"))
    (head / "config.json").write_text(json.dumps(fields))
    assert (head / "model.safetensors").stat().st_size > 2e9 - 2**28
    for source, target, layout in ((head, native, "orbax"), (native, tmp_path / "out", "clover2")):
        arguments = (f"--base={base}", f"--input={source}", f"--output={target}", f"--to={layout}")
        *shown, extra = run_python(PROGRAM, *arguments).splitlines()
        print("\n".join(shown))
        assert any(line.startswith("convert: ") and "tensors (100%)" in line for line in shown)
        extra = int(extra)
        print(f"to {layout}: {extra / 2**20:.0f} MiB beside {LARGEST / 2**20:.0f} MiB")
        assert extra < 1.5 * LARGEST
