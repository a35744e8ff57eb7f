"""What `evaluate` measures beside texts is on simulated devices what it is on one."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest

from clover_jax.checkpoints.shapes import base_shapes
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.decoding.state import empty_state
from clover_jax.decoding.step import StepConfig, Weights
from clover_jax.decoding.tree_config import TreeConfig
from clover_jax.evaluation import equality
from clover_jax.evaluation.targets import find_devices, parse_target
from clover_jax.models.meshes import MeshShape, make_mesh
from clover_jax.models.placement import (
    decode_state_shardings,
    param_shardings,
    replicated,
    with_shardings,
)
from tests.tiny_models import TINY

# Prints, for one device and for each mesh, the hits of two texts and plain decoding's margins.
MEASURED = """
import dataclasses, json, sys
from pathlib import Path
import jax, numpy as np
from clover_jax.decoding.requests import Request
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.checkpoints.stored_head import Draft
from clover_jax.evaluation import accuracy, equality
from clover_jax.evaluation.equality import read_again
from clover_jax.evaluation.plan import Method
from clover_jax.evaluation.rows import TurnRow
from clover_jax.decoding.models import Models
from clover_jax.models.meshes import make_mesh, parse_mesh
from clover_jax.checkpoints.base import BaseModel
from clover_jax.models.placement import param_shardings
from tests.tiny_models import TINY, lively_params, random_base, random_head

config = dataclasses.replace(TINY, vocab_size=1024, num_layers=1)
texts = np.random.default_rng(0).integers(0, 1024, (4, 30)).tolist()
for name in ["", *sys.argv[1:]]:
    mesh = make_mesh(parse_mesh(name, 8)) if name else None
    put = lambda tree: jax.device_put(tree, param_shardings(tree, mesh)) if mesh else tree
    base = BaseModel(config, put(random_base(config)), Path("base"), "random")
    draft = Draft(random_head(config)[0], put(lively_params(config)), None, {}, "a")
    head = Method("a", Models(base, None, draft, parse_tree("chain:2"), mesh))
    plain = Method("vanilla", Models(base, None, None, TreeConfig.root_only(), mesh))
    hits = accuracy.measure(head, [TurnRow(text[:9], text[9:], [], [], [], 0) for text in texts])
    cases = [equality.Case(Request(0, text[:9], 21), text[9:]) for text in texts]
    engine = plain.models.engine(4)
    margins = [one.lead for n in (1, 16) for one in read_again(cases, base.params, engine, n)]
    margins = np.stack(margins).tolist()
    print(json.dumps([[found.hits.tolist() for _, found in hits], margins]))
"""


@pytest.mark.slow
def test_accuracy_and_margins_on_a_mesh_are_those_of_one_device(run_python):
    meshes = ("data=2,tensor=2", "data=2,fsdp=2,tensor=2")
    rows = run_python(MEASURED, *meshes, devices=8).splitlines()
    (hits, margins), *others = (json.loads(row) for row in rows)
    for mesh, (other_hits, other_margins) in zip(meshes, others, strict=True):
        assert other_hits == hits, mesh
        for expected, found in zip(margins, other_margins, strict=True):
            assert found == pytest.approx(expected, abs=1e-4), mesh


# The same of a base with experts, and with the most rows of any matrix in accuracy's program.
WITH_EXPERTS = MEASURED.replace(
    "num_layers=1)",
    """num_layers=1, num_experts=8, experts_per_token=2, expert_size=32)
count, programs = accuracy.count_hits, []


def count_hits(*arguments):
    programs.append(count.lower(*arguments).compile().as_text())
    return count(*arguments)


accuracy.count_hits = count_hits""",
).replace(
    "margins]))",
    'margins, max(int(n) for n in re.findall(r"\\[(\\d+),\\d+\\]", programs[-1]))]))',
)


@pytest.mark.slow
def test_experts_are_those_of_a_devices_own_rows(run_python):
    source = WITH_EXPERTS.replace("import dataclasses, json,", "import dataclasses, json, re,")
    rows = run_python(source, "data=2,tensor=2", "data=4", devices=8).splitlines()
    (hits, margins, _), *others = (json.loads(row) for row in rows)
    for other_hits, other_margins, most_rows in others:
        assert other_hits == hits
        for expected, found in zip(margins, other_margins, strict=True):
            assert found == pytest.approx(expected, abs=1e-4)
        # 2048 tokens at once, two experts each: of all rows 4096.
        assert most_rows <= 2 * 2048 // 2


@pytest.mark.aot
def test_margins_are_taken_where_the_rows_of_a_cache_lie():
    pytest.importorskip("libtpu")
    mesh = make_mesh(MeshShape(data=2, tensor=2), find_devices(parse_target("tpu-v6e:2x2"), 4))
    base = dataclasses.replace(TINY, num_layers=1, hidden_size=512, num_kv_heads=4, head_dim=128)
    config = StepConfig(base, None, TreeConfig.root_only(), SamplingConfig("greedy"))

    # The arguments that `read_again` passes to its program.
    state = jax.eval_shape(lambda: empty_state(base, None, config.tree, 4, 1024, 4, jnp.bfloat16))
    state = with_shardings(state, decode_state_shardings(state, mesh))
    params = base_shapes(base, jnp.bfloat16)
    weights = Weights(with_shardings(params, param_shardings(params, mesh)), {})
    whole = functools.partial(jax.ShapeDtypeStruct, sharding=replicated(mesh))
    text, other = whole((4, 1024), jnp.int32), whole((4, 32), jnp.int32)
    given = equality.Text(weights, state.replace(cache=()), text, other)
    found = equality.Scores(*[whole(other.shape, jnp.float32)] * 2)

    add = jax.jit(functools.partial(equality.add_scores, config, 1), donate_argnums=1)
    with jax.set_mesh(mesh):
        lowered = add.lower(given, (state.cache, found), whole((), jnp.int32))
    program = lowered.compile().as_text()
    assert "all-reduce" in program
    assert "collective-permute" not in program  # rows of other devices
    assert not re.search(r"\[[\d,]*1024,128\]\S* copy\(", program)
