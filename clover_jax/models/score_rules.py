"""Rules for attention scores in addition to rotation and mask.

A sliding window hides what lies too far back; ALiBi lowers a score by a slope times the distance; a
soft cap keeps scores within bounds. Most models have none of these, nor a trace of them.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from clover_jax.array_types import Array, Float, Int
from clover_jax.config import LayerConfig

MASKED = -1e30  # not -inf: a fully masked chunk must not give NaN


@dataclasses.dataclass(frozen=True)
class ScoreRules:
    """The rules of one layer, and the positions of the queries.

    positions: [B, T] absolute positions of the queries.
    window: positions that a query sees, its own included; None hides nothing.
    slopes: [K, G] of ALiBi, by key head and query head; None adds nothing.
    scale, cap: of the scores, as `LayerConfig` has them.
    sinks: [K, G] an additional score for each query head, without a value.
    """

    positions: Int[Array, "B T"]
    window: int | None = None
    slopes: np.ndarray | None = None
    scale: float | None = None
    cap: float | None = None
    sinks: Float[Array, "K G"] | None = None

    @classmethod
    def of(
        cls, cfg: LayerConfig, positions: Int[Array, "B T"], sinks: Array | None = None
    ) -> ScoreRules | None:
        """Return the rules of a layer; None where it has none."""
        slopes = None
        if cfg.alibi:
            # By key head and the query heads that share it, as scores have them.
            slopes = alibi_slopes(cfg.num_heads).reshape(cfg.num_kv_heads, -1)
        rules = cls(positions, cfg.sliding_window, slopes, cfg.score_scale, cfg.score_cap, sinks)
        return None if rules._is_empty else rules

    def within(self, span: int) -> ScoreRules | None:
        """Return the rules that matter where no two positions lie `span` or more apart."""
        # A window that hides nothing need not be tested.
        window = None if self.window is None or self.window >= span else self.window
        rules = dataclasses.replace(self, window=window)
        return None if rules._is_empty else rules

    def by_distance(
        self, scores: Float[Array, "B K G T S"], key_positions: Int[Array, "*b S"]
    ) -> Float[Array, "B K G T S"]:
        """Return scores lowered by the slopes, and MASKED where a key lies beyond the window."""
        if self.slopes is not None:
            distance = self._back(key_positions).astype(jnp.float32)
            scores = scores + jnp.multiply(-self.slopes[:, :, None, None], distance)
        if self.window is not None:
            scores = jnp.where(self._back(key_positions) < self.window, scores, MASKED)
        return scores

    def first_needed(self, length: Int[Array, " B"]) -> Int[Array, ""] | int:
        """Return a committed position before which no query of any row looks."""
        if self.window is None:
            return 0
        # A row without committed positions looks at none, and others need not read them for it.
        shortest = jnp.min(jnp.where(length > 0, length, jnp.iinfo(length.dtype).max))
        return jnp.maximum(shortest - self.window + 1, 0)

    @property
    def _is_empty(self) -> bool:
        # Most models have no rule: None in place of rules leaves no trace in their programs.
        rules = (self.window, self.slopes, self.scale, self.cap, self.sinks)
        return all(rule is None for rule in rules)

    def _back(self, key_positions: Int[Array, "*b S"]) -> Int[Array, "B 1 1 T S"]:
        # [B, T, S]; the return adds axes for K and G.
        back = self.positions[:, :, None] - key_positions[..., None, :]
        return back[:, None, None]


def scaled(
    products: Float[Array, "*b"], head_dim: int, rules: ScoreRules | None
) -> Float[Array, "*b"]:
    """Return the scores that products of queries and keys give, before any mask."""
    scale = None if rules is None else rules.scale
    scores = products * (head_dim**-0.5 if scale is None else scale)
    return scores if rules is None else soft_cap(scores, rules.cap)


def soft_cap(x: Float[Array, "*b"], cap: float | None) -> Float[Array, "*b"]:
    """Return cap * tanh(x / cap), which keeps the order of x; x itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return the [num_heads] slopes of ALiBi, as Bloom and Baichuan-13B choose them.

    For a power of two n they are 2^(-8/n), 2^(-16/n), ..; other counts take the slopes of the power
    of two below and every other slope of the one above (Press et al., arXiv 2108.12409).

    Example: 4 heads have 1/4, 1/16, 1/64, 1/256; of 6 heads the last two have 1/2 and 1/8.
    """
    # The power of two below the count, then every other slope of the one above.
    below = 2 ** int(np.log2(num_heads))
    steps = np.arange(1, below + 1) * 8 / below
    further = np.arange(1, 2 * (num_heads - below), 2) * 4 / below
    return (2.0 ** -np.concatenate([steps, further])).astype(np.float32)
