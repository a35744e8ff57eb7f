"""The built-in corpus: Python sources that every machine with Python already has.

Documents are the modules of the interpreter's standard library (and, on request, of installed
packages). Which modules are held out depends on a hash of a module's relative path alone, so every
machine and every Python version agrees about a module that both have.
"""

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from clover_jax.errors import UserError

Split = Literal["train", "heldout"]

HELDOUT_FRACTION = 0.05

# Directories whose files are generated, are data for tests, or belong to other projects.
_SKIPPED_DIRECTORIES = frozenset(
    {
        "__pycache__",
        "site-packages",
        "dist-packages",
        "encodings",
        "pydoc_data",
        "lib-dynload",
        "cjkencodings",
        "data",
    }
)
_SKIPPED_FILES = re.compile(r"^(_sysconfigdata.*|sre_constants|.*_pb2)\.py$")
_MAX_BYTES = 400_000
_MIN_BYTES = 200
# Tables of numbers, hex strings and escapes: more digits and backslashes than prose or code has.
_MAX_TABLE_FRACTION = 0.25


class Document(NamedTuple):
    """One module: its path relative to the library, with forward slashes, and its source."""

    name: str
    text: str


def builtin_documents(
    split: Split = "train", *, root: Path | str | None = None, packages: Iterable[str] = ()
) -> list[Document]:
    """Return the modules of a split, "train" or "heldout" (about 5 %), sorted by name.

    root: the library tree to read; the running interpreter's standard library by default.
    packages: names of installed packages to add, e.g. ("numpy",).
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split ({split!r}) must be 'train' or 'heldout'")

    root = Path(root or sysconfig.get_path("stdlib"))
    documents = list(_read_tree(root, "", split))
    for package in packages:
        folder = Path(sysconfig.get_path("purelib")) / package
        if not folder.is_dir():
            raise UserError(f"package {package!r} is not installed: {folder} is not a directory")
        documents.extend(_read_tree(folder, package + "/", split))
    if not documents:
        raise UserError(
            f"{root} holds no Python sources for the split {split!r}; minimal installs leave them "
            "out: install Python's full standard library, or name a folder of other sources"
        )
    # By name, so that the order is the same on every machine. A module that lies in two places is
    # one text to learn from.
    first: dict[str, Document] = {}
    for document in sorted(documents):
        first.setdefault(document.text, document)
    return list(first.values())


def is_heldout(name: str) -> bool:
    """Whether the module of this relative path is held out, the same everywhere and for ever."""
    # A hash by Python's own `hash` would differ from run to run.
    digest = hashlib.sha256(name.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") < HELDOUT_FRACTION * 2**64


def _read_tree(root: Path, prefix: str, split: Split) -> Iterator[Document]:
    """Yield the usable modules of one split under `root`."""
    for path in root.rglob("*.py"):
        place = path.relative_to(root)
        name = prefix + place.as_posix()
        # By name and size alone: what is left out is not even read.
        if not _SKIPPED_DIRECTORIES.isdisjoint(place.parts[:-1]) or _SKIPPED_FILES.match(path.name):
            continue
        if is_heldout(name) != (split == "heldout") or not path.is_file():
            continue
        if _MIN_BYTES <= path.stat().st_size <= _MAX_BYTES:
            text = _read_module(path)
            if text is not None:
                yield Document(name, text)


def _read_module(path: Path) -> str | None:
    """Read a module with "\\n" line ends, or None if it is not UTF-8, not Python, or a table."""
    try:
        text = path.read_text(encoding="utf-8").removeprefix("\ufeff")
        parse_module(text)
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
        # Test libraries hold files that are broken on purpose; they teach no language.
        return None
    table_like = len(re.findall(r"[0-9\\]", text)) / len(text)
    return None if table_like > _MAX_TABLE_FRACTION else text


def parse_module(text: str) -> ast.Module:
    """Parse a module without the warnings that its own author should have seen."""
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(text)
