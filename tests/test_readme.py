"""What README.md names is there, and its commands have flags that exist."""

import importlib
import re
import shlex

import pytest

from clover_jax.cli.command_flags import parse_flags
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
TREE = README.split("## What is where")[1].split("```")[1]
COMMANDS = [
    words
    for line in README.replace("\\\n", " ").splitlines()
    if "-m clover_jax." in line and (words := shlex.split(line, comments=True))[1:2] == ["-m"]
]


def test_the_tree_names_everything_that_lies_in_the_package():
    inside = TREE.split("\nclover_jax/\n")[1].split("\nexperiments/")[0]
    names = re.findall(r"^  (\S+(?: \S+)*)", inside, re.MULTILINE)  # two blanks end the names
    named = {name.rstrip("/") for line in names for name in line.split()}
    there = {path.name for path in (REPOSITORY / "clover_jax").iterdir()}
    assert named == there - {"__init__.py", "__pycache__"}


def test_every_link_to_a_file_leads_to_one():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[2].split(".")[1])
def test_every_command_parses(words):
    parse_flags(importlib.import_module(words[2]).define_flags, words[3:])
