"""Training on 8 simulated devices: the same values as on one, and what is moved for it."""

import json

import pytest

from tests.tiny_models import DRAFTERS
from tests.training.conftest import BASE, counting_rows, losses_of

MESH = "data=2,fsdp=2,tensor=2"
OTHERS = ("data=8", "tensor=8", "fsdp=4,tensor=2", "fsdp=8", "data=4,tensor=2")
IN_PARTS = "data=2,fsdp=2,tensor=2:2"  # the batch in two parts

HEAD = 'registry.head(registry.config_for_base("clover2", base, **SMALL))'

# Prints, for one device and each mesh: losses of all steps, the worst relative difference of the
# first step's gradients, and the shapes that are gathered or reduced in the compiled step.
STEPS = """
import dataclasses, json, re, sys
import jax, numpy as np
from clover_jax.drafters import registry
from clover_jax.models.meshes import make_mesh, parse_mesh
from clover_jax.models.placement import param_shardings, place_rows
from clover_jax.training.step import OptimizerConfig
from clover_jax.training.step import TrainStepConfig, init_state, make_train_step
from tests.tiny_models import TINY, random_base
from tests.training.training_data import random_batch

HEADS = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 4}
SMALL = {"num_positions": 2, "num_augmenting_layers": 1}
base = dataclasses.replace(TINY, vocab_size=128, num_layers=1, **HEADS)
head = registry.head(registry.config_for_base("clover2", base, **SMALL))
optimizer = OptimizerConfig(20, 1e-3, 2, clip_value=0.0)
batches = [jax.tree.map(np.asarray, random_batch(8, 32, 128, seed)) for seed in range(20)]


def train(mesh, parts):
    config = TrainStepConfig(base, head, optimizer, 16, mesh, accumulation_steps=parts)
    params = random_base(base)
    shapes = jax.eval_shape(lambda p: init_state(config, p, 0), params)
    placed = param_shardings(shapes, mesh)
    params = jax.device_put(params, param_shardings(params, mesh))
    state = jax.jit(lambda p: init_state(config, p, 0), out_shardings=placed)(params)
    state = state.replace(params=begun(state.params, placed.params))
    step = make_train_step(config).lower(state, params, place_rows(batches[0], mesh)).compile()
    losses, gradient, distances = [], None, []
    for batch in batches:
        state, metrics = step(state, params, place_rows(batch, mesh))
        losses.append(float(metrics.loss))
        distances.append(float(metrics.positions.terms.regression[0]))
        if gradient is None:  # Adam's first moment after one step, but for a factor
            gradient = jax.device_get(state.opt_state[1][0].mu)
    jax.tree.map(lambda x, there: check(x.sharding.is_equivalent_to(there, x.ndim)), state, placed)
    # D-PACE's weights grow as the head learns, and the loss with them.
    learns = distances[-1] < distances[0]
    return losses, gradient, step.as_text(), learns


def begun(params, placed):
    return params


def check(condition):
    assert condition


def distance(a, b):
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))  # a gradient may be 0


reference = None
for name in ["data=1", *sys.argv[1:]]:
    mesh, _, parts = name.partition(":")
    losses, gradient, text, learns = train(make_mesh(parse_mesh(mesh, 8)), int(parts or 1))
    reference = reference or gradient
    worst = max(jax.tree.leaves(jax.tree.map(distance, gradient, reference)))
    moved = re.findall(r"= \\S+\\[([\\d,]*)\\]\\S* (all-gather|all-to-all)", text)
    moved = sorted({tuple(int(n) for n in dims.split(",") if n) for dims, _ in moved})
    row = {"mesh": name, "losses": losses, "gradient": worst, "gathered": moved}
    print(json.dumps(row | {"learns": learns}))
"""


