"""Texts against plain decoding, near-ties, teacher-forced accuracy; on meshes as on one device."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.shapes import base_shapes
from clover_jax.checkpoints.stored_head import Draft
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.models import Models
from clover_jax.decoding.requests import Request
from clover_jax.decoding.sampling_config import GREEDY, SamplingConfig, SamplingParams
from clover_jax.decoding.state import empty_state
from clover_jax.decoding.step import StepConfig, Weights
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.evaluation import accuracy, equality
from clover_jax.evaluation.accuracy import TOP
from clover_jax.evaluation.equality import MISMATCH, NEAR_TIE, Divergence, compare_rows, summarize
from clover_jax.evaluation.plan import Method
from clover_jax.evaluation.rows import TurnRow
from clover_jax.evaluation.targets import find_devices, parse_target
from clover_jax.models.batch import Batch
from clover_jax.models.decoder import Decoder, causal_mask, project
from clover_jax.models.meshes import MeshShape, make_mesh
from clover_jax.models.placement import (
    decode_state_shardings,
    param_shardings,
    replicated,
    with_shardings,
)
from tests.decoding.reference import _logits
from tests.decoding.test_greedy_equality import HYBRID
from tests.tiny_models import TINY, decode_all, random_base, random_head, random_prompts


def row(*outputs, index=3):
    turns = [list(output) for output in outputs]
    names = ("prompt_ids", "accepted", "proposed", "ranks", "num_cut", "finish_reason")
    columns = {name: [[] for _ in turns] for name in names}
    return {"index": index, "output_ids": turns, **columns}


def test_the_first_difference_of_a_row_counts():
    found = compare_rows(row([1, 2], [3, 4, 9]), row([1, 2], [3, 5, 8]))
    assert found == [Divergence(3, turn=1, position=1, expected=5, found=4)]
    (ended,) = compare_rows(row([1]), row([1, 2]))
    assert (ended.position, ended.expected, ended.found) == (1, 2, None)
    assert Divergence(0, 0, 0, 1, 2).kind == MISMATCH, "what was not judged is a mismatch"


def test_a_row_without_text_is_not_compared():
    failed = {"index": 0, "error": "bad"}
    comparisons = [compare_rows(failed, row([1])), compare_rows(row([1]), row([1]))]
    found = {"compared": 1, "equal": 1, "near_ties": 0, "mismatches": 0, "not_compared": 1}
    assert summarize(comparisons, []) == found


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """Plain decoding of a base in which tokens 2i and 2i + 1 have the same score."""
    params = dict(random_base())
    head = params["lm_head"]
    params["lm_head"] = jnp.repeat(head[::2], 2, axis=0)
    base = BaseModel(TINY, params, tmp_path_factory.mktemp("base"), "random")
    return Method("vanilla", Models(base, None, None, TreeConfig.root_only()))


def classified(method, sampling, request, choose):
    """Decode plainly and classify a divergence at token 5, where `choose` was found instead."""
    alone, batched = (method.models.engine(size, sampling) for size in (1, 2))
    (done,) = [p.row for p in batched.stream(method.models.base.params, None, [request]) if p.done]
    expected = done.output_ids[5]
    divergence = Divergence(0, 0, 5, expected, choose(expected))
    case = equality.Case(request, done.output_ids, divergence)
    (found,) = equality.classify([case], method.models.base.params, alone, batched)
    return found


def test_another_token_of_the_same_score_is_a_near_tie_and_any_other_a_mismatch(twins):
    request = Request(0, random_prompts(1, seed=2)[0], 8)
    tie = classified(twins, GREEDY, request, lambda token: token ^ 1)
    assert (tie.kind, tie.gap) == (NEAR_TIE, 0)
    other = classified(twins, GREEDY, request, lambda token: (token + 2) % 96)
    assert other.kind == MISMATCH
    assert other.gap > other.threshold >= 0
    assert other.threshold < 1e-3  # float32: plain decoding hardly depends on its batch
    assert classified(twins, GREEDY, request, lambda token: None).kind == MISMATCH


def test_a_sampled_token_was_the_best_of_its_noisy_scores(twins):
    # With noise of their own the twins differ, so only the very token has no gap.
    hot = Request(0, random_prompts(1, seed=2)[0], 8, params=SamplingParams(1.0), seed=4)
    sampling = SamplingConfig("lossless")
    assert classified(twins, sampling, hot, lambda token: token).gap == 0
    assert classified(twins, sampling, hot, lambda token: token ^ 1).gap > 0
    # A row at temperature 0 is judged by its logits in a sampled run too.
    cold = Request(0, random_prompts(1, seed=2)[0], 8)
    tie = classified(twins, sampling, cold, lambda token: token ^ 1)
    assert (tie.kind, tie.gap) == (NEAR_TIE, 0)
    assert tie.threshold < 1e-3


def test_infinite_margins_move_no_threshold(twins):
    engine = twins.models.engine(2, SamplingConfig("lossless"))
    request = Request(0, [3, 1, 4], 8, params=SamplingParams(1e-38))
    case = equality.Case(request, [1, 5, 9], Divergence(0, 0, 2, 9, 2))
    (found,) = equality.classify([case], twins.models.base.params, engine, engine)
    assert found.threshold == 0


def test_a_threshold_in_bfloat16_is_that_of_tokens_read_at_once(twins):
    """Beside other rows plain decoding of this base rounds as it does alone."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_base(seed=4))
    params["lm_head"] *= 20  # logits with a standard deviation of 2
    base = dataclasses.replace(twins.models.base, params=params)
    models = dataclasses.replace(twins.models, base=base)
    alone, batched = models.engine(1), models.engine(8)
    requests = [Request(i, p, 24) for i, p in enumerate(random_prompts(8, seed=4)[:4])]
    rows = decode_all(batched, params, None, [request.prompt_ids for request in requests], 24)
    cases = [
        equality.Case(request, row.output_ids, Divergence(0, 0, 0, row.output_ids[0], 1))
        for request, row in zip(requests, rows, strict=True)
    ]
    assert 0.01 < equality.classify(cases, params, alone, batched)[0].threshold < 1


