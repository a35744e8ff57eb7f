"""The built-in corpus: what is in it, what is held out, what is left out."""

import pytest

from clover_jax.data.corpus import HELDOUT_FRACTION, Document, builtin_documents, is_heldout
from clover_jax.errors import UserError

BODY = "def double(number):\n    return number + number\n" * 8


def write(root, name, text=BODY, encoding="utf-8"):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding=encoding)


def names(documents):
    return [document.name for document in documents]


def both_splits(root):
    found = []
    for split in ("train", "heldout"):
        try:
            found += builtin_documents(split, root=root)
        except UserError:
            continue  # a small tree may have no module of a split
    return sorted(found)


def numbered_tree(root, count=60):
    for number in range(count):
        write(root, f"package{number % 3}/module{number}.py", BODY + f"# {number}\n")


def test_splits_are_disjoint_sorted_and_cover_the_tree(tmp_path):
    numbered_tree(tmp_path)
    train = names(builtin_documents("train", root=tmp_path))
    heldout = names(builtin_documents("heldout", root=tmp_path))
    assert not set(train) & set(heldout)
    assert len(train) + len(heldout) == 60
    assert train == sorted(train)
    assert heldout == sorted(heldout)


def test_same_tree_gives_the_same_documents(tmp_path):
    numbered_tree(tmp_path / "a")
    numbered_tree(tmp_path / "b")
    assert builtin_documents("train", root=tmp_path / "a") == builtin_documents(
        "train", root=tmp_path / "b"
    )


def test_held_out_modules_never_change():
    assert [
        n for n in ("opcode.py", "textwrap.py", "json/decoder.py", "token.py") if is_heldout(n)
    ] == ["opcode.py", "token.py"]
    share = sum(is_heldout(f"module{number}.py") for number in range(10_000)) / 10_000
    assert share == pytest.approx(HELDOUT_FRACTION, abs=0.01)


def test_leaves_out_what_is_no_source_text(tmp_path):
    write(tmp_path, "good.py")
    write(tmp_path, "site-packages/other.py")
    write(tmp_path, "encodings/table.py")
    write(tmp_path, "__pycache__/cached.py")
    write(tmp_path, "_sysconfigdata_linux.py")
    write(tmp_path, "broken.py", "def f(:\n" * 40)
    write(tmp_path, "latin.py", "# -*- coding: latin-1 -*-\nname = 'é'\n" * 20, "latin-1")
    write(tmp_path, "numbers.py", "TABLE = [\n" + "    123456, 654321,\n" * 100 + "]\n")
    write(tmp_path, "tiny.py", "x = 1\n")
    write(tmp_path, "huge.py", "# comment\n" * 50_000)
    write(tmp_path, "repeat.py")
    assert names(both_splits(tmp_path)) == ["good.py"]


def test_removes_byte_order_marks_and_carriage_returns(tmp_path):
    (tmp_path / "windows.py").write_bytes(b"\xef\xbb\xbf" + BODY.replace("\n", "\r\n").encode())
    assert both_splits(tmp_path) == [Document("windows.py", BODY)]


def test_reads_the_standard_library_of_this_python():
    heldout = builtin_documents("heldout")
    assert len(heldout) > 10
    assert all(is_heldout(document.name) for document in heldout)
    assert "opcode.py" in names(heldout)


def test_says_what_to_do_without_sources(tmp_path):
    with pytest.raises(UserError, match="install Python's full standard library"):
        builtin_documents("train", root=tmp_path)


def test_says_when_a_package_is_missing(tmp_path):
    with pytest.raises(UserError, match="'no_such_package' is not installed"):
        builtin_documents("train", root=tmp_path, packages=["no_such_package"])
