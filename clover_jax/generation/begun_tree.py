"""The tree of a row file that was begun: with `--tree=auto` it goes on with that one.

What pays is measured, and may be another tree after an update or on another machine; the rest of
the rows must not be refused for that.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from clover_jax.decoding.tree import AUTO, TreeConfig, parse_tree
from clover_jax.errors import UserError
from clover_jax.generation.models import Models
from clover_jax.json_files import read_json_object
from clover_jax.row_writer import manifest_path


def with_tree_of(rows: Path, models: Models) -> Models | None:
    """Return the models with the tree that a row file was begun with; None where there is no file.

    Without a draft where it was plain decoding that paid. Says so on stderr. What is wrong with the
    file is for `RowWriter` to say.
    """
    name = _recorded(rows)
    if name is None:
        return None
    print(f"{rows} was begun with the tree {name}, and goes on with it", file=sys.stderr)
    tree = parse_tree(name)
    if not tree.num_nodes:
        return dataclasses.replace(models, draft=None, tree=tree)
    if isinstance(tree, TreeConfig) and name.startswith("paths:"):
        tree = dataclasses.replace(tree, name=AUTO)  # as it was called when it was chosen
    return dataclasses.replace(models, tree=tree)


def _recorded(rows: Path) -> str | None:
    if not (rows.is_file() and rows.stat().st_size):
        return None
    try:
        settings = read_json_object(manifest_path(rows)).get("settings")
    except UserError:
        return None
    name = settings.get("tree") if isinstance(settings, dict) else None
    return name if isinstance(name, str) else None
