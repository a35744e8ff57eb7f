"""What --overwrite replaces, and what it must leave alone."""

import pytest

from tests.tiny_checkpoints import assert_same_tensors, copy_of


def test_what_is_there_is_replaced_only_when_asked(command, reference, tmp_path):
    arguments = (f"--base={reference / 'base'}", f"--input={reference / 'clover2'}")
    (tmp_path / "out").mkdir()
    status, _, error = command(*arguments, f"--output={tmp_path / 'out'}")
    assert (status, "exists already; give another --output, or --overwrite" in error) == (2, True)
    assert command(*arguments, f"--output={tmp_path / 'out'}", "--overwrite")[0] == 0
    assert (tmp_path / "out" / "draft.json").is_file()


def test_what_is_no_head_is_not_replaced_nor_what_holds_the_input(command, reference, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("years of work")
    base = f"--base={reference / 'base'}"
    flags = (base, f"--input={reference / 'clover2'}", "--overwrite")
    status, _, error = command(*flags, f"--output={tmp_path / 'notes'}")
    assert (status, "is not a draft head, so --overwrite does not delete it" in error) == (
        2,
        True,
    )
    assert (tmp_path / "notes" / "notes.txt").exists()

    work = tmp_path / "work"
    assert command(*flags, f"--output={work / 'draft'}")[0] == 0
    for output in (work, work / "draft"):  # a workdir stands for the head in it
        status, _, error = command(base, f"--input={work}", f"--output={output}", "--overwrite")
        assert (status, "is or holds the input; give another folder" in error) == (2, True)
    assert (work / "draft" / "draft.json").is_file()


def test_a_base_is_not_replaced_by_a_head(command, reference, tmp_path):
    """A base's folder has a config.json as others' heads have; --base itself is refused by name."""
    base, other = (copy_of(reference / "base", tmp_path / name / "base") for name in "ab")
    given = (f"--base={base}", f"--input={reference / 'clover2'}", "--overwrite")
    for output, message in {
        base: "is or holds the base; give another folder",
        base.parent: "is or holds the base; give another folder",
        other: "is not a draft head, so --overwrite does not delete it",
    }.items():
        status, _, error = command(*given, f"--output={output}")
        assert (status, message in error) == (2, True)
        assert_same_tensors(reference / "base", base)
        assert_same_tensors(reference / "base", other)


@pytest.mark.parametrize("name", ["clover2", "eagle1"])
def test_a_head_in_a_layout_of_others_is_replaced_when_asked(command, reference, tmp_path, name):
    out = copy_of(reference / name, tmp_path / "out")
    given = (f"--base={reference / 'base'}", f"--input={reference / 'clover2'}")
    assert command(*given, f"--output={out}", "--overwrite")[0] == 0
    assert (out / "draft.json").is_file()
