"""What follows from measured seconds: these and the machine's limits are given."""

import jax
import pytest

from clover_jax.decoding.models import load
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.decoding.spec import ModelSpec
from clover_jax.evaluation import measured
from clover_jax.evaluation.measured import Ceilings, engine_run
from clover_jax.runtime.turns import WARM_UP


@pytest.fixture
def measure(monkeypatch):
    """Measure on a machine where every part takes a second."""

    def run(models, limits):
        monkeypatch.setattr(
            measured, "time_in_turns", lambda runs, *_, **__: dict.fromkeys(runs, 1.0)
        )
        monkeypatch.setattr(measured, "measure_ceilings", lambda dtype: limits)
        return measured.measure(models, batch=1, context=100, rounds=3, force_accept=0)

    return run


def test_the_share_of_the_bandwidth_is_the_bytes_where_products_take_longer(measure):
    models = load(ModelSpec("shape:64x1x96", dtype="float32"))
    found = measure(models, Ceilings(bandwidth=1e6, matrix_rate=1e3))
    weights = 4 * (64 * 192 + 64 * 64 + 3 * 64 * 192 + 96 * 64)
    keys = 2 * 4 * 64 * 100
    assert found["parts"]["plain step"]["floor_ms"] == pytest.approx(2 * weights / 4)
    share = (weights + keys) / 1e6
    assert found["plain_step_share_of_bandwidth"] == pytest.approx(share, abs=1e-3)


def test_a_level_is_timed_only_where_the_head_drafts_it(measure):
    models = load(
        ModelSpec("shape:64x1x96", draft="random:clover", tree="clover4", dtype="float32")
    )
    found = measure(models, Ceilings(bandwidth=1e6, matrix_rate=1e3))
    levels = [name for name in found["parts"] if name.startswith("draft level")]
    assert levels == ["draft level 1", "draft level 2", "draft level 3"]
    assert found["sum_of_parts_ms"] == 5e3  # absorb, draft, verify, accept, commit


@pytest.mark.parametrize("int8", [(), ("draft",), ("base", "draft")])
def test_parameters_are_counted_alike_whatever_is_quantized(int8):
    spec = ModelSpec("shape:64x1x96", draft="random:clover", dtype="float32", int8=int8)
    models = load(spec)
    about = measured.describe_run(models, spec)
    matrices = 64 * 192 + 64 * 64 + 3 * 64 * 192 + 2 * 96 * 64
    assert about["base_parameters"] == matrices + 3 * 64  # and the norms
    plain = load(ModelSpec("shape:64x1x96", draft="random:clover", dtype="float32"))
    assert about["draft_parameters"] == sum(x.size for x in jax.tree.leaves(plain.draft_params))


@pytest.mark.parametrize("pace", [2, None])
def test_the_round_in_the_middle_begins_at_the_context(pace):
    context, rounds, batch = 200, 3, 2
    models = load(
        ModelSpec("shape:64x1x96", draft="random:clover2", tree="chain:2", dtype="float32")
    )
    forced = SamplingConfig(force_accept=1)
    run = engine_run(models, forced, batch, context, context + 160, rounds, pace)
    for _ in range(WARM_UP + rounds // 2):
        rows = run()
    # The token that was emitted last is not committed yet.
    assert [len(row.prompt_ids + row.output_ids) - 1 for row in rows] == [context] * batch
