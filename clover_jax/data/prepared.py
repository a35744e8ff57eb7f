"""A folder that `prepare` made: tokenised samples, perhaps with a teacher's activations.

DIR/train.json    manifest of the training samples, shards train-00000.array_record ...
DIR/heldout.json  the same for those that are never trained on
DIR/hidden.json   manifest of activations: record i belongs to training sample i

Before the first of them, `prepare --regenerate` has DIR/regenerated.jsonl.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.data.chat import Encoded
from clover_jax.data.records import TokenRow
from clover_jax.data.shards import ShardReader, incomplete, is_manifest, pack
from clover_jax.errors import UserError
from clover_jax.runtime.row_writer import manifest_path

TRAIN, HELDOUT, HIDDEN = "train.json", "heldout.json", "hidden.json"
REGENERATED = "regenerated.jsonl"
MAX_HELDOUT_READ = 1000


def is_prepared(spec: str) -> bool:
    """Return whether --data names a folder that `prepare` made, or has begun to make."""
    folder = Path(spec).expanduser()
    # A train.json may be a user's list of rows: only a manifest is ours.
    begun = is_manifest(folder / TRAIN) or is_manifest(folder / HELDOUT)
    return begun or manifest_path(folder / REGENERATED).is_file()


def pack_sample(sample: Encoded) -> bytes:
    """Return a sample's record."""
    return pack({"tokens": sample.tokens, "loss_mask": sample.loss_mask})


class PreparedSamples:
    """Training samples of a prepared folder, with the activations that are asked for."""

    def __init__(self, directory: Path, hidden_names: tuple[str, ...] = ()):
        """Open the folder; raises UserError for what is missing, unfinished or not whole."""
        # `prepare` begins TRAIN after HELDOUT: without it a run was stopped early.
        if not (directory / TRAIN).is_file():
            raise UserError(incomplete(directory))
        if hidden_names and not (directory / HIDDEN).is_file():
            raise UserError(
                f"{directory} has no cached activations; repeat its `prepare` with "
                f"--features={','.join(hidden_names)}, or train with --teacher=online"
            )
        self.directory, self.hidden_names = directory, hidden_names
        self._samples = ShardReader(directory / TRAIN)
        if hidden_names:
            self._check_hidden()

    @functools.cached_property
    def _hidden(self) -> ShardReader:
        # Opened on demand: only a folder with kept activations has this manifest.
        return ShardReader(self.directory / HIDDEN)

    @property
    def made_from(self) -> Mapping[str, Any]:
        """Hashes and settings that the samples depend on."""
        return self._samples.manifest["made_from"]

    @property
    def counts(self) -> Mapping[str, int]:
        """How many samples, tokens and conversations there are; see `SampleCounts`."""
        return self._samples.manifest["counts"]

    @property
    def hidden_made_from(self) -> Mapping[str, Any]:
        """Hashes and settings that the activations depend on."""
        return self._hidden.manifest["made_from"]

    def _check_hidden(self) -> None:
        # A kept activation suits any head that reads it, so more may be there than is asked for.
        there = self.hidden_made_from
        missing = sorted(set(self.hidden_names) - set(there["names"]))
        if missing:
            raise UserError(
                f"{self.directory} has the activations {', '.join(there['names'])}, but not "
                f"{', '.join(missing)}, which the head is trained on; prepare it with "
                f"--features={','.join(self.hidden_names)} --overwrite"
            )
        # Place by place, they belong to the tokens of these very samples.
        differing = [n for n in ("data_hash", "seq_len") if there[n] != self.made_from[n]]
        if differing or len(self._hidden) != len(self._samples):
            raise UserError(
                f"{self.directory / HIDDEN} belongs to other samples than {TRAIN}; repeat the "
                "`prepare` that made them, with --overwrite"
            )

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Encoded:
        """Read a sample; raises UserError where its bytes have changed."""
        sample = self._samples[index]
        return Encoded(sample["tokens"], sample["loss_mask"])

    def hidden(self, index: int) -> dict[str, np.ndarray]:
        """Read a sample's activations; raises UserError where their bytes have changed."""
        record = self._hidden[index]
        return {name: record[name] for name in self.hidden_names}


def heldout_rows(directory: Path) -> list[TokenRow]:
    """Return the held-out samples, each cut in what comes before its first answer and the rest."""
    samples = ShardReader(directory / HELDOUT)
    rows = []
    for index in range(min(len(samples), MAX_HELDOUT_READ)):
        sample = samples[index]
        tokens, mask = sample["tokens"].tolist(), sample["loss_mask"]
        # Without an answer all is prompt; argmax would be 0.
        answer = int(np.argmax(mask)) if mask.any() else len(tokens)
        source = f"{directory / HELDOUT}:{index}"
        rows.append(TokenRow(source, tuple(tokens[:answer]), tuple(tokens[answer:])))
    return rows
