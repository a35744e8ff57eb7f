"""What vLLM and SGLang look for in a folder: class, fields, names, shapes and types.

`test_vllm.py` runs vLLM where it is installed, which takes an environment of its own. Here is what
the readers of both ask for, by the files named in `checkpoints/eagle.py` and
`checkpoints/medusa.py`.
"""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoConfig

from clover_jax import convert
from clover_jax.checkpoints.layouts import LAYOUTS, NATIVE
from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.stored_head import load_draft
from clover_jax.config import RopeConfig
from clover_jax.drafters import registry
from clover_jax.evaluation.options import TARGETS
from tests.tiny_folders import SPEAKING, save_random_head, save_tiny_base

BASE = dataclasses.replace(SPEAKING, num_layers=8, num_kv_heads=2)
ROPE = {"rope": RopeConfig(5e5, "llama3", 8.0)}
D, F, V = BASE.hidden_size, BASE.intermediate_size, BASE.vocab_size
Q, KV = BASE.num_heads * BASE.head_dim, BASE.num_kv_heads * BASE.head_dim


def layer(prefix, reads=D):
    """Return the tensors of a Llama layer without its first norm."""
    return {
        f"{prefix}self_attn.q_proj.weight": (Q, reads),
        f"{prefix}self_attn.k_proj.weight": (KV, reads),
        f"{prefix}self_attn.v_proj.weight": (KV, reads),
        f"{prefix}self_attn.o_proj.weight": (D, Q),
        f"{prefix}post_attention_layernorm.weight": (D,),
        f"{prefix}mlp.gate_proj.weight": (F, D),
        f"{prefix}mlp.up_proj.weight": (F, D),
        f"{prefix}mlp.down_proj.weight": (D, F),
    }


EAGLE = {"embed_tokens.weight": (V, D), "fc.weight": (D, 2 * D)} | layer("layers.0.")


def eagle3(prefix):
    norms = {f"{prefix}input_layernorm.weight": (D,), f"{prefix}hidden_norm.weight": (D,)}
    rest = {"fc.weight": (D, 3 * D), "norm.weight": (D,), "lm_head.weight": (4, D)}
    return layer(prefix, 2 * D) | norms | rest | {"d2t": (4,), "t2d": (V,)}


def medusa(num_heads):
    return {
        name.format(i): shape
        for i in range(num_heads)
        for name, shape in {
            "blocks.{}.layers.0.weight": (D, D),
            "blocks.{}.layers.0.bias": (D,),
            "lm_heads.{}.weight": (V, D),
        }.items()
    }


