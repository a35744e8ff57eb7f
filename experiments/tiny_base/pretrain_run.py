"""One run of `pretrain`: corpus, tokenizer, training with checkpoints, the finished folder."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from clover_jax.data.corpus import Document, builtin_documents
from clover_jax.errors import UserError
from clover_jax.runtime.files import (
    atomic_file,
    check_replaceable,
    only_process_in,
    read_json_object,
    write_json,
)
from clover_jax.runtime.jsonl import append_row, keep_rows
from clover_jax.runtime.progress import Progress, progress_bar
from experiments.tiny_base.pretrain_card import is_made_here
from experiments.tiny_base.pretrain_export import FinishedRun, export_run
from experiments.tiny_base.pretraining import (
    PretrainState,
    init_state,
    load_state,
    pretrain,
    save_state,
)
from experiments.tiny_base.settings import BLOCK, PretrainConfig, PretrainOptions
from experiments.tiny_base.token_windows import TokenStream
from experiments.tiny_base.tokenizer_training import (
    BOS,
    EOS,
    check_vocab_size,
    encode_texts,
    train_tokenizer,
)

METRICS = "metrics.jsonl"


class Stopped(Exception):
    """The run was asked to stop, and its checkpoint is written."""


class StepLog:
    """Follows a run: progress, rows of metrics.jsonl, checkpoints, the wish to stop."""

    def __init__(
        self, workdir: Path, bar: Progress, log_every: int, save_every: int, stop: threading.Event
    ):
        self.workdir, self.bar, self.stop = workdir, bar, stop
        self.log_every, self.save_every = log_every, save_every
        self._recent: deque[float] = deque(maxlen=log_every)

    def __call__(self, state: PretrainState, loss: float, progress: float) -> None:
        """Take in one step; raises Stopped after saving when the run is to stop."""
        self._recent.append(loss)
        mean = float(np.mean(self._recent))
        self.bar.show(f"loss {mean:.3f}, {100 * progress:.0f} % of the schedule")
        self.bar.update()
        if state.step % self.log_every == 0:
            self._write_row(state, loss, mean)
        if state.step % self.save_every == 0 or self.stop.is_set():
            save_state(checkpoint_path(self.workdir), state)
        if self.stop.is_set():
            raise Stopped

    def _write_row(self, state: PretrainState, loss: float, mean: float) -> None:
        row = {
            "step": state.step,
            "loss": loss,
            f"mean_loss_{self.log_every}": mean,
            "tokens": state.tokens,
            "seconds": round(state.seconds, 1),
        }
        append_row(self.workdir / METRICS, row)


def run_pretraining(
    options: PretrainOptions,
    config: PretrainConfig,
    settings: dict[str, Any],
    workdir: Path,
    stop: threading.Event,
) -> dict[str, Any]:
    """Train, or go on training, and write the base; return what the command reports.

    settings: what the base depends on, by the names of the options.

    Raises:
      UserError: `workdir` holds a run of other settings or another process's, or the settings
        make no model.
    """
    train = builtin_documents("train", root=options.sources, packages=options.packages)
    heldout = builtin_documents("heldout", root=options.sources, packages=options.packages)
    base = options.base_config()
    check_vocab_size(options.vocab_size)
    output = Path(options.output).expanduser() if options.output else workdir / "base"
    # Without --output, a base of this workdir is made anew.
    replaces = options.overwrite or not options.output
    check_replaceable(output, replaces, "base made by pretrain", is_made_here)
    workdir.mkdir(parents=True, exist_ok=True)
    with only_process_in(workdir, "is training", "--workdir"):
        claim_workdir(workdir, settings)
        tokenizer = _tokenizer(workdir / "tokenizer.json", train, options.vocab_size)
        base = dataclasses.replace(
            base,
            vocab_size=tokenizer.get_vocab_size(),
            bos_token_id=tokenizer.token_to_id(BOS),
            eos_token_ids=(tokenizer.token_to_id(EOS),),
        )
        stream = TokenStream(
            encode_texts(tokenizer, [d.text for d in train]),
            bos=base.bos_token_id,
            eos=base.eos_token_ids[0],
            blocks=config.tokens_per_step // BLOCK,
            seed=config.seed,
        )
        state = init_state(base, config)
        if checkpoint_path(workdir).exists():
            state = load_state(checkpoint_path(workdir), state)
        keep_rows(workdir / METRICS, lambda row: row["step"] <= state.step)
        with progress_bar(config.steps, "pretrain", initial=state.step) as bar:
            log = StepLog(workdir, bar, options.log_every, options.checkpoint_every, stop)
            try:
                state = pretrain(base, config, stream, state, log)
            except Stopped:
                return {"workdir": str(workdir), "finished": False}
        save_state(checkpoint_path(workdir), state)
        run = FinishedRun(base, tokenizer, state, stream.num_tokens, train, heldout, settings)
        return export_run(run, output, options.prompts)


def checkpoint_path(workdir: Path) -> Path:
    """Return where a run keeps its last state."""
    return workdir / "state.msgpack"


def claim_workdir(workdir: Path, settings: dict[str, Any]) -> None:
    """Note the settings in the folder.

    Raises:
      UserError: it holds a run of other settings.
    """
    path = workdir / "settings.json"
    if not path.exists():
        write_json(path, settings)
        return
    before = read_json_object(path)
    for name in sorted(settings.keys() | before.keys()):
        if settings.get(name) != before.get(name):
            raise UserError(
                f"{workdir} holds a run with --{name}={before.get(name)}, not "
                f"{settings.get(name)}; use the same settings or another --workdir"
            )


def _tokenizer(path: Path, documents: list[Document], vocab_size: int) -> Tokenizer:
    """Load the run's tokenizer, or train it."""
    if not path.exists():
        tokenizer = train_tokenizer((d.text for d in documents), vocab_size)
        with atomic_file(path) as unfinished:
            tokenizer.save(str(unfinished))
    return Tokenizer.from_file(str(path))
