"""From settings to the parts of a run, each checked before anything is trained."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, NamedTuple

from clover_jax.config import RopeConfig
from clover_jax.data.chat_templates import template_notice, with_chat_template
from clover_jax.data.pipeline import PipelineConfig
from clover_jax.data.samples import RecordSamples
from clover_jax.data.training_data import TrainingData, load_training_data
from clover_jax.decoding.adaptive_tree import AdaptiveTree
from clover_jax.decoding.step import check_tree
from clover_jax.decoding.tree import TreeConfig, default_tree, parse_tree
from clover_jax.drafters import registry
from clover_jax.drafters.registry import DraftHead
from clover_jax.errors import UserError
from clover_jax.pretrained.base import BaseModel
from clover_jax.pretrained.fingerprint import BaseFingerprint, differences, fingerprint
from clover_jax.pretrained.loading import load_base
from clover_jax.pretrained.shapes import shape_notice
from clover_jax.runtime.dtypes import resolve_dtype
from clover_jax.runtime.progress import passing_note
from clover_jax.sharding.meshes import AnyMesh, shape_of
from clover_jax.sharding.placement import place_on
from clover_jax.tokenizers.tokenizer import load_tokenizer
from clover_jax.training.decoding_eval import DecodingEvaluator, evaluation_prompts
from clover_jax.training.draft_vocabulary import reduce_vocabulary
from clover_jax.training.drafter_options import parse_drafter_options
from clover_jax.training.optimizer import OptimizerConfig
from clover_jax.training.settings import TrainSettings
from clover_jax.training.teacher import stored_names

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from transformers import PreTrainedTokenizerBase


class Parts(NamedTuple):
    """What a run is made of.

    draft_vocab_coverage: share of the training data's tokens that the head can propose; None
        where that is the whole vocabulary.
    tree: what the head is decoded with.
    evaluator: None when nothing is to be measured.
    mesh: the devices that the base is split over; None: all is on one.
    """

    base: BaseModel
    base_fingerprint: BaseFingerprint
    tokenizer: PreTrainedTokenizerBase | None
    data: TrainingData
    head: DraftHead
    draft_vocab_coverage: float | None
    optimizer: OptimizerConfig
    pipeline: PipelineConfig
    tree: TreeConfig | AdaptiveTree
    evaluator: DecodingEvaluator | None
    mesh: Mesh | None = None

    @property
    def identity(self) -> dict[str, str]:
        """Flag name -> hash of what it names."""
        return {"base": self.base_fingerprint.lm_head, "data": self.data.hash}


def load_parts(settings: TrainSettings, mesh: Mesh | None = None) -> Parts:
    """Load and check everything; what loads slowest comes last.

    mesh: the base is read straight into its shards; None puts it on one device.

    Raises UserError for whatever cannot work.
    """
    tree = parse_tree(settings.tree) if settings.tree else None  # before anything large is read
    check_rows(settings, mesh)
    optimizer = optimizer_config(settings)
    with passing_note(f"loading {settings.base}"):
        dtype = resolve_dtype(settings.dtype)
        base = load_base(settings.base, dtype, place_on(mesh, dtype) if mesh else None)
        tokenizer = with_chat_template(load_tokenizer(base.directory), settings.chat_template)
    base_fingerprint = fingerprint(base)
    if notice := shape_notice(settings.base):
        print(notice, file=sys.stderr, flush=True)
    head = make_head(settings, base)
    tree = tree or parse_tree(default_tree(head.config.max_depth))
    check_tree(head, tree)
    pipeline = pipeline_config(settings, base, head)
    with passing_note(f"reading {settings.data}"):
        data = open_data(settings, base, base_fingerprint, tokenizer, head)
    # Of a prepared folder `prepare` has said it.
    records = data.samples.sections if isinstance(data.samples, RecordSamples) else ()
    if notice := template_notice(records, tokenizer):
        print(notice, file=sys.stderr, flush=True)
    coverage = None
    if settings.draft_vocab is not None:
        head, coverage = reduce_vocabulary(
            head, settings.draft_vocab, base, tokenizer, data.tokens_only
        )
    evaluator = None
    if settings.eval_every:
        prompts = evaluation_prompts(
            settings.eval_prompts, data.heldout, base, tokenizer, settings.eval_num_prompts
        )
        evaluator = DecodingEvaluator(
            base, head, tree, prompts, settings.eval_max_new_tokens, mesh=mesh
        )
    return Parts(
        base=base,
        base_fingerprint=base_fingerprint,
        tokenizer=tokenizer,
        data=data,
        head=head,
        draft_vocab_coverage=coverage,
        optimizer=optimizer,
        pipeline=pipeline,
        tree=tree,
        evaluator=evaluator,
        mesh=mesh,
    )


def open_data(
    settings: TrainSettings,
    base: BaseModel,
    base_fingerprint: BaseFingerprint,
    tokenizer: PreTrainedTokenizerBase | None,
    head: DraftHead,
) -> TrainingData:
    """Return the data, with activations where the teacher is a cached one.

    Raises UserError where they are missing or another base's.
    """
    names = stored_names(head.config.features) if settings.teacher == "cached" else ()
    data = load_training_data(
        settings.data,
        tokenizer,
        base.config.vocab_size,
        settings.seq_len,
        names,
        base.config.eos_token_ids,
    )
    if names:
        theirs = BaseFingerprint.from_dict(data.samples.hidden_made_from["base"])
        found = differences(theirs, base_fingerprint)
        if found:
            listed = ", ".join(
                f"{name} {str(a)[:12]} against {str(b)[:12]}" for name, (a, b) in found.items()
            )
            raise UserError(
                f"the activations in {settings.data} are of another base than {base.source}: "
                f"{listed}; give the base they were made with, or --teacher=online"
            )
    return data


def make_head(settings: TrainSettings, base: BaseModel) -> DraftHead:
    """Return the head that the settings describe, without params.

    Raises UserError for a setting that this kind of drafter does not have or cannot take.
    """
    options = parse_drafter_options(settings.drafter_options or "", settings.drafter)
    for name in ("num_positions", "num_augmenting_layers"):
        if getattr(settings, name) is not None:
            if name in options:
                raise UserError(f"give --{name} or {name} in --drafter_options, not both")
            options[name] = getattr(settings, name)
    if settings.draft_rope_theta is not None:
        options["rope"] = RopeConfig(theta=settings.draft_rope_theta)
    try:
        config = registry.config_for_base(settings.drafter, base.config, **options)
        config = dataclasses.replace(config, loss=settings.loss(config.loss))
    except UserError as error:
        raise UserError(f"--drafter={settings.drafter}: {error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
    return registry.head(config)


def optimizer_config(settings: TrainSettings) -> OptimizerConfig:
    """Return the optimiser's settings; a warm-up longer than the run is shortened to it.

    Raises UserError for impossible values.
    """
    try:
        return OptimizerConfig(
            steps=settings.steps,
            learning_rate=settings.learning_rate,
            warmup_steps=min(settings.warmup_steps, settings.steps),
            schedule=settings.schedule,
            b2=settings.adam_b2,
            weight_decay=settings.weight_decay,
            clip_value=settings.clip_value,
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def check_rows(settings: TrainSettings, mesh: AnyMesh | None) -> None:
    """Raise UserError where a batch does not give every device rows for every part of it."""
    parts = settings.gradient_accumulation_steps
    shards = shape_of(mesh).num_row_shards if mesh else 1
    if settings.batch_size % (parts * shards):
        split = f"data x fsdp = {shards} of the mesh"
        if parts > 1:
            split = f"--gradient_accumulation_steps={parts} x {split} = {parts * shards}"
        raise UserError(
            f"--batch_size={settings.batch_size} must be divisible by {split}, so that every "
            "device gets as many rows"
        )


def pipeline_config(settings: TrainSettings, base: BaseModel, head: DraftHead) -> PipelineConfig:
    """Return the shapes of the batches.

    Raises UserError for rows too short for every draft position or longer than the base's context.
    """
    shortest, longest = head.config.num_positions + 1, base.config.max_position_embeddings
    if not shortest <= settings.seq_len <= longest:
        raise UserError(
            f"--seq_len={settings.seq_len} must lie between {shortest} (num_positions + 1) and "
            f"{longest}, the base's context"
        )
    return PipelineConfig(settings.batch_size, settings.seq_len, settings.seed)
