"""From settings to the head and the inputs of a run, each checked before anything is trained."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from clover_jax.checkpoints.base import (
    BaseFingerprint,
    BaseModel,
    described_differences,
    fingerprint,
)
from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.shapes import shape_notice
from clover_jax.config import BaseConfig, LossSpec, RopeConfig
from clover_jax.data.chat_templates import template_notice, with_chat_template
from clover_jax.data.pipeline import PipelineConfig
from clover_jax.data.prepared import PreparedSamples
from clover_jax.data.samples import Reading, RecordSamples, Samples
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.data.training_data import TrainingData, load_training_data
from clover_jax.decoding.step import check_tree
from clover_jax.decoding.tree_config import Tree, default_tree, parse_tree
from clover_jax.drafters import registry
from clover_jax.drafters.registry import DraftHead
from clover_jax.errors import UserError
from clover_jax.field_types import parse_values
from clover_jax.models.meshes import AnyMesh, shape_of
from clover_jax.models.placement import place_on
from clover_jax.runtime.dtypes import resolve_dtype
from clover_jax.runtime.progress import passing_note, say
from clover_jax.training.decoding_eval import DecodingEvaluator, NoPromptFits, evaluation_prompts
from clover_jax.training.settings import TrainSettings
from clover_jax.training.step import OptimizerConfig, TrainStepConfig
from clover_jax.training.teacher import stored_names

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from transformers import PreTrainedTokenizerBase


def make_head(settings: TrainSettings, base: BaseModel) -> DraftHead:
    """Return the head that the settings describe, without params."""
    if settings.drafter in registry.TRAINING_FREE:
        raise UserError(
            f"--drafter={settings.drafter} has nothing to train; decode with "
            f"--draft={settings.drafter} at once"
        )
    text = settings.drafter_options or ""
    options = registry.parse_options("--drafter_options=", text, settings.drafter)
    # Two options are common enough to have flags of their own.
    for name in ("num_positions", "num_augmenting_layers"):
        if getattr(settings, name) is not None:
            if name in options:
                raise UserError(f"give --{name} or {name} in --drafter_options, not both")
            options[name] = getattr(settings, name)
    if settings.draft_rope_theta is not None:
        options["rope"] = RopeConfig(theta=settings.draft_rope_theta)

        if base.config.alibi:
            raise UserError("--draft_rope_theta: this base has ALiBi, and no rotation")

    # The config finds a wrong value but knows no flags, so its message gets the flag here.
    try:
        config = registry.config_for_base(settings.drafter, base.config, **options)
    except UserError as error:
        raise UserError(f"--drafter={settings.drafter}: {error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
    return registry.head(dataclasses.replace(config, loss=make_loss(settings.loss, config.loss)))


def make_loss(text: str | None, default: LossSpec) -> LossSpec:
    """Return the method's loss, changed by --loss."""
    known = typing.get_type_hints(LossSpec)
    options = parse_values("--loss=", text or "", known, "the loss has no part")
    try:
        loss = dataclasses.replace(default, **options)
    except ValueError as error:
        raise UserError(f"--loss={text}: {error}") from error
    # D-PACE computes the weights of positions itself.
    if "decay" in options and loss.dpace:
        raise UserError(
            f"--loss={text}: decay ({loss.decay}) has no effect with dpace ({loss.dpace}); add "
            "dpace=0"
        )
    return loss


def reduce_vocabulary(
    head: DraftHead,
    size: int,
    base: BaseModel,
    tokenizer: PreTrainedTokenizerBase | None,
    samples: Samples,
) -> tuple[DraftHead, float]:
    """Return the head over the `size` most frequent tokens, and their share of the data; print it.

    Special tokens and those that end a text are always among them: they are rare, and a text that
    cannot be drafted to its end costs a forward more.
    """
    vocab_size = base.config.vocab_size
    with passing_note("counting the tokens of the training data"):
        # How often each token is one that the base is imitated on.
        counts = np.zeros(vocab_size, np.int64)
        for index in range(len(samples)):
            sample = samples[index]
            counts += np.bincount(sample.tokens[sample.loss_mask], minlength=vocab_size)

    special = set(base.config.eos_token_ids) | set(tokenizer.all_special_ids if tokenizer else ())
    # A tokenizer may know tokens that the base has no row for.
    ids, coverage = most_frequent(counts, size, [token for token in special if token < vocab_size])
    say(f"draft vocabulary: {size} of {vocab_size} tokens, {coverage:.2%} of the training data's")
    # The ids fix the shapes of every program of the head, so they are part of its config.
    config = dataclasses.replace(head.config, draft_to_target=ids)
    return registry.head(config), coverage


def most_frequent(
    counts: np.ndarray, size: int, always: Iterable[int] = ()
) -> tuple[tuple[int, ...], float]:
    """Return the ids of the `size` most frequent tokens, ascending, and their share of all counts.

    `always` are among them however rare. Among equally frequent ones the lower id comes first.

    Example: counts [5, 0, 3, 0, 9], size 3, always [1] give ids (0, 1, 4).
    """
    wanted = sorted(set(always))
    if not max(len(wanted), 1) <= size <= len(counts):
        raise UserError(
            f"--draft_vocab={size} must lie between {max(len(wanted), 1)} (the special tokens) "
            f"and {len(counts)}, the base's vocabulary"
        )

    # Stable, so that ties go by id on every machine.
    rank = np.argsort(-counts, kind="stable")
    others = rank[~np.isin(rank, wanted)][: size - len(wanted)]
    ids = np.sort(np.concatenate([np.array(wanted, np.int64), others]))
    # Without a counted token the coverage is 0.
    coverage = counts[ids].sum() / max(counts.sum(), 1)
    return tuple(ids.tolist()), float(coverage)


class TrainInputs(NamedTuple):
    """What a run trains with.

    step: the static part of a training step, head, optimizer and mesh included.
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
        return self.step.head

    @property
    def identity(self) -> dict[str, str | None]:
        """Name -> hash of what the head and the samples depend on; a flag's name if it has one."""
        return {"base": self.base_fingerprint.lm_head} | self.data.identity


def load_inputs(settings: TrainSettings, mesh: Mesh | None = None) -> TrainInputs:
    """Load and check everything; the slowest comes last.

    mesh: the base is read straight into its shards; None puts it on one device.
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
            # Small data may hold out nothing, and can be trained on all the same.
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
    config = base.config
    reading = Reading(tokenizer, config.vocab_size, settings.seq_len, config.eos_token_ids)
    data = load_training_data(settings.data, reading, names)
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
    """Return the optimizer's settings; a warm-up longer than the run is shortened to its length."""
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
    # In a shorter row the last draft position has no pair (`pair_mask`, "decoding").
    shortest, longest = head.config.num_positions + 2, base.config.max_position_embeddings
    if not shortest <= settings.seq_len <= longest:
        raise UserError(
            f"--seq_len={settings.seq_len} must lie between {shortest} (num_positions + 2) and "
            f"{longest}, the base's context"
        )
    return PipelineConfig(settings.batch_size, settings.seq_len, settings.seed)
