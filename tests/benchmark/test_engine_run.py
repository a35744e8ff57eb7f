"""The engine's loop is timed where in the text the parts beside it are."""

import pytest

from clover_jax.benchmark.engine_run import EngineRun
from clover_jax.decoding.sampling_config import SamplingConfig
from clover_jax.loading.models import load
from clover_jax.loading.spec import ModelSpec
from clover_jax.timing.turns import WARM_UP

CONTEXT, ROUNDS, BATCH = 200, 3, 2


@pytest.fixture(scope="module")
def models():
    return load(ModelSpec("shape:64x1x96", draft="random:clover2", tree="chain:2", dtype="float32"))


@pytest.mark.parametrize("pace", [2, None])
def test_the_round_in_the_middle_begins_at_the_context(models, pace):
    engine = EngineRun(models, SamplingConfig(force_accept=1), BATCH)
    run = engine.chunks(CONTEXT, CONTEXT + 160, ROUNDS, pace)
    for _ in range(WARM_UP + ROUNDS // 2):
        rows = run()
    # The token that was emitted last is not committed yet.
    assert [len(row.prompt_ids + row.output_ids) - 1 for row in rows] == [CONTEXT] * BATCH
