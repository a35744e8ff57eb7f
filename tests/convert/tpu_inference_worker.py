"""Draft with tpu-inference's JAX classes: run by the interpreter of an environment that has it.

Reads a JSON object from stdin: `base` and `head` (folders), `prompt` (token ids), `count` (tokens
to draft). Writes one to the file that its argument names: the base's logits at every position of
the prompt, the drafted tokens, and the logits that each was taken from.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tpu_inference.distributed.jax_parallel_state import init_pp_distributed_environment
from tpu_inference.kernels.ragged_paged_attention.v3.kernel import ref_ragged_paged_attention
from tpu_inference.layers.common.attention_backend import RPAAttentionBackend
from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.layers.common.sharding import MESH_AXIS_NAMES
from tpu_inference.models.jax.llama3 import LlamaForCausalLM
from tpu_inference.models.jax.llama_eagle3 import EagleLlama3ForCausalLM
from tpu_inference.runner.kv_cache import create_kv_caches
from vllm.engine.arg_utils import EngineArgs

LENGTH = 128  # of the cache's only page, in tokens


def attend(backend, cache, query, key, value, rows, *_, sm_scale, **__):
    """Attend by the oracle of tpu-inference's kernel, which itself runs on TPUs only."""
    where = rows.seq_lens, rows.block_tables, rows.query_start_loc, rows.request_distribution
    output, cache = ref_ragged_paged_attention(query, key, value, cache, *where, sm_scale=sm_scale)
    return cache, output


def load(model_class, config, mesh):
    """Make a model without values, as the server does, so that each must come from its file."""
    key = jax.random.key(0)
    model = nnx.eval_shape(lambda: model_class(config, key, mesh), graph_updates=False)
    model.load_weights(key)
    return model


def one_row(start, count):
    """Return what attention reads of `count` new tokens of one sequence after `start` others."""
    positions = jnp.arange(start, start + count)
    numbers = [0], [start + count], [0, count], [0, 0, 1]  # page, length, new tokens, a sequence
    page, length, borders, kinds = (jnp.array(each, jnp.int32) for each in numbers)
    return AttentionMetadata(positions, page, length, borders, kinds)


def main():
    asked = json.loads(sys.stdin.readline())
    prompt, count = asked["prompt"], asked["count"]
    speculative = {"method": "eagle3", "model": asked["head"], "num_speculative_tokens": count}
    folders = {"model": asked["base"], "speculative_config": speculative}
    config = EngineArgs(**folders, dtype="float32", max_model_len=LENGTH).create_engine_config()
    config.model_config.dtype = jnp.float32
    init_pp_distributed_environment("", 0, 1, None, need_pp=False)
    RPAAttentionBackend.attention = attend

    devices = np.array(jax.devices()).reshape([1] * len(MESH_AXIS_NAMES))
    mesh = jax.sharding.Mesh(devices, MESH_AXIS_NAMES)
    jax.set_mesh(mesh)
    base, head = (load(each, config, mesh) for each in (LlamaForCausalLM, EagleLlama3ForCausalLM))
    # The server gives a head that brings no embedding the base's.
    head.model.embed_tokens.embedding[...] = base.model.embed.embedding[...]
    # Some of the head's modules compute in bfloat16, whatever was loaded into them.
    for _, module in nnx.iter_graph(head):
        if isinstance(module, nnx.Module) and hasattr(module, "dtype"):
            module.dtype = jnp.float32
    layer = config.model_config.hf_config
    sizes = 1, LENGTH, layer.num_key_value_heads, layer.head_dim
    names = [""] * (layer.num_hidden_layers + 1)  # the last one is the head's
    caches = create_kv_caches(*sizes, mesh, names, jnp.float32)

    caches, hidden, features, _ = base(caches, jnp.array(prompt), one_row(0, len(prompt)))
    logits = base.compute_logits(hidden)
    state = head.combine_hidden_states(jnp.concatenate(features, axis=-1))
    ids, start, drafted, proposals = [*prompt[1:], int(logits[-1].argmax())], 0, [], []
    for _ in range(count):
        caches, hidden, (state,), _ = head(caches, jnp.array(ids), state, one_row(start, len(ids)))
        proposals.append(head.compute_logits(hidden[-1:])[0])
        start, ids, state = start + len(ids), [int(proposals[-1].argmax())], state[-1:]
        drafted += ids
    answer = {"logits": logits.tolist(), "proposals": [each.tolist() for each in proposals]}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(answer | {"drafted": drafted}, file)


if __name__ == "__main__":
    main()
