"""The package is layered: no folder imports another that imports it, directly or through others."""

import ast

import pytest

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "clover_jax"
MODULES = sorted(PACKAGE.rglob("*.py"))
# A folder of the package, or a module in its root.
UNITS = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES}


def imported_units(source):
    """Return the folders and root modules that a module imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names]
    return {rest[0] for root, *rest in parts if root == "clover_jax" and rest} & UNITS


def reachable(imports, start):
    seen, pending = set(), [start]
    while pending:
        for other in imports[pending.pop()] - seen:
            seen.add(other)
            pending.append(other)
    return seen


@pytest.fixture(scope="module")
def imports():
    """Return for each unit the units that its modules import, itself left out."""
    found = {unit: set() for unit in UNITS}
    for path in MODULES:
        unit = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        found[unit] |= imported_units(path.read_text()) - {unit}
    return found


def test_no_folder_imports_another_that_imports_it(imports):
    assert {unit for unit in UNITS if unit in reachable(imports, unit)} == set()


def test_the_network_the_heads_and_the_step_know_nothing_of_what_runs_them(imports):
    above = {"training", "evaluation", "serving", "cli", "api"}
    for unit in ("models", "drafters", "checkpoints", "data", "decoding", "runtime"):
        assert reachable(imports, unit) & above == set(), unit
    assert imports["models"] <= {"array_types", "config", "errors", "runtime"}


def test_the_first_screen_is_the_method():
    loose = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert len(loose) <= 14


def test_the_map_names_every_folder():
    page = (REPOSITORY / "WORKSPACE.md").read_text().split("## Map")[1].split("\n## ")[0]
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {folder for folder in folders if f"`{folder}`" not in page} == set()
