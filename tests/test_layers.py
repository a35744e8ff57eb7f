"""The table of layers in WORKSPACE.md is what the imports are."""

import ast
import re
from fnmatch import fnmatch

import pytest

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "clover_jax"
MODULES = sorted(
    path.relative_to(PACKAGE).with_suffix("").as_posix()
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
)


@pytest.fixture(scope="module")
def layers():
    """Return the patterns of every line of the table, from the commands down."""
    page = (REPOSITORY / "WORKSPACE.md").read_text()
    table = page.split("| layer | where |")[1].split("\n\n")[0]
    rows = [line.split("|")[2] for line in table.splitlines()[2:]]
    return [re.findall(r"[\w/*]+", " ".join(re.findall("`([^`]*)`", row))) for row in rows]


def layer_of(module, layers):
    """Return the number of a module's line; a whole name goes before a folder's star."""
    for pattern in (module, f"{module.split('/')[0]}/*"):
        found = [i for i, patterns in enumerate(layers) if pattern in patterns]
        if found:
            return found[0]
    raise AssertionError(f"clover_jax/{module}.py is in no line of the table")


def imported(module):
    """Yield the modules of the package that a module imports, inside functions too."""
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clover_jax"):
            prefix = node.module.split(".")[1:]
            names = ["/".join([*prefix, alias.name]) for alias in node.names]
            found = {name if name in MODULES else "/".join(prefix) for name in names}
            yield from found & {*MODULES}


def test_a_lower_layer_never_imports_a_higher_one(layers):
    for module in MODULES:
        here = layer_of(module, layers)
        for other in imported(module):
            assert layer_of(other, layers) >= here, f"{module} imports {other}"


def test_every_name_in_the_table_is_there(layers):
    for pattern in (pattern for patterns in layers for pattern in patterns):
        assert any(fnmatch(module, pattern) for module in MODULES), pattern
