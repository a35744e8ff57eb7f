"""From settings to the inputs of a run, each checked before anything is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from clover_jax.checkpoints.base import (
    BaseFingerprint,
    BaseModel,
    described_differences,
    fingerprint,
)
from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.shapes import shape_notice
from clover_jax.config import BaseConfig
from clover_jax.data.chat_templates import template_notice, with_chat_template
from clover_jax.data.pipeline import PipelineConfig
from clover_jax.data.prepared import PreparedSamples
from clover_jax.data.samples import RecordSamples
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.data.training_data import TrainingData, load_training_data
from clover_jax.decoding.step import check_tree
from clover_jax.decoding.tree_config import Tree, default_tree, parse_tree
from clover_jax.drafters.registry import DraftHead
from clover_jax.errors import UserError
from clover_jax.models.meshes import AnyMesh, shape_of
from clover_jax.models.placement import place_on
from clover_jax.runtime.dtypes import resolve_dtype
from clover_jax.runtime.progress import passing_note, say
from clover_jax.training.decoding_eval import (
    DecodingEvaluator,
    NoPromptFits,
    evaluation_prompts,
)
from clover_jax.training.heads import make_head, reduce_vocabulary
from clover_jax.training.optimizer import OptimizerConfig
from clover_jax.training.settings import TrainSettings
from clover_jax.training.step import TrainStepConfig
from clover_jax.training.teacher import stored_names

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from transformers import PreTrainedTokenizerBase


class TrainInputs(NamedTuple):
    """What a run trains with.

    step: the static part of a training step, head, optimiser and mesh included.
    draft_vocab_coverage: share of the training data's tokens that the head can propose; None
        where that is the whole vocabulary.
    tree: what the head is decoded with.
    evaluator: None when tau is not measured.
    """

    base: BaseModel
    base_fingerprint: BaseFingerprint
    tokenizer: PreTrainedTokenizerBase | None
    data: TrainingData
    step: TrainStepConfig
    draft_vocab_coverage: float | None
    pipeline: PipelineConfig
    tree: Tree
    evaluator: DecodingEvaluator | None

    @property
    def head(self) -> DraftHead:
        """The head that is trained, without params."""
        return self.step.head

    @property
    def identity(self) -> dict[str, str | None]:
        """Name -> hash of what the head and the samples depend on; a flag's name if it has one."""
        return {"base": self.base_fingerprint.lm_head} | self.data.identity


