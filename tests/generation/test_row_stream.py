"""Rows through an engine: what happens before the first."""

from clover_jax.data.prompts import parse_prompt
from clover_jax.generation.row_stream import open_stream
from clover_jax.generation.settings import GenerationSettings
from clover_jax.loading.models import load
from clover_jax.loading.spec import ModelSpec
from clover_jax.runtime.compile_clock import CompileClock
from tests.tiny_folders import save_tiny_base


def test_warming_up_compiles_everything_and_reads_no_prompt(tmp_path, monkeypatch):
    models = load(ModelSpec(str(save_tiny_base(tmp_path / "base")), dtype="float32"))
    prompt = parse_prompt({"prompt_ids": [7] * 100}, index=0, source="here")
    stream = open_stream(models, [prompt], GenerationSettings(max_new_tokens=4))
    engine, starts = stream._engine, []
    read_prompt = engine.read_prompt

    def counted(weights, row, request, start):
        starts.append(start)
        return read_prompt(weights, row, request, start)

    monkeypatch.setattr(engine, "read_prompt", counted)
    stream.warm_up()
    assert starts == [0]
    with CompileClock() as compiling:
        (row,) = [event.row for event in stream if event.row]
    assert (starts, compiling.seconds) == ([0, 0, 64], 0)
    assert len(row["output_ids"]) == 4
