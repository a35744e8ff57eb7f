"""Targets: their names, the environment of their compilers, errors of missing compilers."""

import re

import jax
import pytest
from jax.experimental import topologies

from clover_jax.errors import UserError
from clover_jax.evaluation.targets import (
    CHIPS,
    NoCompiler,
    find_devices,
    parse_target,
    prepare_environment,
)


def test_names_stand_for_chips_and_arrangements():
    target = parse_target("tpu-v6e:2x2")
    assert (target.platform, target.topology, target.chip) == ("tpu", "v6e:2x2", CHIPS["v6e"])
    assert parse_target("gpu-h200").platform == "cuda"
    for name in ("tpu-v6e", "tpu-v9:2x2", "gpu-h100", "v6e:2x2", "tpu-v6e:2"):
        with pytest.raises(UserError, match=f"--target={re.escape(name)} is unknown; .*gpu-h200"):
            parse_target(name)


def test_what_the_user_set_in_the_environment_stays():
    environment = {"JAX_PLATFORMS": "tpu", "XLA_FLAGS": "--xla_dump_to=/x"}
    prepare_environment(parse_target("gpu-h200"), environment)
    assert environment["JAX_PLATFORMS"] == "tpu"
    assert environment["XLA_FLAGS"] == "--xla_dump_to=/x --xla_gpu_autotune_level=0"


@pytest.mark.parametrize(
    ("target", "error", "message", "is_missing"),
    [
        ("tpu-v5e:4x4", RuntimeError("no\nlong"), r'\(no\); pip install "jax\[tpu\]==\d', True),
        ("gpu-h200", RuntimeError("no"), r'pip install "jax\[cuda13\]==', True),
        (
            "tpu-v6e:3x3",
            jax.errors.JaxRuntimeError("INVALID_ARGUMENT: 3x3 is not divisible by 2x2x1"),
            r"--target=tpu-v6e:3x3: .* cannot be arranged .*3x3 is not.*; give .* 2x2 or 4x4",
            False,
        ),
    ],
)
def test_a_missing_compiler_is_told_from_an_impossible_arrangement(
    target, error, message, is_missing, monkeypatch
):
    def fail(**_):
        raise error

    monkeypatch.setattr(topologies, "get_topology_desc", fail)
    with pytest.raises(UserError, match=message) as raised:
        find_devices(parse_target(target))
    # `train --dry_run` goes on without a compiler, not without an arrangement.
    assert isinstance(raised.value, NoCompiler) == is_missing
