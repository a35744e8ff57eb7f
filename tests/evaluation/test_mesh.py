"""What `evaluate` measures beside texts is on simulated devices what it is on one."""

import json

import pytest

# Prints, for one device and for each mesh, the hits of two texts and plain decoding's margins.
MEASURED = """
import dataclasses, json, sys
from pathlib import Path
import jax, numpy as np
from clover_jax.decoding.requests import Request
from clover_jax.decoding.tree import TreeConfig, parse_tree
from clover_jax.interchange.directory import Draft
from clover_jax.evaluation import accuracy, near_ties
from clover_jax.evaluation.methods import Method
from clover_jax.loading.models import Models
from clover_jax.sharding.meshes import make_mesh, parse_mesh
from clover_jax.pretrained.base import BaseModel
from clover_jax.sharding.placement import param_shardings
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
    hits = accuracy.measure(head, [accuracy.Text(text[:9], text[9:]) for text in texts])
    cases = [near_ties.Case(Request(0, text[:9], 21), text[9:]) for text in texts]
    engine = plain.models.engine(4)
    margins = [near_ties.margins(cases, base.params, engine, n).margin for n in (1, 16)]
    margins = np.concatenate(margins)[:, :21].tolist()
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
