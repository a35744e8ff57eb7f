"""What follows pretraining: measure the rounded weights, write the folder and its card."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from tokenizers import Tokenizer

from clover_jax.config import BaseConfig
from clover_jax.data.corpus import Document
from clover_jax.runtime.files import atomic_directory
from experiments.tiny_base.base_folder import round_to_bfloat16, save_base
from experiments.tiny_base.bits_per_byte import HeldoutScore, score_documents
from experiments.tiny_base.function_heads import heldout_prompts
from experiments.tiny_base.pretrain_card import CARD_FILE, CorpusFigures, card_text
from experiments.tiny_base.pretraining import PretrainState
from experiments.tiny_base.tokenizer_training import encode_texts, save_tokenizer


class FinishedRun(NamedTuple):
    """What the export needs to know.

    base, tokenizer, state: the model. epoch_tokens: tokens of the training documents.
    train, heldout: the documents. settings: the command's flags.
    """

    base: BaseConfig
    tokenizer: Tokenizer
    state: PretrainState
    epoch_tokens: int
    train: Sequence[Document]
    heldout: Sequence[Document]
    settings: dict[str, Any]


def export_run(run: FinishedRun, output: Path, num_prompts: int) -> dict[str, Any]:
    """Measure the base on the held-out modules, write its folder, return the figures."""
    params = round_to_bfloat16(run.state.params)
    score = score_documents(
        run.base,
        params,
        encode_texts(run.tokenizer, [d.text for d in run.heldout]),
        _num_bytes(run.heldout),
        bos=run.base.bos_token_id,
        length=run.base.max_position_embeddings,
    )
    figures = _figures(run, score)
    prompts = heldout_prompts(run.heldout, num_prompts)
    with atomic_directory(output) as folder:
        save_base(folder, run.base, params)
        save_tokenizer(run.tokenizer, folder, max_length=run.base.max_position_embeddings)
        rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in prompts)
        (folder / "prompts.jsonl").write_text(rows, encoding="utf-8")
        card = card_text(run.base, _corpus_figures(run), run.settings, figures, len(prompts))
        (folder / CARD_FILE).write_text(card, encoding="utf-8")
    return {"output": str(output), "finished": True} | figures


def _figures(run: FinishedRun, score: HeldoutScore) -> dict[str, Any]:
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(run.state.params)),
        "bits_per_byte": round(score.bits_per_byte, 4),
        "nats_per_token": round(score.nats_per_token, 4),
        "bytes_per_token": round(score.bytes / score.tokens, 3),
        "steps": run.state.step,
        "tokens_read": run.state.tokens,
        "epochs": round(run.state.tokens / run.epoch_tokens, 2),
        "minutes": round(run.state.seconds / 60, 1),
    }


def _corpus_figures(run: FinishedRun) -> CorpusFigures:
    if run.settings.get("sources"):
        source = f"the Python sources of `{Path(run.settings['sources']).name}`"
    else:
        source = f"the standard library of Python {platform.python_version()}"
    if run.settings.get("packages"):
        source += f" and the packages {', '.join(run.settings['packages'])}"
    return CorpusFigures(
        source, len(run.train), _num_bytes(run.train), len(run.heldout), _num_bytes(run.heldout)
    )


def _num_bytes(documents: Sequence[Document]) -> int:
    return sum(len(d.text.encode("utf-8")) for d in documents)
