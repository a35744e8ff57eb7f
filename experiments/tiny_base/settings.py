"""The flags of `pretrain`; nothing here imports JAX, so that `--help` answers at once."""

from __future__ import annotations

import dataclasses
import functools

from clover_jax.config import BaseConfig, JsonConfig
from clover_jax.errors import UserError
from clover_jax.field_types import setting

# The stream is cut and shuffled in blocks of this size; shorter windows are parts of a block.
BLOCK = 1024

_count = functools.partial(setting, least=1)


@dataclasses.dataclass(frozen=True)
class PretrainConfig(JsonConfig):
    """How to train; the model's shape is a BaseConfig.

    tokens_per_part: gradients are summed over parts of a step, so that activations stay in cache.
    lengths: window lengths, short ones first: attention is cheaper and the early loss needs none.
    length_starts: progress (0 to 1) at which each length takes over; the first is 0.
    warmup: part of the run with rising rate, after which it falls linearly to zero.
    """

    seed: int = setting(0, "the seed of everything random")
    steps: int = setting(2000, "optimizer steps", least=1)
    minutes: float = setting(
        0.0, "time budget; the schedule ends with it if before --steps. 0: none"
    )
    tokens_per_step: int = setting(8192, "tokens of an optimizer step", least=1)
    learning_rate: float = setting(0.02, "Muon's peak learning rate")
    embedding_learning_rate: float = setting(0.004, "Adam's, for embeddings")
    weight_decay: float = setting(0.05, "decoupled weight decay of matrices")
    tokens_per_part: int = 2048
    lengths: tuple[int, ...] = (256, 512, 1024)
    length_starts: tuple[float, ...] = (0.0, 0.5, 0.85)
    warmup: float = 0.03

    def __post_init__(self):
        if self.tokens_per_step % BLOCK or self.tokens_per_step % self.tokens_per_part:
            raise UserError(
                f"tokens_per_step ({self.tokens_per_step}) must be a multiple of {BLOCK} and of "
                f"tokens_per_part ({self.tokens_per_part})"
            )
        if not self.learning_rate > 0:  # Adam's rate is kept as a multiple of it
            raise UserError(f"learning_rate ({self.learning_rate}) must be positive")
        if len(self.lengths) != len(self.length_starts) or self.length_starts[0] != 0:
            raise ValueError(
                f"length_starts {self.length_starts} must give a start for each of the lengths "
                f"{self.lengths}, the first 0"
            )

    def length_at(self, progress: float) -> int:
        """Return the window length at a progress from 0 to 1."""
        started = sum(start <= progress for start in self.length_starts)
        return self.lengths[started - 1]

    def rate_at(self, progress: float) -> float:
        """Return the learning rate relative to the peak: linear up, then linear down to zero."""
        if progress < self.warmup:
            return max(progress, 0.002) / self.warmup
        return max(0.0, 1 - progress) / (1 - self.warmup)


@dataclasses.dataclass(frozen=True)
class PretrainOptions:
    """The flags beside those of `PretrainConfig`: sources, the shape of the base, files."""

    output: str | None = setting(None, "folder to write the base to [WORKDIR/base]")
    overwrite: bool = setting(False, "replace what is at --output")
    workdir: str | None = setting(None, "folder for checkpoints and metrics [runs/<flagfile stem>]")
    sources: str | None = setting(None, "folder of Python sources [the standard library]")
    packages: tuple[str, ...] = setting(
        (), "installed packages to learn from too, separated by commas"
    )
    vocab_size: int = _count(2048, "tokens of the BPE vocabulary")
    hidden_size: int = _count(256, "width of the decoder")
    intermediate_size: int = _count(768, "width of its MLPs")
    num_layers: int = _count(4, "decoder layers")
    num_heads: int = _count(4, "query heads")
    num_kv_heads: int = _count(2, "key/value heads")
    log_every: int = _count(20, "steps between rows of metrics.jsonl")
    checkpoint_every: int = _count(100, "steps between checkpoints")
    prompts: int = setting(200, "held-out prompts to ship with the base")

    def base_config(self) -> BaseConfig:
        """Return the shape that is asked for; the tokenizer may be smaller than it allows."""
        if self.hidden_size % (2 * self.num_heads):
            raise UserError(
                f"--hidden_size ({self.hidden_size}) must be an even multiple of --num_heads "
                f"({self.num_heads})"
            )
        try:
            return BaseConfig(
                vocab_size=self.vocab_size,
                hidden_size=self.hidden_size,
                intermediate_size=self.intermediate_size,
                num_layers=self.num_layers,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.hidden_size // self.num_heads,
                max_position_embeddings=BLOCK,
                tie_word_embeddings=True,
                bos_token_id=0,
                eos_token_ids=(1,),
            )
        except ValueError as error:
            raise UserError(str(error)) from error
