"""The parts of a step: what they are handed, so that nothing of a step is left out of its time."""

import jax
import pytest

from clover_jax.decoding.models import load
from clover_jax.decoding.spec import ModelSpec
from clover_jax.evaluation import parts


@pytest.fixture(scope="module")
def bench():
    subject = load(
        ModelSpec("shape:64x1x96", draft="random:clover2", tree="chain:1", dtype="float32")
    )
    return parts.Bench(subject, 1, 512, 100)


def test_commit_is_handed_what_it_gathers(bench, monkeypatch):
    handed = []
    commit = parts.commit

    def spied(*arguments, **options):
        handed.append(jax.tree.leaves(arguments))
        return commit(*arguments, **options)

    monkeypatch.setattr(parts, "commit", spied)
    part = parts.stage_parts(bench)["commit"]
    _, record = part.run()
    assert record.accepted.shape == (1,)
    assert len(handed) == 2  # traced to count its work, and to be compiled
    assert all(isinstance(leaf, jax.core.Tracer) for leaves in handed for leaf in leaves)