def test_texts_of_very_different_lengths_are_judged_together(twins, monkeypatch):
    monkeypatch.setattr(equality, "bucket", lambda size: -(-size // 4) * 4)
    alone, batched = (twins.models.engine(size) for size in (1, 2))
    outputs = [[1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
    cases = [
        equality.Case(Request(i, [3, 1, 4], 8), ids, Divergence(i, 0, 1, ids[1], 40))
        for i, ids in enumerate(outputs)
    ]
    found = equality.classify(cases, twins.models.base.params, alone, batched)
    assert [one.index for one in found] == [0, 1, 2]
    assert all(one.gap > 0 for one in found)


def test_text_is_read_no_further_than_it_goes(way, twins, monkeypatch):
    monkeypatch.setattr(equality, "_program", equality._program.__wrapped__)
    case = equality.Case(Request(0, [3, 1, 4], 8), [3, 5, 9])
    (scores,) = equality.read_again([case], twins.models.base.params, twins.models.engine(2))
    assert scores.gap.shape == (3,)
    assert (scores.gap > 0).all()


def test_the_states_of_delta_nets_stand_where_the_text_is_read_again():
    """Prompts shorter and longer than what is read at once, against a forward of the whole text."""
    config = dataclasses.replace(TINY, num_layers=2, **HYBRID)
    params = random_base(config)
    engine = Engine(config, None, TreeConfig.root_only(), batch_size=3)
    prompts = [*random_prompts(2, seed=6), [3, 1, 4], [5] * 16, [7] * 70]
    rows = decode_all(engine, params, None, prompts, 20)
    cases = [
        equality.Case(Request(i, prompt, 20), row.output_ids)
        for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    ]
    for width in (1, 16):
        found = list(equality.read_again(cases, params, engine, width))
        for case, scores in zip(cases, found, strict=True):
            prompt, ids = case.request.prompt_ids, case.output_ids
            best = np.sort(_logits(config, params, [*prompt, *ids]), axis=-1)[len(prompt) - 1 :]
            leads = (best[:, -1] - best[:, -2])[: len(ids)]
            np.testing.assert_allclose(scores.lead, leads, atol=1e-4)


def test_the_program_knows_the_mesh(twins, logits_specs):
    models = dataclasses.replace(twins.models, mesh=make_mesh(MeshShape()))
    case = equality.Case(Request(0, [3, 1, 4], 8), [1, 5, 9])
    assert list(equality.read_again([case], models.base.params, models.engine(2)))
    assert logits_specs
    assert None not in logits_specs


def turn(prompt_ids, output_ids):
    return TurnRow(prompt_ids, output_ids, accepted=[], proposed=[], ranks=[], num_cut=0)


RNG = np.random.default_rng(0)
TEXTS = [
    turn(RNG.integers(0, 96, 5).tolist(), RNG.integers(0, 96, 9).tolist()),
    turn([7], RNG.integers(0, 96, 12).tolist()),
    turn(RNG.integers(0, 96, 250).tolist(), RNG.integers(0, 96, 20).tolist()),
    turn([3, 4], [5]),  # no pair: nothing follows the first emitted token
]


@pytest.fixture(scope="module")
def method(tmp_path_factory):
    base = BaseModel(TINY, random_base(), tmp_path_factory.mktemp("base"), "random")
    head, params = random_head()
    tree = parse_tree("chain:2")
    return Method("a", Models(base, None, Draft(head, params, None, {}, "a"), tree))


def by_hand(text):
    """Return pairs [P] and hits [3, P], pair by pair."""
    tokens = np.array([[*text.prompt_ids, *text.output_ids]])
    size = tokens.shape[1]
    best, logits = jax.device_get(_forward(tokens))
    order = np.argsort(-logits, axis=-1, kind="stable")
    pairs, hits = np.zeros(5, int), np.zeros((3, 5), int)
    for i in range(5):
        for t in range(size):
            if t + 1 >= len(text.prompt_ids) and t + 2 + i < size:
                pairs[i] += 1
                hits[:, i] += [best[t + 1 + i] in order[i, t, :k] for k in TOP]
    return pairs, hits


@jax.jit
def _forward(tokens):
    """Return the base's argmax [S] and the head's logits [P, S, V] of a single text."""
    head, params = random_head()
    positions = jnp.arange(tokens.shape[1])[None]
    variables, mask = {"params": random_base()}, causal_mask(*tokens.shape)
    output = Decoder(TINY).apply(variables, tokens, positions, mask)
    frozen = frozen_from_base(random_base())
    best = jnp.argmax(project(frozen.lm_head, output.hidden["post_norm"])[0], axis=-1)
    batch = Batch(tokens, jnp.ones_like(tokens), positions, tokens >= 0)
    arguments = (frozen, output.hidden["pre_norm"], batch, None)
    hidden = head.module.apply({"params": params}, *arguments, method="train_forward")
    apply = functools.partial(head.module.apply, {"params": params}, frozen, method="logits")
    return best, jnp.stack([apply(hidden[i, 0], i) for i in range(5)])


def test_hits_are_those_counted_pair_by_pair(method):
    found = dict(accuracy.measure(method, TEXTS))
    assert sorted(found) == [0, 1, 2, 3]
    for number, text in enumerate(TEXTS):
        pairs, hits = by_hand(text)
        assert found[number].pairs.tolist() == pairs.tolist()
        assert found[number].hits.tolist() == hits.tolist()
    assert found[2].pairs.tolist() == [19, 18, 17, 16, 15]
    assert sum(one.hits.sum() for one in found.values()) > 0


def test_shares_add_up_over_texts(method):
    found = [hits for _, hits in accuracy.measure(method, TEXTS[:2])]
    figures = accuracy.total(found).to_dict()
    assert figures["pairs"] == [8 + 11, 7 + 10, 6 + 9, 5 + 8, 4 + 7]
    assert figures["top_1"][0] == pytest.approx(sum(one.hits[0, 0] for one in found) / 19)
    assert figures["top_1"] <= figures["top_3"] <= figures["top_5"]


# Prints, for one device and for each mesh, the hits of two texts and plain decoding's margins.
MEASURED = """
import dataclasses, json, sys
from pathlib import Path
import jax, numpy as np
from clover_jax.decoding.requests import Request
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.checkpoints.stored_head import Draft
from clover_jax.evaluation import accuracy, equality
from clover_jax.evaluation.equality import read_again
from clover_jax.evaluation.plan import Method
from clover_jax.evaluation.rows import TurnRow
from clover_jax.decoding.models import Models
from clover_jax.models.meshes import make_mesh, parse_mesh
from clover_jax.checkpoints.base import BaseModel
from clover_jax.models.placement import param_shardings
from tests.tiny_models import TINY, lively_params, random_base, random_head

config = dataclasses.replace(TINY, vocab_size=1024, num_layers=1)
texts = np.random.default_rng(0).integers(0, 1024, (4, 30)).tolist()
for name in ["", *sys.argv[1:]]:
    mesh = make_mesh(parse_mesh(name, 8)) if name else None
    put = lambda tree: jax.device_put(tree, param_shardings(tree, mesh)) if mesh else tree
    base = BaseModel(config, put(random_base(config)), Path("base"), "random")
    draft = Draft(random_head(config)[0], put(lively_params(config)), None, {}, "a")
    head = Method("a", Models(base, None, draft, parse_tree("chain:2"), mesh))
    plain = Method("vanilla", Models(base, None, None, TreeConfig.root_only(), mesh))
    hits = accuracy.measure(head, [TurnRow(text[:9], text[9:], [], [], [], 0) for text in texts])
    cases = [equality.Case(Request(0, text[:9], 21), text[9:]) for text in texts]
    engine = plain.models.engine(4)
    margins = [one.lead for n in (1, 16) for one in read_again(cases, base.params, engine, n)]
    margins = np.stack(margins).tolist()
    print(json.dumps([[found.hits.tolist() for _, found in hits], margins]))
"""


@pytest.mark.slow
def test_accuracy_and_margins_on_a_mesh_are_those_of_one_device(run_python):
    meshes = ("data=2,tensor=2", "data=2,fsdp=2,tensor=2")
    measured_alike(run_python(MEASURED, *meshes, devices=8))


def measured_alike(printed):
    """Hold the hits and margins of each mesh against one device's; return the rest of the rows."""
    (hits, margins, *_), *others = map(json.loads, printed.splitlines())
    for other_hits, other_margins, *_ in others:
        assert other_hits == hits
        np.testing.assert_allclose(other_margins, margins, rtol=0, atol=1e-4)
    return [rest for _, _, *rest in others]


# The same of a base with experts, and with the most rows of any matrix in accuracy's program.
WITH_EXPERTS = MEASURED.replace(
    "num_layers=1)",
    """num_layers=1, num_experts=8, experts_per_token=2, expert_size=32)
count, programs = accuracy.count_hits, []


def count_hits(*arguments):
    programs.append(count.lower(*arguments).compile().as_text())
    return count(*arguments)


accuracy.count_hits = count_hits""",
).replace(
    "margins]))", 'margins, max(int(n) for n in re.findall(r"\\[(\\d+),\\d+\\]", programs[-1]))]))'
)


@pytest.mark.slow
def test_experts_are_those_of_a_devices_own_rows(run_python):
    source = WITH_EXPERTS.replace("import dataclasses, json,", "import dataclasses, json, re,")
    # 2048 tokens at once, two experts each: of all rows 4096.
    for (most_rows,) in measured_alike(run_python(source, "data=2,tensor=2", "data=4", devices=8)):
        assert most_rows <= 2 * 2048 // 2


@pytest.mark.aot
def test_margins_are_taken_where_the_rows_of_a_cache_lie():
    pytest.importorskip("libtpu")
    mesh = make_mesh(MeshShape(data=2, tensor=2), find_devices(parse_target("tpu-v6e:2x2"), 4))
    base = dataclasses.replace(TINY, num_layers=1, hidden_size=512, num_kv_heads=4, head_dim=128)
    config = StepConfig(base, None, TreeConfig.root_only(), SamplingConfig("greedy"))

    # The arguments that `read_again` passes to its program.
    state = jax.eval_shape(lambda: empty_state(base, None, config.tree, 4, 1024, 4, jnp.bfloat16))
    state = with_shardings(state, decode_state_shardings(state, mesh))
    params = base_shapes(base, jnp.bfloat16)
    weights = Weights(with_shardings(params, param_shardings(params, mesh)), {})
    whole = functools.partial(jax.ShapeDtypeStruct, sharding=replicated(mesh))
    text, other = whole((4, 1024), jnp.int32), whole((4, 32), jnp.int32)
    given = equality.Text(weights, state.replace(cache=()), text, other)
    found = equality.Scores(*[whole(other.shape, jnp.float32)] * 2)

    add = jax.jit(functools.partial(equality.add_scores, config, 1), donate_argnums=1)
    with jax.set_mesh(mesh):
        lowered = add.lower(given, (state.cache, found), whole((), jnp.int32))
    program = lowered.compile().as_text()
    assert "all-reduce" in program
    assert "collective-permute" not in program  # rows of other devices
    assert not re.search(r"\[[\d,]*1024,128\]\S* copy\(", program)