@pytest.mark.parametrize("meshes", [(MESH, IN_PARTS), pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_every_mesh_trains_as_one_device_does(run_python, meshes):
    rows = [json.loads(line) for line in run_python(STEPS, *meshes, devices=8).splitlines()]
    alone, *others = rows
    assert [row["mesh"] for row in others] == [*meshes]
    assert alone["learns"]
    for row in others:
        name = row["mesh"]
        assert abs(row["losses"][0] / alone["losses"][0] - 1) < 1e-5, name
        assert row["gradient"] < 1e-5, name
        assert abs(row["losses"][-1] / alone["losses"][-1] - 1) < 1e-4, name
    gathered = {row["mesh"]: [tuple(shape) for shape in row["gathered"]] for row in others}
    assert gathered.get("data=8", []) == []  # only gradients are summed
    assert (32, 5, 8, 4) not in gathered.get("tensor=8", [])
    for name in set(meshes) - {IN_PARTS}:
        vocabulary = [shape for shape in gathered[name] if shape[-1] == 128]
        assert vocabulary == [], f"{name}: logits are gathered"
        # By fsdp alone it is, when it is used; tensor splits what the products read.
        if "tensor" in name:
            assert (128, 32) not in gathered[name], f"{name}: the whole lm_head is gathered"


# With noise in its params: where Clover and Clover-LR begin, all behind `state_size` is a norm, and
# only the norm's eps gives that scalar a gradient, which one device rounds otherwise than eight.
EVERY_DRAFTER = (
    STEPS.replace(HEAD, "random_head(base, NAME)[0]")
    .replace("import TINY, random_base", "import TINY, lively_params, random_base, random_head")
    .replace("HEADS =", "NAME = sys.argv.pop(1)\nHEADS =")
    .replace("return params\n", "return jax.device_put(lively_params(base, NAME), placed)\n")
    .replace("range(20)", "range(4)")
)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_trains_on_three_axes_as_on_one_device(run_python, name):
    found = run_python(EVERY_DRAFTER, name, "data=2,fsdp=2,tensor=2", devices=8).splitlines()
    alone, split = (json.loads(line) for line in found)
    assert split["gradient"] < 1e-5
    assert split["losses"] == pytest.approx(alone["losses"], rel=1e-4)


# With the last norm fitted to the first batch: a search of its own, which rounding may change.
FITTED = (
    STEPS.replace('"clover2", base, **SMALL', '"dflash2", base, num_positions=2, num_layers=1')
    .replace("import OptimizerConfig", "import fit_start, OptimizerConfig")
    .replace(
        "state.replace(params=begun(state.params, placed.params))",
        "fit_start(config, state, params, place_rows(batches[0], mesh))",
    )
    .replace("range(20)", "range(2)")
)


@pytest.mark.slow
def test_a_last_norm_is_fitted_on_three_axes_as_on_one_device(run_python):
    found = run_python(FITTED, "data=2,fsdp=2,tensor=2", devices=8).splitlines()
    alone, split = (json.loads(line)["losses"] for line in found)
    assert split[0] == pytest.approx(alone[0], rel=1e-3)


# Prints, for each mesh: the worst relative difference of the loss's gradients from one device's,
# and what the compiled loss sends, within loops and in all, as [kind, dims].
LOSS = """
import dataclasses, functools, json, sys
import jax, numpy as np
from experiments.aot.hlo import COLLECTIVES, Loops, Program
from clover_jax.drafters import registry
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.models.meshes import make_mesh, parse_mesh, shape_of
from clover_jax.models.placement import gathered, param_shardings, place_rows
from clover_jax.training.losses import distillation_loss
from tests.tiny_models import TINY, random_base
from tests.training.training_data import random_batch, random_states

base = dataclasses.replace(TINY, vocab_size=128)
config = registry.config_for_base("medusa", base, num_positions=2)
loss = dataclasses.replace(config.loss, soft_ce=1.0, dpace=0.5)
config = dataclasses.replace(config, loss=loss)
head = registry.head(config)
batch = random_batch(4, 40, 128)
frozen, hidden, states = random_states(random_base(base), batch, 2)
shape = base.vocab_size, base.hidden_size
matrices = {
    name: jax.random.normal(jax.random.key(i), shape)
    for i, name in enumerate(head.module.output_params)
}


def gradients(mesh, matrices, base_params, hidden, states, batch):
    frozen = frozen_from_base(gathered(base_params, mesh))
    groups = shape_of(mesh).num_row_shards if mesh else 1

    def loss(matrices, hidden):
        whole = gathered(matrices, mesh)
        return distillation_loss(head, whole, frozen, hidden, states, batch, 8, groups)[0]

    return jax.grad(loss, argnums=(0, 1))(matrices, hidden)


params = random_base(base)
alone = jax.jit(functools.partial(gradients, None))(matrices, params, hidden, states, batch)
for name in sys.argv[1:]:
    mesh = make_mesh(parse_mesh(name, 4))
    put = lambda tree: jax.device_put(tree, param_shardings(tree, mesh))
    rows = place_rows((np.swapaxes(hidden, 0, 1), states, batch), mesh)
    operands = (put(matrices), put(params), np.swapaxes(rows[0], 0, 1), *rows[1:])
    compiled = jax.jit(functools.partial(gradients, mesh)).lower(*operands).compile()
    worst = jax.tree.map(
        lambda a, b: float(abs(np.asarray(a) - b).max() / abs(b).max()), compiled(*operands), alone
    )
    program, sent, in_loops = Program(compiled.as_text()), [], []
    for computation, i in program.instructions():
        if (kind := i.opcode.removesuffix("-start")) in COLLECTIVES:
            found = [[kind, array.dims] for array in i.results]
            sent += found
            in_loops += found if program.executed[computation.name] != Loops() else []
    found = {"gradient": max(jax.tree.leaves(worst)), "sent": sent, "in_loops": in_loops}
    print(json.dumps({"mesh": name} | found))
"""


def test_a_chunk_of_the_loss_sends_neither_rows_nor_gradients_of_matrices(run_python):
    meshes = ("data=4", "fsdp=2,tensor=2")
    rows = [json.loads(line) for line in run_python(LOSS, *meshes, devices=4).splitlines()]
    by_rows, over_tensor = rows
    assert [row["mesh"] for row in rows] == [*meshes]
    for row in rows:
        assert row["gradient"] < 1e-5, row["mesh"]
    assert by_rows["in_loops"] == []
    assert {kind for kind, _ in by_rows["sent"]} == {"all-reduce"}
    # A device has half of the matrices [128, 32], and sums up what products over them gave.
    vocabulary = [dims for _, dims in over_tensor["in_loops"] if {64, 128} & set(dims)]
    assert vocabulary == []
    assert over_tensor["in_loops"] != []


# Two steps on one set of devices, two on another; prints the metrics of both parts.
RESUMED = """
import json, sys, threading
from pathlib import Path
from clover_jax.models.meshes import mesh_for
from clover_jax.training.run import run_training
from clover_jax.training.settings import TrainSettings

base, data, workdir, *meshes = sys.argv[1:]
for steps, mesh in zip((2, 4), meshes):
    settings = TrainSettings(
        base=base, data=data, steps=4, batch_size=4, seq_len=32, warmup_steps=2, log_every=1,
        checkpoint_every=2, eval_every=0, num_positions=2, num_augmenting_layers=1,
    )
    log = Path(workdir) / "metrics.jsonl"
    class StopAt(threading.Event):
        def is_set(self):
            return log.exists() and len(log.read_text().splitlines()) >= steps
    report = run_training(settings, Path(workdir), StopAt(), mesh_for(mesh or None))
print(json.dumps(report))
"""


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_devices(run_python, tmp_path):
    given = str(BASE), str(counting_rows(tmp_path))

    def losses(name, *meshes):
        printed = run_python(RESUMED, *given, str(tmp_path / name), *meshes, devices=4)
        assert json.loads(printed.splitlines()[-1])["finished"]
        return losses_of(tmp_path / name)

    alone = losses("alone", "", "")
    changed = losses("changed", "data=2,tensor=2", "fsdp=2")
    assert len(alone) == 4
    assert changed == pytest.approx(alone, rel=1e-4)


# Prints how far the activations of a base with experts are from those of one device, and the most
# rows of any matrix in the program.
EXPERTS = """
import dataclasses, functools, re
import jax, jax.numpy as jnp
from clover_jax.models.meshes import make_mesh, parse_mesh
from clover_jax.models import experts
from clover_jax.models.placement import gathered, param_shardings, place_rows
from clover_jax.training.teacher import read_base
from tests.tiny_models import TINY, random_base
from tests.training.training_data import random_batch

experts._all_in_parts = experts._grouped  # as on a TPU
base = dataclasses.replace(TINY, num_layers=3, num_experts=8, experts_per_token=2, expert_size=32)
params, batch = random_base(base), random_batch(8, 640, 32, 0)
packed = batch.tokens, batch.segment_ids, batch.positions
alone = jax.jit(functools.partial(read_base, base))(params, *packed)["post_norm"]


def read(params, *packed):
    return read_base(base, params, *packed, mesh=mesh)["post_norm"]


mesh = make_mesh(parse_mesh("data=2,fsdp=2,tensor=2", 8))
placed = jax.device_put(params, param_shardings(params, mesh)), *place_rows(packed, mesh)
program = jax.jit(read).lower(*placed).compile()
print(float(jnp.abs(program(*placed) - alone).max()))
print(max(int(rows) for rows in re.findall(r"\\[(\\d+),\\d+\\]", program.as_text())))
"""


def test_a_device_groups_the_experts_of_its_own_rows(run_python):
    difference, rows = run_python(EXPERTS, devices=8).split()
    assert float(difference) < 1e-5
    # Two rows of 640 tokens, two experts each; of all rows four times as many.
    assert int(rows) == 2 * 640 * 2