def load_inputs(settings: TrainSettings, mesh: Mesh | None = None) -> TrainInputs:
    """Load and check everything; the slowest comes last.

    mesh: the base is read straight into its shards; None puts it on one device.
    Raises UserError for settings that cannot work.
    """
    # First the checks of flags alone, before anything large is read.
    tree = parse_tree(settings.tree) if settings.tree else None
    check_rows(settings, mesh)
    optimizer_config(settings)

    # The base and its tokenizer: head, tree and data are checked against them.
    with passing_note(f"loading {settings.base}"):
        dtype = resolve_dtype(settings.dtype)
        base = load_base(settings.base, dtype, place_on(mesh, dtype))
        tokenizer = with_chat_template(load_tokenizer(base.directory), settings.chat_template)
    base_fingerprint = fingerprint(base)
    say(shape_notice(settings.base))

    # The head's shape, a tree that it can draft, and rows that hold its positions.
    head = make_head(settings, base)
    tree = tree or parse_tree(default_tree(head.config.max_depth))
    check_tree(head, tree)
    pipeline = pipeline_config(settings, base, head)

    with passing_note(f"reading {settings.data}"):
        data = open_data(settings, base, base_fingerprint, tokenizer, head)
    # For a prepared folder `prepare` has printed the notice.
    records = data.samples.sections if isinstance(data.samples, RecordSamples) else ()
    say(template_notice(records, tokenizer))

    # Only now, because the vocabulary is chosen by the tokens of the data.
    coverage = None
    if settings.draft_vocab is not None:
        head, coverage = reduce_vocabulary(
            head, settings.draft_vocab, base, tokenizer, data.tokens_only
        )

    # The evaluation, unless --eval_every is 0.
    evaluator = None
    if settings.eval_every:
        prompts, wanted = [], settings.eval_num_prompts
        try:
            prompts = evaluation_prompts(
                settings.eval_prompts, data.heldout, base, tokenizer, wanted
            )
        except NoPromptFits as error:
            # Small data may hold out nothing, which is no reason not to train on it.
            if settings.eval_prompts is not None:
                raise
            say(f"tau will not be measured: {error}")
        # tau of few prompts is noisy, and the best head is chosen by it.
        if 0 < len(prompts) < wanted:
            kind = "held-out prompts" if settings.eval_prompts is None else "prompts"
            say(f"only {len(prompts)} {kind} fit ({wanted} wanted); pass --eval_prompts")
        if prompts:
            evaluator = DecodingEvaluator(
                base, head, tree, prompts, settings.eval_max_new_tokens, mesh=mesh
            )

    return TrainInputs(
        base=base,
        base_fingerprint=base_fingerprint,
        tokenizer=tokenizer,
        data=data,
        step=step_config(settings, base.config, head, mesh),
        draft_vocab_coverage=coverage,
        pipeline=pipeline,
        tree=tree,
        evaluator=evaluator,
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
    # The activations that `prepare --features` must have kept; an online teacher needs none.
    names = stored_names(head.config.features) if settings.teacher == "cached" else ()
    data = load_training_data(
        settings.data,
        tokenizer,
        base.config.vocab_size,
        settings.seq_len,
        names,
        base.config.eos_token_ids,
    )
    if not names:
        return data

    assert isinstance(data.samples, PreparedSamples)  # others have no activations
    # Another base of the same sizes would train without an error, towards the wrong states.
    theirs = BaseFingerprint.from_dict(data.samples.hidden_made_from["base"])
    if differing := described_differences(theirs, base_fingerprint):
        raise UserError(
            f"the activations in {settings.data} are of another base than {base.source}: "
            f"{differing}; give the base they were made with, or --teacher=online"
        )
    return data


def step_config(
    settings: TrainSettings, base: BaseConfig, head: DraftHead, mesh: AnyMesh | None = None
) -> TrainStepConfig:
    """Return the static part of a training step; raises UserError for impossible values."""
    return TrainStepConfig(
        base,
        head,
        optimizer_config(settings),
        loss_chunk=settings.loss_chunk,
        mesh=mesh,
        accumulation_steps=settings.gradient_accumulation_steps,
        remat=settings.remat,
    )


def optimizer_config(settings: TrainSettings) -> OptimizerConfig:
    """Return the optimiser's settings; a warm-up longer than the run is shortened to its length.

    Raises UserError for impossible values.
    """
    return OptimizerConfig(
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        # The flag's default must not make a shorter run fail.
        warmup_steps=min(settings.warmup_steps, settings.steps),
        schedule=settings.schedule,
        b2=settings.adam_b2,
        weight_decay=settings.weight_decay,
        clip_value=settings.clip_value,
    )


def check_rows(settings: TrainSettings, mesh: AnyMesh | None) -> None:
    """Raise UserError where a part of a batch has no row for some device."""
    parts = settings.gradient_accumulation_steps
    shards = shape_of(mesh).num_row_shards
    if settings.batch_size % (parts * shards):
        # Name only those factors that the user has set.
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
    # In a shorter row the last draft position has no target: its first one is at num_positions.
    shortest, longest = head.config.num_positions + 1, base.config.max_position_embeddings
    if not shortest <= settings.seq_len <= longest:
        raise UserError(
            f"--seq_len={settings.seq_len} must lie between {shortest} (num_positions + 1) and "
            f"{longest}, the base's context"
        )
    return PipelineConfig(settings.batch_size, settings.seq_len, settings.seed)
