"""Hardware that is not here: names, environment, and what is said where its compiler is missing."""

import re

import jax
import pytest
from jax.experimental import topologies

from clover_jax.errors import UserError
from clover_jax.xla.targets import (
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


@pytest.mark.parametrize("name", ["tpu-v6e", "tpu-v9:2x2", "gpu-h100", "v6e:2x2", "tpu-v6e:2"])
def test_an_unknown_target_is_a_user_s_mistake(name):
    with pytest.raises(UserError, match=f"--target={re.escape(name)} is unknown; .*gpu-h200"):
        parse_target(name)


def test_what_the_user_set_in_the_environment_stays():
    environment = {"JAX_PLATFORMS": "tpu", "XLA_FLAGS": "--xla_dump_to=/x"}
    prepare_environment(parse_target("gpu-h200"), environment)
    assert environment["JAX_PLATFORMS"] == "tpu"
    assert environment["XLA_FLAGS"] == "--xla_dump_to=/x --xla_gpu_autotune_level=0"


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    def missing(**_):
        raise RuntimeError("no plugin\nlong story")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(UserError, match=r'\(no plugin\); pip install "jax\[tpu\]==\d'):
        find_devices(parse_target("tpu-v5e:4x4"))
    with pytest.raises(UserError, match=r'pip install "jax\[cuda13\]=='):
        find_devices(parse_target("gpu-h200"))


def test_an_impossible_arrangement_is_not_taken_for_a_missing_compiler(monkeypatch):
    def impossible(**_):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: 3x3 is not divisible by 2x2x1")

    monkeypatch.setattr(topologies, "get_topology_desc", impossible)
    said = r"--target=tpu-v6e:3x3: .* cannot be arranged so .*3x3 is not.*; give .* 2x2 or 4x4"
    with pytest.raises(UserError, match=said) as raised:
        find_devices(parse_target("tpu-v6e:3x3"))
    assert not isinstance(raised.value, NoCompiler)  # which train --dry_run passes over
