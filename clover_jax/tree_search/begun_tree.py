"""The tree of a row file that was begun: with `--tree=auto` it goes on with that one.

What pays is measured, and may be another tree after an update or on another machine; the rest of
the rows must not be refused for that.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from clover_jax.decoding.adaptive_tree import AdaptiveTree
from clover_jax.decoding.tree import TreeConfig, parse_tree
from clover_jax.errors import UserError
from clover_jax.loading.models import Models
from clover_jax.storage.json_files import read_json_object
from clover_jax.storage.row_writer import manifest_path


def with_tree_of(rows: Path, models: Models) -> Models | None:
    """Return the models with the tree that a row file was begun with; None where it has no rows.

    Without a draft where it was plain decoding that paid. Says so on stderr. None as well where its
    manifest names no tree: `RowWriter` says what is wrong with it.
    """
    tree = _recorded(rows)
    if tree is None:
        return None
    print(f"{rows} was begun with the tree {tree.name}", file=sys.stderr, flush=True)
    return dataclasses.replace(models, draft=models.draft if tree.num_nodes else None, tree=tree)


def _recorded(rows: Path) -> TreeConfig | AdaptiveTree | None:
    if not (rows.is_file() and rows.stat().st_size):
        return None
    try:
        return parse_tree(read_json_object(manifest_path(rows))["settings"]["tree"])
    except (UserError, KeyError, TypeError, AttributeError):
        return None