# to -> ((kind, its options, changes of its config), tensors, fields of config.json)
WANTED = {
    "eagle_vllm": (("eagle", ROPE | {"fc_bias": False}, {}), EAGLE,
     {"architectures": ["LlamaForCausalLM"], "bias": False}),
    # `bias` would be taken for the attention's.
    "eagle_sglang": (("eagle", ROPE, {}), EAGLE | {"fc.bias": (D,)},
     {"architectures": ["LlamaForCausalLMEagle"], "bias": ..., "tie_word_embeddings": False}),
    "eagle3": (("eagle3", ROPE, {"draft_to_target": (0, 5, 6, 95)}), eagle3("midlayer."),
     {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 4, "bias": ...}),
    "eagle3_tpu": (
        ("eagle3", ROPE, {}),
        eagle3("midlayer.") | {"d2t": (V,), "t2d": (V,), "lm_head.weight": (V, D)},
        {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": V, "bias": ...},
    ),
    "medusa_vllm": (
        ("medusa", {"num_positions": 3}, {}),
        medusa(3),
        {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": D,
            "vocab_size": V,
            "truncated_vocab_size": V,
            "num_heads": 3,
            "num_hidden_layers": 1,
            "medusa_fc_bias": True,
            "original_lm_head": False,
        },
    ),
    "speculators": (
        ("eagle3", ROPE, {"draft_to_target": (0, 5, 6, 95)}),
        eagle3("layers.0.") | {"embed_tokens.weight": (V, D)},
        {"speculators_model_type": "eagle3", "draft_vocab_size": 4, "target_hidden_size": D,
         "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return save_tiny_base(tmp_path_factory.mktemp("models") / "base", BASE)


@pytest.fixture(scope="module")
def base(base_folder):
    return load_base(str(base_folder), jnp.bfloat16)


@pytest.fixture
def exported(command, base, base_folder, tmp_path):
    """A function that exports a head: (tensors, fields of config.json)."""

    def export(to, kind, options, changes):
        save_random_head(tmp_path / "head", base, kind, options, jnp.bfloat16, **changes)
        argv = (f"--base={base_folder}", f"--input={tmp_path / 'head'}", f"--to={to}")
        assert command(*argv, f"--output={tmp_path / 'out'}")[0] == 0
        fields = json.loads((tmp_path / "out" / "config.json").read_text())
        return load_file(tmp_path / "out" / "model.safetensors"), fields

    return export


@pytest.mark.parametrize("to", WANTED)
def test_a_server_finds_what_it_asks_for(exported, tmp_path, to):
    head, shapes, fields = WANTED[to]
    tensors, found = exported(to, *head)
    assert {name: tensor.shape for name, tensor in tensors.items()} == shapes
    types = {"d2t": "int64", "t2d": "bool"}
    assert {n: str(t.dtype) for n, t in tensors.items()} == {
        name: types.get(name, "bfloat16") for name in shapes
    }
    assert {name: found.get(name, ...) for name in fields} == fields
    assert found["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("to", ["eagle_vllm", "eagle_sglang", "eagle3", "speculators"])
def test_the_layer_reads_as_a_llama_config(exported, tmp_path, to):
    """Both servers read config.json by transformers; vLLM the layer's own object of speculators."""
    _, fields = exported(to, *WANTED[to][0])
    fields = fields.get("transformer_layer_config", fields)
    assert fields["model_type"] == "llama"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_hidden_layers, config.num_key_value_heads) == (1, BASE.num_kv_heads)
    assert (config.hidden_size, config.head_dim, config.rms_norm_eps) == (D, BASE.head_dim, 1e-5)
    assert config.rope_parameters["rope_type"] == "llama3"
    assert config.rope_parameters["rope_theta"] == 5e5
    assert config.rope_parameters["factor"] == 8.0


def test_a_whole_vocabulary_for_tpu_inference_moves_no_token(exported, tmp_path, base):
    tensors, _ = exported("eagle3_tpu", "eagle3", ROPE, {})
    assert not tensors["d2t"].any()
    assert tensors["t2d"].all()
    here, there = (load_draft(tmp_path / name, base, jnp.bfloat16) for name in ("head", "out"))
    assert there.head.config == here.head.config
    np.testing.assert_array_equal(here.params["lm_head"], there.params["lm_head"])


def test_a_head_for_sglang_without_a_bias_gets_one_of_zeros(exported, tmp_path, base):
    tensors, _ = exported("eagle_sglang", "eagle", {"fc_bias": False}, {})
    assert not tensors["fc.bias"].any()
    here, there = (load_draft(tmp_path / name, base, jnp.bfloat16) for name in ("head", "out"))
    assert there.head.config == dataclasses.replace(here.head.config, fc_bias=True)
    np.testing.assert_array_equal(here.params["fc"], there.params["fc"])


QWEN2 = dataclasses.replace(BASE.head_layer, qkv_bias=True)
REFUSED = {
    "a bias of fc for vLLM": ("eagle_vllm", "eagle", {}, "--drafter_options=fc_bias=false"),
    "q, k, v biases for SGLang": ("eagle_sglang", "eagle", {"layer": QWEN2}, "llama_layer=true"),
    "q, k, v biases for tpu-inference": ("eagle3_tpu", "eagle3", {"layer": QWEN2},
     "this head's layer has biases, and tpu-inference's EAGLE-3 has none"),
    "states that tpu-inference does not give": (
        "eagle3_tpu",
        "eagle3",
        {"features": ("layer_1", "layer_3", "layer_4")},
        "this head reads layer_1, layer_3, layer_4, but readers of the official EAGLE-3",
    ),
    "q, k, v biases for vLLM": ("speculators", "eagle3", {"layer": QWEN2},
     "has qkv_bias True and output_bias False, but vLLM's has one attention_bias for both"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_server_would_run_differently_is_refused(command, base, base_folder, tmp_path, case):
    to, kind, changes, message = REFUSED[case]
    save_random_head(tmp_path / "head", base, kind, **changes)
    argv = (f"--base={base_folder}", f"--input={tmp_path / 'head'}", f"--to={to}")
    status, report, error = command(*argv, f"--output={tmp_path / 'out'}")
    assert (status, report, error.count("\n")) == (2, None, 1)
    assert message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_llama_layer_has_nothing_that_servers_do_not_know(kind):
    from_qwen = dataclasses.replace(BASE, qkv_bias=True, query_key_norm=True)
    plain = registry.config_for_base(kind, from_qwen, llama_layer=True)
    assert plain.layer == BASE.head_layer
    assert registry.config_for_base(kind, from_qwen).layer == from_qwen.head_layer


def test_every_target_of_the_command_is_a_layout():
    assert set(TARGETS) == {NATIVE, *(layout.to for layout in LAYOUTS.values())}
    # `convert --help` says what each of them is.
    assert convert.__doc__ is not None
    assert set(TARGETS) <= set(re.findall(r"\w+", convert.__doc__))
