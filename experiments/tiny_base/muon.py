"""The optimizer of `pretrain`: Muon for matrices, Adam for everything else."""

from __future__ import annotations

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from clover_jax.array_types import Params

# Our fused kernels as the matrices that they are; axes not named are batches of matrices, so each
# of a group's query, key and value projections is orthogonalised by itself.
MATRICES = {
    "qkv": MuonDimensionNumbers(reduction_axis=0, output_axis=(1, 3)),  # [D, K, G + 2, H]
    "out": MuonDimensionNumbers(reduction_axis=(0, 1, 2), output_axis=3),  # [K, G, H, D]
    "gate_up": MuonDimensionNumbers(reduction_axis=0, output_axis=2),  # [D, 2, F]
    "down": MuonDimensionNumbers(reduction_axis=0, output_axis=1),  # [F, D]
}


def muon(embedding_scale: float, weight_decay: float) -> optax.GradientTransformation:
    """Return Muon at learning rate 1: scale its updates by the rate of the step.

    embedding_scale: Adam's learning rate for embeddings and norms, relative to Muon's.
    weight_decay: decoupled, for the matrices only.
    """
    return optax.contrib.muon(
        learning_rate=1.0,
        weight_decay=weight_decay,
        adam_learning_rate=embedding_scale,
        adam_b1=0.9,
        adam_b2=0.95,
        muon_weight_dimension_numbers=matrix_dimensions,
    )


def matrix_dimensions(params: Params) -> Params:
    """Return which axes of each decoder parameter form a matrix; None where Adam is to work."""
    return jax.tree.map_with_path(lambda path, _: MATRICES.get(path[-1].key), params)
