"""Make prompts that ask for a text again with one name changed, as who edits a file would.

    python experiments/copying_prompts.py OUTPUT.jsonl [ROWS.jsonl.xz]

Code: functions of Python's standard library, 12 to 40 lines long and two of a module at most, whose
most used variable gets another name. Stories: the first 1200 characters of answers of the kind
"story" in a file of rows such as erikhyrkas/snakes, whose most used capitalized word is changed. 40
of each.

A prompt has the text, says what to change, and begins the changed text; `response` is the rest of
it. `generate` and `evaluate --prompts` continue the prompts.
"""

import ast
import collections
import importlib.util
import itertools
import json
import lzma
import re
import sys
import textwrap
from pathlib import Path

COUNT, FROM_MODULE = 40, 2  # rows of a category, functions of a module
CHARACTERS = 1200  # of a story


def sources():
    """Yield the source of the library's modules, in the order of their names."""
    for name in sorted(sys.stdlib_module_names):
        found = importlib.util.find_spec(name)  # without running the module
        if found is not None and found.origin and found.origin.endswith(".py"):
            yield Path(found.origin).read_text(encoding="utf-8")


def functions(source):
    """Yield the functions of a module, each as its tree and its text."""
    for node in ast.walk(ast.parse(source)):
        lines = source.splitlines()[node.lineno - 1 : node.end_lineno] if is_def(node) else []
        if 12 <= len(lines) <= 40:
            yield node, textwrap.dedent("\n".join(lines))


def is_def(node):
    return isinstance(node, ast.FunctionDef)


def most_used(words):
    """Return the word that is there most often, the first among equals; None for fewer than 4."""
    common = collections.Counter(words).most_common(1)
    return common[0][0] if common and common[0][1] >= 4 else None


def code_rows():
    """Yield rows that ask for a function with another name of a variable."""
    for source in sources():
        yield from itertools.islice(map(renamed, filter(variable, functions(source))), FROM_MODULE)


def variable(function):
    """Return a function's most used variable, unless an attribute has the same name."""
    node, text = function
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    stored = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    name = most_used([n.id for n in names if n.id in stored])
    return None if name is None or re.search(rf"\.{name}\b", text) else name


def renamed(function):
    """Return the row of a function."""
    name, text = variable(function), function[1]
    new = f"the_{name}"
    asked = f"{text}\n\n\n# The same function, with {name} called {new}:\n\n"
    return row("rename code", asked, re.sub(rf"\b{name}\b", new, text))


def story_rows(path):
    """Yield rows that ask for the beginning of a story with another name of a character."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            told = json.loads(line)
            if told.get("kind") != "story":
                continue
            text = told["response"][:CHARACTERS].rpartition(".")[0] + "."
            # A word in the middle of a sentence.
            name = most_used(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,}\b", text))
            if name is None:
                continue
            asked = f"{text}\n\nThe same story, with {name} called Rosalind:\n\n"
            yield row("rename story", asked, re.sub(rf"\b{name}\b", "Rosalind", text))


def row(category, asked, changed):
    """Return a prompt row; its prompt ends after the first three words of the changed text."""
    begun = re.match(r"(\S+\s+){3}\S*", changed)[0]
    return {"category": category, "prompt": asked + begun, "response": changed[len(begun) :]}


def main(output, stories=None):
    """Write the rows."""
    categories = [code_rows()] + ([story_rows(stories)] if stories else [])
    with open(output, "w", encoding="utf-8") as file:
        for rows in categories:
            for made in itertools.islice(rows, COUNT):
                file.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
