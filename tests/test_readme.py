"""What the pages name is there, and their commands have flags that exist."""

import importlib
import re
import shlex

import pytest

from clover_jax.cli.command_flags import parse_flags
from tests.conftest import REPOSITORY

PAGES = sorted(
    [REPOSITORY / "README.md", REPOSITORY / "WORKSPACE.md", *REPOSITORY.glob("experiments/*.md")]
    + list(REPOSITORY.glob("clover_jax/*/README.md"))
)
NAMES = [page.relative_to(REPOSITORY).as_posix() for page in PAGES]


def commands(page):
    """Return the words of every command of ours on a page, each once."""
    lines = page.read_text().replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines if "-m clover_jax." in line]
    return [list(w) for w in dict.fromkeys(map(tuple, words)) if w[:2] == ("python", "-m")]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_to_a_file_leads_to_one(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_python_file_that_a_page_names_is_there(page):
    examples = {"drafters/bigram.py", "utils.py"}
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text())) - examples
    there = [path.as_posix() for path in REPOSITORY.glob("*/**/*.py")]
    missing = {name for name in named if not any(path.endswith(f"/{name}") for path in there)}
    assert missing == set()


@pytest.mark.parametrize(
    "words", [c for page in PAGES for c in commands(page)], ids=lambda words: words[2].split(".")[1]
)
def test_every_command_parses(words):
    parse_flags(importlib.import_module(words[2]).define_flags, words[3:])


def test_the_first_pages_are_short():
    for name, most in (("README.md", 180), ("WORKSPACE.md", 200)):
        assert len((REPOSITORY / name).read_text().splitlines()) <= most, name
