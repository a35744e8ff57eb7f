"""A head that learns while it serves: the text stays, the head follows, the time is bounded."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.serialization import from_bytes, to_bytes
from scipy import special, stats

from clover_jax import generate
from clover_jax.api import Sampler
from clover_jax.checkpoints.card import read_card
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.errors import UserError
from clover_jax.training import adapting
from clover_jax.training.adapting import Adapter
from tests.conftest import rows_in, run_command
from tests.tiny_folders import save_tiny_base, save_tiny_draft
from tests.tiny_models import DRAFTERS, TINY, decode_all, random_base, random_head, random_models
from tests.training.test_sampler import PROMPTS, chi_square, full_forward, moved_base, second_of

HELD = 4  # texts that wait to be judged, as many as a step reads


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Steps of few tokens, as many as there are chunks."""
    for name, value in {"ROWS": HELD, "LENGTH": 32, "RING": 2, "BUDGET": 1e9}.items():
        monkeypatch.setattr(adapting, name, value)


def models(name="clover_lr", tree="chain:3"):
    return random_models(*random_head(TINY, name), parse_tree(tree))


def fill(adapter, texts=2 * HELD):
    rng = np.random.default_rng(0)
    for _ in range(texts):
        adapter.take(rng.integers(0, TINY.vocab_size, 30), 10, True)


def drafted(adapter):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(adapter.params)]


def test_a_text_is_taken_once_and_its_end_with_what_came_before_it():
    adapter = Adapter(models())
    text = np.arange(100, 145)
    assert adapter.take(text[:20], 10, False) == 10  # fewer than half a row are new
    assert adapter.take(text[:28], 10, False) == 28
    assert adapter.take(text[:40], 28, False) == 28
    assert adapter.take(text[:45], 28, True) == 45
    assert adapter.take(text[:45], 45, True) == 45  # nothing is new
    state = adapter.state
    assert state.texts == 2
    assert state.tokens[0].tolist() == [*range(100, 128), 0, 0, 0, 0]
    assert state.kind[0].tolist() == [1] * 10 + [2] * 18 + [0] * 4
    assert state.tokens[1].tolist() == [*range(113, 145)]
    assert state.kind[1].tolist() == [1] * 15 + [2] * 17
    # A ring: the texts after the last one replace the first, to their ends.
    for _ in range(2 * HELD - 1):
        adapter.take(np.array([7, 8]), 1, True)
    assert adapter.state.kind[0].tolist() == [1, 2] + [0] * 30
    assert adapter.state.kind[1].tolist() == [1] * 15 + [2] * 17


def test_steps_take_no_more_than_their_share_of_the_seconds(monkeypatch):
    monkeypatch.setattr(adapting, "BUDGET", 0.05)
    # By this clock every second step takes 3 seconds, the others take 1.
    times = itertools.accumulate(itertools.cycle((0.0, 1.0, 0.0, 3.0)))
    adapter = Adapter(models())
    fill(adapter, 2 * HELD - 1)
    adapter.watch(1000.0, 1, True)
    learn = functools.partial(adapter.learn, random_base(), lambda: next(times))
    assert learn() is None  # its ring is not full
    fill(adapter, 1)
    adapter.watch(-1000.0, 1, True)
    for seconds in range(1, 401):
        adapter.watch(1.0, 1, True)
        learn()
        # That a step takes 1 second, or 3, is not known before the first such step.
        assert adapter.spent <= max(0.05 * seconds, 4 if seconds < 80 else 0)
    assert (adapter.spent, adapter.state.steps) == (20, 10)
    assert adapter.decoded == 400


