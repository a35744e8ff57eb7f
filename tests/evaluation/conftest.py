"""What tests of programs share."""

import pytest

from clover_jax.decoding import top_k


@pytest.fixture
def logits_specs(monkeypatch):
    """How logits lie on the mesh in use, or None, each time that a traced program asks."""
    found, find = [], top_k.logits_spec

    def finding(*arguments, **options):
        found.append(find(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(top_k, "logits_spec", finding)
    return found
