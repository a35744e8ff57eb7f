"""Heads of the official layout in other sizes than the release's decode as the slow judge says."""

import dataclasses

import jax
import pytest

from clover_jax.config import RopeConfig
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.reference import speculative_greedy
from clover_jax.decoding.tree import parse_tree
from clover_jax.drafters import registry
from tests.foreign_heads import read_layout, write_layout
from tests.tiny_checkpoints import random_base
from tests.tiny_models import TINY


@pytest.mark.parametrize("positions, layers, kv_heads", [(4, 1, 1), (6, 3, 2)])
def test_other_positions_layers_heads_rope_and_eps(tmp_path, positions, layers, kv_heads):
    rope = RopeConfig(theta=5e5)  # the base's; readers of the layout use 10 000 for the head
    config = dataclasses.replace(
        TINY, num_layers=2, num_kv_heads=kv_heads, rope=rope, rms_norm_eps=1e-6
    )
    base = random_base(tmp_path, config)
    head_config = registry.config_for_base(
        "clover2",
        config,
        num_positions=positions,
        num_augmenting_layers=layers,
        rope=RopeConfig(theta=1e4),
    )
    head = registry.head(head_config)
    params = registry.init_params(head, base.params, jax.random.key(1))
    write_layout("clover2", tmp_path / "head", head_config, params, base)
    found, params = read_layout("clover2", tmp_path / "head", base)
    assert found == head_config
    tree, prompt = parse_tree(f"chain:{positions}"), [5, 6, 7]
    (row,) = Engine(config, registry.head(found), tree).generate(base.params, params, [prompt], 20)
    judged = speculative_greedy(head, params, config, base.params, prompt, 20, tree)
    assert (row.output_ids, row.accepted) == judged