def test_with_a_number_of_forwards_seconds_do_not_matter():
    adapter = Adapter(models(), every=8)
    fill(adapter)
    steps = []
    for _ in range(10):
        adapter.watch(0.0, 3, True)
        adapter.learn(random_base(), lambda: 0.0)
        steps.append(adapter.state.steps)
    assert steps == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "clover_lr")) for n in DRAFTERS]
)
def test_a_head_learns_from_greedy_texts_and_changes_none(name):
    rollouts = Sampler(models(name), batch_size=4, adapt=True)
    plain = random_models(*random_head(TINY), TreeConfig.root_only()).plain().engine(4)
    rows = decode_all(plain, random_base(), {}, PROMPTS, 48, TINY.eos_token_ids)
    before, taus = drafted(rollouts.adapter), []
    for _ in range(10):
        found = rollouts.sample(PROMPTS, n=2, max_new_tokens=48, temperature=0.0)
        for copy, count in enumerate(found.lengths):
            assert found.tokens[copy, :count].tolist() == rows[copy // 2].output_ids
        taus.append(found.tau)
    assert rollouts.adapter.state.steps > 20
    assert taus[-1] > taus[0]
    after = drafted(rollouts.adapter)
    assert any((old != new).any() for old, new in zip(before, after, strict=True))
    for own, learned in zip(jax.tree.leaves(rollouts.models.draft_params), after, strict=True):
        np.testing.assert_array_equal(own, learned)


@pytest.mark.parametrize(
    ("tree", "updates"), [("chain:3", 2), pytest.param("paper25", 20, marks=pytest.mark.slow)]
)
def test_samples_of_a_head_that_learns_have_the_bases_distribution(tree, updates):
    rollouts, prompt = Sampler(models(tree=tree), batch_size=64, adapt=True), PROMPTS[0]
    statistic, degrees, used = 0.0, 0, set()
    params = None
    for step in range(1, updates + 1):
        del params
        params = moved_base.__wrapped__(step)
        rollouts.update_base(params)
        steps = rollouts.adapter.state.steps
        found = rollouts.sample([prompt], n=800, max_new_tokens=4, seed=step)
        assert rollouts.adapter.state.steps > steps + 5
        first = np.bincount(found.tokens[:, 0]).argmax()
        logits = np.asarray(full_forward(params, jnp.array([[*prompt, first]]))[0], np.float64)
        for at, drawn in ((-2, found.tokens[:, 0]), (-1, second_of(found, first))):
            counts = np.bincount(drawn, minlength=TINY.vocab_size)
            more = chi_square(counts, special.softmax(logits[at]) * len(drawn))
            statistic, degrees = statistic + more[0], degrees + more[1]
        if step > 1:
            used.add(sum(array.nbytes for array in jax.live_arrays()))
    assert stats.chi2.sf(statistic, degrees) > 1e-3, f"{statistic} of {degrees}"
    assert len(used) == 1, "device memory grows with updates"


@pytest.mark.parametrize("change", [3.0, float("nan")])
def test_a_head_that_falls_behind_the_one_before_is_taken_back(monkeypatch, change):
    monkeypatch.setattr(adapting, "JUDGED_EVERY", 1)
    adapter, now = Adapter(models()), lambda: 0.0
    fill(adapter)
    adapter.watch(1.0, 1, False)
    good = [np.asarray(leaf) for leaf in jax.tree.leaves(adapter.state.kept)]
    # As good as the one that is kept: it is the one to keep, and goes on.
    adapter.learn(random_base(), now)
    assert adapter.state.taken_back == 0
    train = adapter.state.train
    spoilt = jax.tree.map(lambda leaf: leaf + change, train.params)
    adapter.state = adapter.state.replace(train=train.replace(params=spoilt))
    adapter.learn(random_base(), now)
    assert adapter.state.taken_back == 1
    assert int(adapter.state.train.step) == 1  # begun again, and a step further
    heads = map(jax.tree.leaves, (adapter.state.kept, adapter.params))
    for old, kept, new in zip(good, *heads, strict=True):
        np.testing.assert_array_equal(old, kept)
        np.testing.assert_allclose(old, new, atol=2 * adapting.OPTIMIZER.learning_rate)


def test_a_restored_adapter_makes_the_same_steps(monkeypatch):
    monkeypatch.setattr(adapting, "JUDGED_EVERY", 2)
    first, now = Adapter(models()), lambda: 0.0
    fill(first)
    first.watch(1.0, 1, False)
    for _ in range(3):
        first.learn(random_base(), now)
    saved = to_bytes(first.state)
    second = Adapter(models())
    second.restore(from_bytes(second.state, saved))
    second.watch(1.0, 1, False)
    for old, new in zip(drafted(first), drafted(second), strict=True):
        np.testing.assert_array_equal(old, new)
    for adapter in (first, second):
        fill(adapter, 3)
        adapter.learn(random_base(), now)
    assert to_bytes(first.state) == to_bytes(second.state)


def test_what_cannot_learn_is_refused():
    with pytest.raises(UserError, match="adapt trains a head's weights; the draft is none"):
        Sampler(models().plain(), adapt=True)
    with pytest.raises(UserError, match="the draft is 'lookup', which has none"):
        Sampler(models("lookup", "copy:4"), adapt=True)
    with pytest.raises(UserError, match=r"adapt_every \(0\) must be at least 1"):
        Sampler(models(), adapt=True, adapt_every=0)


def test_generate_keeps_what_a_head_has_learnt_and_goes_on_from_it(tmp_path, capsys):
    base = save_tiny_base(tmp_path / "base")
    draft = save_tiny_draft(tmp_path / "draft", base)
    rows = [{"prompt": f"what is {i} hats"} for i in range(16)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name, *more, status=0, draft=draft):
        output = tmp_path / name
        flags = ["--base", base, "--draft", draft, "--prompts", tmp_path / "prompts.jsonl"]
        flags += ["--max_new_tokens=40", "--output", output, *more]
        found, _, error = run_command(capsys, generate, *flags)
        assert found == status, error
        return error if status else ([row["output_ids"] for row in rows_in(output)], error)

    folder = tmp_path / "adapted"
    expected, _ = run("plain.jsonl")
    before = 0
    for name in ("1.jsonl", "2.jsonl"):
        texts, said = run(name, f"--adapt={folder}")
        assert texts == expected
        provenance = read_card(folder / "draft").provenance
        assert f"the head made {provenance['adapter_steps']} steps" in said
        assert provenance["adapter_steps"] > before
        before = provenance["adapter_steps"]
    assert run("learned.jsonl", draft=folder)[0] == expected

    again = run("3.jsonl", f"--adapt={folder}", draft=folder, status=2)
    assert f"{folder} has a head that began from another draft" in again
    none = run("4.jsonl", f"--adapt={tmp_path / 'none'}", draft="lookup", status=2)
    assert "adapt trains a head's weights; the draft is 'lookup'" in none
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_on_a_mesh_it_learns_the_same(run_python):
    run_python(
        "import numpy as np\n"
        "from clover_jax.api import Sampler\n"
        "from clover_jax.decoding.tree_config import parse_tree\n"
        "from clover_jax.training import adapting\n"
        "from tests.tiny_models import TINY, random_head, random_models\n"
        "adapting.ROWS, adapting.LENGTH, adapting.RING, adapting.BUDGET = 4, 32, 2, 1e9\n"
        "models = random_models(*random_head(TINY, 'clover_lr'), parse_tree('chain:3'))\n"
        "found = []\n"
        "for mesh in (None, 'data=2', 'fsdp=2'):\n"
        "    rollouts = Sampler(models, batch_size=4, mesh=mesh, adapt=True)\n"
        "    for _ in range(3):\n"
        "        samples = rollouts.sample([[5, 6, 7]] * 4, max_new_tokens=24, temperature=0.0)\n"
        "    found.append((samples.tokens, rollouts.adapter.state.steps, samples.tau))\n"
        "    assert found[-1][1] > 3, found[-1][1]\n"
        "for tokens, steps, tau in found[1:]:\n"
        "    np.testing.assert_array_equal(tokens, found[0][0])\n"
        "    assert (steps, tau) == found[0][1:], (steps, tau, found[0])\n",
        devices=2,
    )
