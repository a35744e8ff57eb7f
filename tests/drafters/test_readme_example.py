"""The head of drafters/README.md, registered or in a file of its own, trains and decodes."""

import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax import api
from clover_jax.drafters import registry
from clover_jax.drafters.drafter import AcceptedPositions, frozen_from_base
from clover_jax.errors import UserError
from clover_jax.training.step import OptimizerConfig, TrainStepConfig, init_state, make_train_step
from tests.conftest import REPOSITORY
from tests.tiny_folders import save_tiny_base
from tests.tiny_models import TINY, init_head, random_base
from tests.training.training_data import random_batch

PAGE = REPOSITORY / "clover_jax" / "drafters" / "README.md"
NAME = "clover_jax.drafters.bigram"


SOURCE = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


@pytest.fixture
def head(monkeypatch):
    """The page's head, made by name."""
    module = types.ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, module)
    exec(compile(SOURCE, str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(registry.DRAFTERS, "bigram", "Bigram")
    return registry.head(registry.config_for_base("bigram", TINY, num_positions=3, gain=2.0))


def test_it_has_the_options_of_its_config_and_drafts_what_it_was_trained_to_draft(head):
    assert registry.plain_options("bigram") == {"num_positions": int, "gain": float}
    assert head.config.gain == 2.0
    params = init_head(head, random_base(), jax.random.key(0))
    frozen, batch = frozen_from_base(random_base()), random_batch()
    features = jax.random.normal(jax.random.key(1), (*batch.tokens.shape, TINY.hidden_size))

    def apply(method, *arguments):
        return head.module.apply({"params": params}, frozen, *arguments, method=method)

    trained = apply("train_forward", features, batch)
    at = jnp.full(len(batch.tokens), 4)
    next_tokens = jnp.roll(batch.tokens, -1, axis=1)
    accepted = AcceptedPositions(features, next_tokens, 0 * at, at, batch.tokens)
    state, cache = apply("absorb", accepted, ())
    for i in range(3):
        expected = apply("logits", trained[i, :, 3], i)
        np.testing.assert_allclose(apply("propose", state, i)[:, 0], expected, atol=1e-5)
        token, parent = batch.tokens[:, 5 + i, None], jnp.zeros((len(at), 1), int)
        state = apply("advance", state, cache, parent, token, i + 1)


def test_a_training_step_lowers_its_loss(head):
    config = TrainStepConfig(TINY, head, OptimizerConfig(10, 5e-3, 0))
    state = jax.jit(init_state, static_argnums=(0, 2))(config, random_base(), 0)
    step = make_train_step(config)
    losses = []
    for _ in range(4):
        state, metrics = step(state, random_base(), random_batch())
        losses.append(float(metrics.loss))
    assert losses[-1] < losses[0]


def test_it_is_trained_and_read_again_from_a_file_of_its_own(tmp_path, monkeypatch):
    path = tmp_path / "my_head.py"
    path.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    base = save_tiny_base(tmp_path / "base")
    (tmp_path / "some.jsonl").write_text((json.dumps({"text": "some text " * 20}) + "\n") * 40)
    settings = {"data": "some.jsonl", "base": str(base), "seq_len": 32, "batch_size": 2}
    settings |= {"drafter": "my_head.py:Bigram", "drafter_options": "gain=2"}
    report = api.train("w", steps=2, **settings)
    models = api.load_base(base)
    loaded = api.load_draft(models, report["draft"])
    assert (loaded.draft.head.config.kind, loaded.draft.head.config.gain) == (f"{path}:Bigram", 2)
    pieces = [list(api.generate(one, "ab", max_new_tokens=8)) for one in (models, loaded)]
    assert "".join(p.text for p in pieces[0]) == "".join(p.text for p in pieces[1])
    assert api.train("w", steps=3, **settings)["steps"] == 3

    # A process whose user has not named the file refuses to run it.
    monkeypatch.setattr(registry, "_FILES", set())
    with pytest.raises(UserError, match=f"if you trust that file, set .*={path}"):
        api.load_draft(models, report["draft"])
    monkeypatch.setenv(registry.TRUSTED_VARIABLE, str(path))
    api.load_draft(models, report["draft"])


def test_a_file_without_the_head_is_named(tmp_path, monkeypatch):
    (tmp_path / "my_head.py").write_text("class Bigram:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    for name, message in {
        "nothing.py:Bigram": "no such file",
        "my_head.py:Trigram": "has no class 'Trigram' that extends Drafter",
        "my_head:Bigram": "or FILE.py:CLASS",
    }.items():
        with pytest.raises(UserError, match=message):
            registry.config_for_base(name, TINY)
