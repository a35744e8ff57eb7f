"""Rows that change the base's logits: a bias of some tokens, and no EOS before a length."""

import jax
import numpy as np
import pytest

from clover_jax.decoding import programs
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.requests import Request
from clover_jax.decoding.sampling_config import GREEDY, MOST_BIASED, SamplingConfig, SamplingParams
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.errors import UserError
from tests.decoding.reference import _logits
from tests.tiny_models import SMALL_TREE, TINY, random_base, random_head, random_prompts

EOS = 7
BIASES = [((EOS, 30.0),), ((5, 2.5), (EOS, 30.0), (90, -4.0)), ((11, -100.0), (12, 3.0)), ()]
LEAST = [9, 14, 0, 6]


def requests(**changes):
    """Four rows with a bias each, whose EOS is probable, and one without."""
    prompts = random_prompts(5, seed=3)
    rows = zip(prompts, [*BIASES, ()], [*LEAST, 0], strict=True)
    return [
        Request(i, prompt, 20, (EOS,), min_new_tokens=least, logit_bias=bias, **changes)
        for i, (prompt, bias, least) in enumerate(rows)
    ]


def decode(engine, rows):
    """Return the rows in their order."""
    done = engine.stream(random_base(), random_head()[1], rows)
    return sorted((update.row for update in done if update.done), key=lambda row: row.index)


def slow(request):
    """Return the argmax of biased logits, one full forward a token."""
    text, new = list(request.prompt_ids), []
    while len(new) < request.max_new_tokens and EOS not in new:
        logits = np.array(_logits(TINY, random_base(), text)[len(text) - 1])
        for id_, bias in request.logit_bias:
            logits[id_] += bias
        if len(new) < request.min_new_tokens:
            logits[EOS] = -np.inf
        new.append(int(logits.argmax()))
        text.append(new[-1])
    return new


@pytest.mark.parametrize("rules", ["greedy", pytest.param("lossless", marks=pytest.mark.slow)])
def test_greedy_text_is_the_argmax_of_biased_logits(rules):
    sampling = SamplingConfig(rules, biased=True)
    engine = Engine(TINY, random_head()[0], SMALL_TREE, sampling, batch_size=3)
    rows = decode(engine, requests())
    assert [row.output_ids for row in rows] == [slow(request) for request in requests()]
    # The first EOS stands where it may, right behind the least length.
    assert [len(row.output_ids) for row in rows[:2]] == [10, 15]
    assert [row.finish_reason for row in rows[:2]] == ["eos", "eos"]
    assert sum(sum(row.accepted) for row in rows) > 0


@pytest.mark.parametrize(
    "tree", ["chain:3", pytest.param("dynamic:5:3:3+copy:4", marks=pytest.mark.slow)]
)
def test_drawn_text_is_plain_decoding_s(tree):
    sampling = SamplingConfig("lossless", truncate=True, biased=True)
    asked = requests(params=SamplingParams(temperature=1.0, top_p=0.9))
    plain = Engine(TINY, None, TreeConfig.root_only(), sampling, batch_size=5)
    engine = Engine(TINY, random_head()[0], parse_tree(tree), sampling, batch_size=2)
    texts = [row.output_ids for row in decode(engine, asked)]
    assert texts == [row.output_ids for row in decode(plain, asked)]
    assert all(EOS not in text[:least] for text, least in zip(texts, LEAST, strict=False))
    assert 11 not in texts[2]


def test_rows_without_a_bias_run_the_programs_of_an_engine_without(monkeypatch, fresh_programs):
    run, real = [], programs.compile_chunk

    def noted(config, *rest):
        program = real(config, *rest)

        def call(weights, state, *arguments):
            run.append((config, jax.tree.structure(state)))
            return program(weights, state, *arguments)

        return call

    monkeypatch.setattr(programs, "compile_chunk", noted)
    texts, head = [], random_head()[0]
    for biased in (False, True):
        sampling = SamplingConfig("lossless", biased=biased)
        engine = Engine(TINY, head, parse_tree("chain:3"), sampling, adapts=True, batch_size=2)
        texts.append([row.output_ids for row in decode(engine, requests()[4:])])
    assert texts[0] == texts[1]
    assert len({config.sampling for config, _ in run}) == len(set(run)) == 1
    assert run[0][0].sampling == GREEDY
    # Beside a row with a bias it has the same text by the other program.
    assert decode(engine, requests())[4].output_ids == texts[0][0]
    assert any(config.sampling.biased for config, _ in run)


def test_scores_are_those_of_the_base_itself():
    sampling = SamplingConfig("lossless", biased=True)
    engine = Engine(TINY, None, TreeConfig.root_only(), sampling, adapts=True)
    prompt = random_prompts(1, seed=9)[0]
    (row,) = decode(engine, [Request(0, prompt, 3, logit_bias=((5, 90.0),), wants_scores=True)])
    assert row.output_ids == [5, 5, 5]
    logits = np.asarray(_logits(TINY, random_base(), [*prompt, 5, 5]))[len(prompt) - 1 :][:3]
    wanted = np.asarray(jax.nn.log_softmax(logits, axis=-1))[:, 5]
    given = [score.log_probability for score in row.scores]
    assert given == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        (((96, 1.0),), r"logit_bias: token ids must lie in 0 \.\. 95, not 96"),
        (((5, float("inf")),), "logit_bias: inf of token 5 is not finite"),
        (((5, 1.0),) * (MOST_BIASED + 1), "logit_bias: 301 tokens; at most 300"),
    ],
)
def test_a_bias_that_cannot_be_is_refused(bias, said):
    engine = Engine(TINY, None, TreeConfig.root_only(), SamplingConfig(biased=True))
    with pytest.raises(UserError, match=said):
        engine.check(Request(0, [1], 5, logit_bias=bias))
    with pytest.raises(UserError, match="need an engine with"):
        Engine(TINY, None, TreeConfig.root_only()).check(Request(0, [1], 5, min_new_tokens=1))
