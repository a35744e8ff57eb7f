"""Decoding on simulated devices: the tokens of one device, and no vocabulary that is gathered."""

import itertools
import json

import pytest

from tests.decoding.test_greedy_equality import FAMILIES
from tests.tiny_models import DRAFTERS, TRAINING_FREE

SETUP = """
import dataclasses, functools, json, re, sys
import jax, jax.numpy as jnp
from clover_jax.config import BaseConfig
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.models.meshes import make_mesh, parse_mesh
from tests.tiny_models import TINY, decode_all, random_base, random_head, random_prompts

base = dataclasses.replace(TINY, vocab_size=1024, num_layers=1)
head, params = random_head(base)
"""

# Prints the outputs of every mesh as JSON lines; there are more rows than slots. A name that ends
# with "by calls" runs steps as accelerators do.
TOKENS = (
    SETUP
    + """
from clover_jax.decoding import programs

prompts = random_prompts(6, vocab_size=base.vocab_size)
for name in sys.argv[1:]:
    shape = name.removesuffix(" by calls")
    programs.loops_on_device = lambda: name == shape
    mesh = make_mesh(parse_mesh(shape, 8)) if shape else None
    engine = Engine(base, head, parse_tree("paper25"), batch_size=3, mesh=mesh)
    rows = decode_all(engine, random_base(base), params, prompts, 12)
    print(json.dumps([[row.output_ids, row.accepted] for row in rows]))
"""
)


def rows_on(run_python, source, meshes, *arguments):
    """Return the rows that a program gives, which must be the same on every mesh."""
    printed = run_python(source, *arguments, "", *meshes, devices=8).splitlines()
    alone, *split = map(json.loads, printed)
    for mesh, rows in zip(meshes, split, strict=True):
        assert rows == alone, mesh
    return alone


def test_greedy_tokens_on_a_mesh_are_those_of_one_device(run_python):
    rows = rows_on(run_python, TOKENS, ["data=2,fsdp=2,tensor=2 by calls"])
    assert any(any(accepted) for _, accepted in rows)


