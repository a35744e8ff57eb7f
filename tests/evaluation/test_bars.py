"""Progress bars of `evaluate`."""

from clover_jax.evaluation import accuracy
from clover_jax.runtime.progress import progress_bar
from tests.evaluation.command import run, write_rows


def test_no_bar_counts_compilation(folder, monkeypatch):
    clocks = {}

    def with_its_clock(total, desc, unit, *, compiling=None, **options):
        clocks[desc] = compiling
        return progress_bar(total, desc, unit, compiling=compiling, **options)

    for module in ("passes", "run"):
        monkeypatch.setattr(f"clover_jax.evaluation.{module}.progress_bar", with_its_clock)
    accuracy.count_hits.clear_cache()  # another test's program would need no compilation
    write_rows(folder, "single.jsonl", [{"prompt": "he"}])
    one = (f"--drafts=chain={folder / 'work'}", "--tree=chain:2", "--repeats=1")
    assert run(folder, folder / "bars", *one, prompts="single.jsonl").status == 0
    assert clocks.keys() == {"batch size 2", "accuracy"}
    # The heads' programs for accuracy compile while the bar is shown.
    assert clocks["accuracy"].seconds > 0
    assert clocks["batch size 2"] is not None
