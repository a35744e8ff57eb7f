"""--int8: what is rounded, and that the text stays the base's own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from clover_jax.checkpoints.base import fingerprint
from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.quantization import (
    parse_parts,
    quantization_notice,
    quantize_base,
    quantize_params,
)
from clover_jax.checkpoints.shapes import base_shapes
from clover_jax.decoding.models import identity_of, idle_state, load, load_shapes
from clover_jax.decoding.spec import ModelSpec
from clover_jax.decoding.step import speculate_and_verify
from clover_jax.decoding.tree_config import TreeConfig
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.errors import UserError
from clover_jax.evaluation.compiled import Work, count_work
from clover_jax.models.batch import Batch
from clover_jax.models.int8 import Int8Matrix, quantize, widen
from clover_jax.models.meshes import MeshShape, make_abstract_mesh
from clover_jax.models.placement import param_shardings
from tests.decoding.test_greedy_equality import FAMILIES
from tests.tiny_models import (
    DRAFTERS,
    LLAMA3_8B,
    SMALL_TREE,
    TINY,
    decoded,
    lively_params,
    random_base,
    random_head,
    random_prompts,
    texts_of,
)

PROMPTS = random_prompts(6, seed=3)

# Matrices that stay: rows that are looked up, and Clover-LR's few dimensions.
KEPT = {"embedding", "correction_out", "token_in", "state_in", "gates", "candidate", "mix"}
KEPT |= {"base_kernel", "kernel_projection", "predecessor", "successor", "selector_gate"}


def widened(params):
    return jax.tree.map(
        lambda leaf: widen(leaf, jnp.float32), params, is_leaf=lambda x: isinstance(x, Int8Matrix)
    )


@pytest.mark.parametrize("name", ["base", *DRAFTERS])
def test_all_matrices_are_rounded_but_those_that_are_meant_to_stay(name):
    params = random_base() if name == "base" else random_head(name=name)[1]
    leaves = jax.tree_util.tree_leaves_with_path(
        quantize_params(params), is_leaf=lambda x: isinstance(x, Int8Matrix)
    )
    kept = {path[-1].key for path, x in leaves if not isinstance(x, Int8Matrix) and x.ndim > 1}
    assert {name for name in kept if not name.endswith("bias")} <= KEPT


@functools.cache
def plain_texts(rounded_base: bool):
    base = quantize_base(random_base(), ("base",)) if rounded_base else random_base()
    return texts(base, None, None, TreeConfig.root_only())


def texts(base, head, params, tree):
    drafter = (head, params) if head else None
    return texts_of(decoded(drafter, tree, PROMPTS, 16, base=base, batch_size=3))


def test_a_rounded_head_leaves_the_text_as_it_is():
    base = quantize_base(random_base(), ("draft",))
    params = quantize_params(lively_params(name="eagle3"))
    assert texts(base, random_head(name="eagle3")[0], params, SMALL_TREE) == plain_texts(False)


@pytest.mark.parametrize("name", ["clover-mlp", "clover_lr", "medusa", "eagle"])
def test_a_rounded_head_computes_with_what_its_matrices_stand_for(name):
    head, _ = random_head(name=name)
    module, width = head.module, TINY.hidden_size * len(head.config.features)
    base = quantize_base(random_base(), ("draft",))
    tokens = jnp.arange(6)[None]
    ones, rng = jnp.ones_like(tokens), jax.random.key(1)

    @jax.jit
    def logits(params, base, features):
        frozen = frozen_from_base(base)
        apply = functools.partial(module.apply, {"params": params}, frozen)
        batch = Batch(tokens, ones, tokens, ones > 0)
        states = apply(features, batch, rng, method="train_forward")
        return apply(states[0], 0, method="logits")

    features = jax.random.normal(rng, (1, 6, width))
    params = quantize_params(lively_params(name=name))
    found = logits(params, base, features)
    expected = logits(widened(params), widened(base), features)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_speculation_writes_what_the_rounded_base_writes():
    base = quantize_base(random_base(), ("base", "draft"))
    head, params = random_head()
    spoken = texts(base, head, quantize_params(params), SMALL_TREE)
    assert spoken == plain_texts(True)
    assert texts(widened(base), None, None, TreeConfig.root_only()) == plain_texts(True)


SLOW = [
    pytest.param(family, marks=pytest.mark.slow)
    for family in ("gemma 4", "shared keys", "sigmoid router")
]


@pytest.mark.parametrize("family", ["delta nets", *SLOW])
def test_other_layers_write_what_their_rounded_matrices_stand_for(family):
    config = dataclasses.replace(TINY, **{"num_layers": 2} | FAMILIES[family][0])
    base = quantize_base(random_base(config), ("base",))
    attention = base["layers_0"]["attention"]
    assert isinstance(attention.get("delta_in", attention.get("qkv")), Int8Matrix)
    usual = {"prompts": PROMPTS[:3], "max_new_tokens": 12, "config": config, "batch_size": 3}
    plain = texts_of(decoded(None, "none", base=base, **usual))
    assert plain == texts_of(decoded(None, "none", base=widened(base), **usual))
    assert plain == texts_of(decoded(random_head(config), SMALL_TREE, base=base, **usual))


def test_a_tied_lm_head_is_rounded_beside_the_embedding():
    tied = dataclasses.replace(TINY, tie_word_embeddings=True)
    params = random_base(tied)
    rounded = quantize_base(params, ("base",))
    assert rounded["embedding"] is params["embedding"]
    again = quantize(params["embedding"], (1,))
    np.testing.assert_array_equal(rounded["lm_head"].values, again.values)
    assert set(quantize_base(params, ("draft",))) == {*params, "draft_lm_head"}


def test_a_reduced_vocabulary_takes_its_rows_of_the_rounded_lm_head():
    head, params = random_head(draft_to_target=tuple(range(0, 96, 2)))
    base = quantize_base(random_base(), ("draft",))
    assert texts(base, head, quantize_params(params), SMALL_TREE) == plain_texts(False)


@pytest.mark.parametrize("parts", [("draft",), ("base", "draft")])
def test_loaded_models_are_known_by_their_base_as_it_was(parts, fixtures_dir):
    folder = fixtures_dir / "clover2_reference"
    source = str(folder / "base")
    # The head comes with copies of the base's matrices, which are compared with the base's.
    models = load(ModelSpec(source, draft=str(folder / "clover2"), dtype="float32", int8=parts))
    assert models.int8 == parts
    assert fingerprint(models.base) == fingerprint(load_base(source))
    down = models.base.params["layers_0"]["mlp"]["down"]
    assert isinstance(down, Int8Matrix) == ("base" in parts)
    assert isinstance(models.draft_params["projector_0"], Int8Matrix)
    assert identity_of(models)["int8"] == list(parts)


def test_another_word_is_refused_and_a_user_on_a_cpu_is_told_that_it_does_not_pay_there():
    with pytest.raises(UserError, match=r"--int8=draft,head: 'head' is not one of base, draft"):
        parse_parts(["draft", "head"])
    assert parse_parts(["draft", "base"]) == ("base", "draft")
    assert "longer on CPU" in quantization_notice(("draft",))
    assert quantization_notice(()) is None


def test_a_rounded_matrix_lies_on_a_mesh_as_the_matrix_does():
    mesh = make_abstract_mesh(MeshShape(fsdp=2, tensor=4))
    # Abstract: params of these widths would take a gigabyte.
    base = base_shapes(dataclasses.replace(LLAMA3_8B, num_layers=1, vocab_size=1024))
    shapes = jax.eval_shape(lambda params: quantize_base(params, ("base",)), base)
    places = jax.tree.map(lambda place: place.spec, param_shardings(shapes, mesh))
    layer = places["layers_0"]
    assert layer["mlp"]["down"] == Int8Matrix(P("tensor", "fsdp"), P(None, "fsdp"))
    assert layer["attention"]["qkv"].step == P(None, "tensor", None, None)
    assert places["lm_head"] == Int8Matrix(P("tensor", "fsdp"), P("tensor", None))


def test_a_product_reads_one_byte_an_entry():
    matrix = quantize(jnp.ones((5, 7)), (0,))
    assert count_work(lambda m, x: x @ m, matrix, jnp.ones((2, 5))) == Work(35, 140, 140)


def test_what_bench_compiles_and_what_it_times_are_rounded_alike():
    spec = ModelSpec("shape:64x1x96", draft="random:clover2", tree="chain:2", dtype="float32")
    int8 = dataclasses.replace(spec, int8=("draft", "base"))
    timed, compiled = load(int8), load_shapes(int8)
    assert timed.int8 == compiled.int8 == ("base", "draft")

    def shapes(subject):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), subject.weights)

    def read(subject):
        step = functools.partial(speculate_and_verify, subject.step())
        return count_work(
            step, subject.weights, jax.eval_shape(lambda: idle_state(subject, 1, 64))
        ).weight_bytes

    assert shapes(timed) == shapes(compiled)
    assert 4 * read(compiled) == read(load_shapes(spec))
