"""A server whose head learns: the texts are plain decoding's, and a later server goes on."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from clover_jax import api
from clover_jax.checkpoints.card import read_card
from clover_jax.decoding.spec import ModelSpec
from clover_jax.training import adapting
from tests.serving.asking import text
from tests.serving.conftest import running
from tests.tiny_folders import save_tiny_base, save_tiny_draft


@pytest.mark.slow
def test_a_server_answers_the_same_while_its_head_learns(tmp_path, monkeypatch):
    for name, value in {"ROWS": 2, "LENGTH": 32, "RING": 2, "BUDGET": 1e9}.items():
        monkeypatch.setattr(adapting, name, value)
    base = save_tiny_base(tmp_path / "base")
    draft, folder = save_tiny_draft(tmp_path / "draft", base), tmp_path / "adapted"
    bodies = [
        {"prompt": f"what is {i} hats", "max_tokens": 40, "temperature": 0} for i in range(12)
    ]
    plain = api.load_base(base)
    expected = [
        "".join(p.text for p in api.generate(plain, body["prompt"], max_new_tokens=40))
        for body in bodies
    ]

    before = 0
    for _ in range(2):
        spec = ModelSpec(str(base), draft=str(draft))
        with running(spec, batch_size=2, adapt=str(folder), page=False) as server:
            with server.client() as client, ThreadPoolExecutor(4) as several:
                found = list(several.map(lambda body: text(client, body), bodies))
            assert found == expected
        steps = read_card(folder / "draft").provenance["adapter_steps"]
        assert steps > before
        before = steps
