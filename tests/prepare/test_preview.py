"""`prepare --preview`: what of a text would count."""

import json

from tests.prepare.prepared_data import SEQ_LEN


def test_preview_marks_what_counts(command, base, data):
    status, out, _ = command("--preview", base=base, data=data, seq_len=SEQ_LEN)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith(f"== {data}:")
    assert lines[0].endswith("to learn, between ⟦ and ⟧")
    assert lines[1].startswith("<s>[user]")
    assert lines[1].index("[assistant]") + len("[assistant]") == lines[1].index("⟦")
    assert json.loads(lines[-1])["looked_at"]["counted"] > 0


def test_preview_is_in_colour_on_a_terminal(command, base, data, monkeypatch):
    monkeypatch.setattr("clover_jax.training.prepare_run.wants_color", lambda file: True)
    _, out, _ = command("--preview", base=base, data=data, seq_len=SEQ_LEN)
    assert "[assistant]\033[0m\033[32m" in out
    assert out.splitlines()[0].endswith("to learn, in green")
    assert "⟦" not in out