# A vocabulary so small that every head is accepted now and then, trained or not.
EVERY_DRAFTER = (
    TOKENS.replace("vocab_size=1024", "vocab_size=32")
    .replace("random_head(base)", "random_head(base, sys.argv.pop(1))")
    .replace('"paper25"', "default_tree(head.config.max_depth)")
    .replace("import parse_tree", "import default_tree, parse_tree")
)
# Texts are longer: in all of them something repeats.
WITH_COPIES = EVERY_DRAFTER.replace("config.max_depth)", "config.max_depth) + '+copy:6'")
WITH_COPIES = WITH_COPIES.replace("prompts, 12)", "prompts, 32)")
AXES = ("data=2", "fsdp=2", "tensor=2")
MESHES = [",".join(axes) for count in (1, 2, 3) for axes in itertools.combinations(AXES, count)]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_accepts_on_every_mesh_what_it_does_on_one_device(run_python, name):
    rows = rows_on(run_python, EVERY_DRAFTER, MESHES, name)
    assert any(any(accepted) for _, accepted in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recycle", "lookup", *DRAFTERS])
def test_copies_are_accepted_on_every_mesh_as_on_one_device(run_python, name):
    meshes = MESHES[-1:] if name in TRAINING_FREE else MESHES
    rows = rows_on(run_python, WITH_COPIES, meshes, name)
    assert any(max(accepted) > 4 for _, accepted in rows)


OF_FAMILY = TOKENS.replace(
    "base = dataclasses.replace(TINY, vocab_size=1024, num_layers=1)",
    "from tests.decoding.test_greedy_equality import FAMILIES\n"
    "base = dataclasses.replace(TINY, **{'num_layers': 2} | FAMILIES[sys.argv.pop(1)][0])",
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same_tokens_on_a_mesh(run_python, family):
    rows_on(run_python, OF_FAMILY, ("tensor=2", "data=2,fsdp=2", "data=2,fsdp=2,tensor=2"), family)


@pytest.mark.slow
def test_prompts_begin_at_snapshots_of_delta_nets_on_a_mesh(run_python):
    alike = OF_FAMILY.replace(
        "prompts = random_prompts(6, vocab_size=base.vocab_size)",
        "prompts = [[*range(70), *end] for end in random_prompts(6, vocab_size=base.vocab_size)]",
    ).replace("row.accepted]", "row.accepted, row.num_cached]")
    rows = rows_on(run_python, alike, ("tensor=2", "data=2,fsdp=2,tensor=2"), "delta nets")
    assert [num_cached for _, _, num_cached in rows] == [0] + [64] * 5


@pytest.mark.slow
@pytest.mark.parametrize("family", [(), ("experts",), ("delta nets",)])
def test_rounded_weights_give_the_same_tokens_on_a_mesh(run_python, family):
    plain = OF_FAMILY if family else TOKENS
    rounded = plain.replace("random_base(base), params,", "rounded, quantize_params(params),")
    rounded = rounded.replace(
        "prompts =", "rounded = quantize_base(random_base(base), ('base', 'draft'))\nprompts ="
    )
    needs = "from clover_jax.checkpoints.quantization import quantize_base, quantize_params\n"
    rounded = needs + rounded
    rows = rows_on(run_python, rounded, ["data=2,tensor=2"], *family)
    assert rows != rows_on(run_python, plain, [], *family), "rounding changes something"


# Prints the ways that raced on a mesh, and whether each of them decoded.
RACED = (
    SETUP
    + """
import os
from clover_jax.checkpoints.stored_head import Draft
from clover_jax.decoding.models import Models
from clover_jax.checkpoints.base import BaseModel
from clover_jax.models.placement import param_shardings
from clover_jax.decoding.race import fastest_tree
from clover_jax.decoding.row_settings import GenerationSettings
from pathlib import Path

os.environ["XDG_CACHE_HOME"] = sys.argv[1]
mesh = make_mesh(parse_mesh("data=2,fsdp=2,tensor=2", 8))
placed = random_base(base), params
placed = jax.device_put(placed, param_shardings(placed, mesh))
draft = Draft(head, placed[1], None, {}, "random")
model = BaseModel(base, placed[0], Path(), "random")
models = Models(model, None, draft, parse_tree("chain:3"), mesh)
prompts, settings = random_prompts(4, vocab_size=base.vocab_size), GenerationSettings()
choice = fastest_tree(models, prompts, 3, settings)
print(json.dumps([list(choice.rates), min(choice.rates.values()) > 0]))
"""
)


@pytest.mark.slow
def test_trees_race_on_a_mesh(run_python, tmp_path):
    names, decoded = json.loads(run_python(RACED, str(tmp_path), devices=8))
    assert names[0] == "plain"
    assert {"chain:2", "chain:3"} < set(names)
    assert decoded


# Prints the collectives of compiled steps, a line each, with the shapes that they give.
COLLECTIVES = (
    SETUP
    + """
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.decoding.state import empty_state
from clover_jax.decoding.step import StepConfig, Weights, speculate_and_verify
from clover_jax.models.placement import decode_state_shardings, param_shardings, with_shardings

for case in sys.argv[1:]:
    mesh, tree, verify = case.split("; ")
    mesh, tree, sampling = make_mesh(parse_mesh(mesh, 8)), parse_tree(tree), SamplingConfig(verify)
    weights = Weights(random_base(base), params)
    weights = with_shardings(weights, param_shardings(weights, mesh))
    state = jax.eval_shape(lambda: empty_state(base, head, tree, 4, 256, 4, jnp.float32))
    state = with_shardings(state, decode_state_shardings(state, mesh))
    step = functools.partial(speculate_and_verify, StepConfig(base, head, tree, sampling))
    with jax.set_mesh(mesh):
        text = jax.jit(step, donate_argnums=1).lower(weights, state).compile().as_text()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute"
    found = re.findall(rf"= (\\(?[^=]*?) ({kinds})(?:-start)?\\(", text)
    dims = [(kind, d) for shape, kind in found for d in re.findall(r"\\[([\\d,]*)\\]", shape)]
    print(json.dumps([[kind, [int(n) for n in d.split(",") if n]] for kind, d in dims]))
"""
)
OVER_TENSOR = ("tensor=4; chain:2; greedy", "tensor=4; chain:2; lossless")
OVER_ALL = "data=2,fsdp=2,tensor=2; clover4; greedy"


@pytest.fixture(scope="module")
def collectives(run_python):
    """What each of these steps sends: [kind, shape] of every collective."""
    cases = (*OVER_TENSOR, OVER_ALL)
    printed = run_python(COLLECTIVES, *cases, devices=8).splitlines()
    return dict(zip(cases, map(json.loads, printed), strict=True))


def test_a_step_gathers_no_logits(collectives):
    for case in OVER_TENSOR:
        shapes = [shape for _, shape in collectives[case]]
        assert [4, 4, 1] in shapes, "the best of each of 4 shards should be gathered"
        assert [shape for shape in shapes if 1024 in shape] == []
        caches = [shape for shape in shapes if 256 in shape and len(shape) == 4]
        assert caches == []


def test_no_row_leaves_its_devices(collectives):
    found = collectives[OVER_ALL]
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce"}


# Rows with penalties, and rows that must match a form: both change scores that lie split.
CHANGED_SCORES = """
import dataclasses, json, sys, tempfile
from pathlib import Path
import jax
from transformers import AutoTokenizer
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.grammars import Grammars
from clover_jax.decoding.requests import Request
from clover_jax.decoding.sampling_config import SamplingConfig, SamplingParams
from clover_jax.models.meshes import make_mesh, parse_mesh
from tests.tiny_folders import SPEAKING
from tests.tiny_models import SMALL_TREE, random_base, random_head
from tests.tiny_tokenizers import save_byte_level

base = dataclasses.replace(SPEAKING, vocab_size=264, eos_token_ids=(1,))
tokenizer = AutoTokenizer.from_pretrained(save_byte_level(Path(tempfile.mkdtemp())))
penalties = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.4)
form = '{"json": {"type": "array", "items": {"enum": ["the", 5]}, "minItems": 2}}'
rows = [Request(i, [5 + i, 9], 16, (1,), params=penalties) for i in range(2)]
rows += [Request(i, [5 + i, 9], 16, (1,), form=form) for i in (2, 3)]
head, params = random_head(base)
for name in sys.argv[1:]:
    mesh = make_mesh(parse_mesh(name, 8)) if name else None
    rules = SamplingConfig("lossless", "topk", penalized=True, masked=True)
    options = {"batch_size": 4, "mesh": mesh, "grammars": Grammars(tokenizer, 264, (1,))}
    engine = Engine(base, head, SMALL_TREE, rules, adapts=True, **options)
    found = {}
    for some in (rows[:2], rows):  # the first two by programs that know no masks
        done = engine.stream(random_base(base), params, some)
        found[len(some)] = {u.row.index: [u.row.output_ids, u.row.accepted] for u in done if u.done}
    assert all(found[2][i] == found[4][i] for i in (0, 1))
    print(json.dumps([found[4][i] for i in range(4)]))
"""


def test_penalties_and_forms_on_a_mesh_give_the_tokens_of_one_device(run_python):
    rows = rows_on(run_python, CHANGED_SCORES, ["data=2,tensor=4"])
    assert any(any(accepted) for _, accepted in rows)
