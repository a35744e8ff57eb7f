"""What can be chosen of a Clover-LR head (`clover_lr.py` has the method)."""

from __future__ import annotations

import dataclasses

from clover_jax.config import BaseConfig, DrafterConfig, LossSpec, RopeConfig
from clover_jax.drafters.attention_decoder import check_heads
from clover_jax.drafters.augmenting import check_depth

DEFAULT_RANK = 256
DEFAULT_FEATURES = 3
METHOD_LOSS = LossSpec(regression=1.0, soft_ce=1.0, total_variation=2.0, decay=0.8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloverLRConfig(DrafterConfig):
    """A Clover-LR head.

    rank: r, width of the recurrent state and rank of the correction; 0 drafts without feedback.
    num_augmenting_layers: depth of the Augmenting Block.
    unit_inputs: whether states and tokens are scaled to a mean square of 1 before the head.
    drafted_share: of the tokens fed back in training, those of its own at the end of the run.
    """

    kind: str = "clover_lr"
    rank: int = DEFAULT_RANK
    num_augmenting_layers: int = 2
    unit_inputs: bool = True
    drafted_share: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_depth(self.num_positions, self.num_augmenting_layers)
        if not 0 <= self.rank <= self.layer.hidden_size:
            raise ValueError(
                f"rank ({self.rank}) must lie between 0 and hidden_size ({self.layer.hidden_size})"
            )
        if not 0 <= self.drafted_share <= 1:
            raise ValueError(f"drafted_share ({self.drafted_share}) must lie between 0 and 1")
        if self.drafted_share and not self.rank:
            raise ValueError("rank 0 feeds no token back: drafted_share must be 0")
        if self.features[-1] != "pre_norm":
            raise ValueError(f"the last of the features {self.features} must be pre_norm")
        if self.max_depth != self.num_positions:
            raise ValueError(
                f"max_depth ({self.max_depth}) must be num_positions ({self.num_positions}): the "
                "block proposes no more"
            )
        check_heads(self.layer)


def make_config(
    base: BaseConfig,
    num_positions: int = 5,
    num_augmenting_layers: int = 2,
    rank: int | None = None,
    num_features: int | None = None,
    unit_inputs: bool = True,
    drafted_share: float = 0.0,
    rope: RopeConfig | None = None,
    loss: LossSpec | None = None,
) -> CloverLRConfig:
    """Return the head's config for a base.

    rank: 256, or half the base's width where that is less.
    num_features: 1 reads the base's last state only, more add states entering evenly spaced layers;
        by default 3, or as many as the base has layers.
    Raises ValueError for what no such head can be.
    """
    depth = base.num_layers
    count = min(DEFAULT_FEATURES, depth) if num_features is None else num_features
    if not 1 <= count <= depth:
        raise ValueError(f"num_features ({count}) must lie between 1 and the base's {depth} layers")
    layers = tuple(f"layer_{depth * j // count}" for j in range(1, count))
    return CloverLRConfig(
        layer=dataclasses.replace(base.layer, rope=rope or base.rope),
        vocab_size=base.vocab_size,
        num_positions=num_positions,
        max_depth=num_positions,
        features=(*layers, "pre_norm"),
        rank=min(DEFAULT_RANK, base.hidden_size // 2) if rank is None else rank,
        num_augmenting_layers=num_augmenting_layers,
        unit_inputs=unit_inputs,
        drafted_share=drafted_share,
        loss=loss or METHOD_LOSS,
    )
