"""A head that learns while it serves: small training steps between chunks of decoding steps.

The texts that are decoded are what the head should have drafted. `Adapter` keeps the latest ones in
a ring and makes training's own step (`step.py`) on some of them, for at most BUDGET of the seconds
that decoding takes: a step is made if one as slow as the slowest so far fits. So a head keeps up
with a base that changes (`sampler.py`), or with a user's texts. Any head gives the base's text, so
this changes speed alone.

The base is run over the texts again instead of keeping the activations that verification had. This
costs a forward over ROWS texts a step, and what the head learns is always the present base's: after
an update, activations of older ones would be of no use. It also gives the head a prompt's
activations, and no program of decoding changes.

Only accepted tokens are learned from. A rejected node's noise is drawn with again in the next step,
at the same position: a head that had seen it would not be independent of it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.serialization import from_bytes, to_bytes

from clover_jax.array_types import Array, Bool, Float, Int, Params
from clover_jax.checkpoints.base import fingerprint
from clover_jax.checkpoints.card import Card, write_native
from clover_jax.data.records import json_hash
from clover_jax.data.tokenizer import template_text
from clover_jax.decoding.models import Models, params_hash
from clover_jax.decoding.programs import Placement
from clover_jax.decoding.tree_config import portable_name
from clover_jax.drafters.registry import TRAINING_FREE
from clover_jax.errors import UserError
from clover_jax.models.batch import Batch
from clover_jax.models.placement import gathered, param_shardings, place_rows
from clover_jax.runtime.distributed import process_count
from clover_jax.runtime.files import atomic_file, only_process_in, read_json_object, write_json
from clover_jax.runtime.progress import say
from clover_jax.training.step import (
    OptimizerConfig,
    TrainState,
    TrainStepConfig,
    head_loss,
    make_optimizer,
    make_train_step,
)
from clover_jax.training.teacher import teach

BUDGET = 0.05  # of the seconds of decoding
ROWS, LENGTH = 4, 128  # texts of a step, and their tokens at most
RING = 8  # such batches of texts are kept
JUDGED_EVERY = 8  # steps
FALL = 0.98  # of the tau of the head that is kept: a head below it is taken back
# A constant rate: 2^30 steps never end. No warm-up: a minute of decoding has time for a few steps.
OPTIMIZER = OptimizerConfig(steps=2**30, learning_rate=5e-4, warmup_steps=0, weight_decay=0.0)
STATE, DRAFT, MANIFEST = "adapter.msgpack", "draft", "adapter.json"
SAVED_EVERY = 300.0  # seconds


class AdapterState(struct.PyTreeNode):
    """What an adapter's next step depends on, but for the seconds that it is allowed.

    train:  the head in float32, and its optimizer.
    kept:   the head to go back to.
    tokens: [R, S] the latest texts, a ring; 0 where a text has ended.
    kind:   [R, S] 0 behind a text, 1 on tokens that are there for context, 2 on those to learn.
    texts, steps, taken_back: texts written so far, steps made, and how often `kept` came back.
    forwards: of the base, since the last step.
    """

    train: TrainState
    kept: Params
    tokens: Int[np.ndarray, "R S"]
    kind: Int[np.ndarray, "R S"]
    texts: int = 0
    steps: int = 0
    taken_back: int = 0
    forwards: int = 0


class Adapter:
    """Trains the head of models on the texts that it drafts; a `Learner` of the engine.

    state: see `AdapterState`; the next step consumes its arrays.
    params: the head to decode with, in the models' type.
    decoded, spent: seconds of decoding, and of learning, without compilation.
    """

    def __init__(self, models: Models, every: int | None = None):
        """Begin with the head of the models; raises UserError for one that cannot learn.

        every: forwards of the base from one step to the next, for runs that must be repeated to the
            bit; None lets measured seconds decide.
        """
        head, params = models.head, models.draft_params
        if head is None or params is None or head.config.kind in TRAINING_FREE:
            kind = "none" if head is None else f"{head.config.kind!r}, which has none"
            raise UserError(f"adapt trains a head's weights; the draft is {kind}")
        if "draft" in models.int8:
            raise UserError("adapt cannot train a head in int8: load it without int8=draft")
        if process_count() > 1:
            raise UserError(f"adapt works in one process, and this run has {process_count()}")

        if every is not None and every < 1:
            raise UserError(f"adapt_every ({every}) must be at least 1")

        self._mesh, self._every, self.params = models.mesh, every, params
        self._rows = Placement(models.mesh).whole_rows(ROWS)
        config = TrainStepConfig(models.base.config, head, OPTIMIZER, mesh=models.mesh)
        self._step, self._judge = _programs(config)
        self._greedy, self._slowest = True, 0.0  # seconds of the slowest step so far
        self.decoded = self.spent = 0.0
        self._is_prepared = False
        self._save: Callable[[], None] | None = None
        self._saved_at = time.monotonic()

        ring = np.zeros((RING * self._rows, LENGTH), np.int32)
        train = _begin(params)
        self.restore(AdapterState(train, _copied(train.params, train.params), ring, ring.copy()))

    def restore(self, state: AdapterState) -> None:
        """Go on from a state, such as an earlier run's; its arrays belong to the adapter then."""
        learned = state.train, state.kept
        if self._mesh is not None:
            learned = jax.device_put(learned, param_shardings(learned, self._mesh))
        train, kept = jax.tree.map(jnp.asarray, learned)
        # The ring is written to on the host: a step's texts are a few kilobytes.
        tokens, kind = np.array(state.tokens), np.array(state.kind)
        counts = state.texts, state.steps, state.taken_back, state.forwards
        self.state = AdapterState(train, kept, tokens, kind, *map(int, counts))
        self.params = _copied(self.state.train.params, self.params)

    def open(self, models: Models, folder: Path) -> None:
        """Go on from the state in a folder, if there is one, and save there from now on."""
        draft = models.draft
        assert draft is not None  # as in __init__
        # The head that it began with: its state fits other heads of the same shapes, too.
        base = fingerprint(models.base)
        began = {
            "base": base.to_dict(),
            "draft_config": json_hash(draft.head.config.to_dict()),
            "draft_hash": params_hash(draft.params),
        }
        manifest, state = folder / MANIFEST, folder / STATE
        if state.is_file():
            there = read_json_object(manifest)
            different = [name for name in began if there.get(name) != began[name]]
            if different:
                raise UserError(
                    f"{folder} has a head that began from another {different[0].split('_')[0]}; "
                    "give --adapt another folder"
                )
            self.restore(from_bytes(self.state, state.read_bytes()))
        else:
            write_json(manifest, began)

        made = {"command": "adapt", "draft": draft.source}
        template = template_text(models.tokenizer) if models.tokenizer else draft.chat_template
        tree = portable_name(models.tree)

        def save() -> None:
            with atomic_file(state) as unfinished:
                unfinished.write_bytes(to_bytes(self.state))
            card = Card(
                draft.head.config,
                base,
                tree,
                draft.provenance | made | {"adapter_steps": self.state.steps},
                chat_template=template,
            )
            write_native(folder / DRAFT, card, jax.device_get(self.state.train.params))

        self._save = save

    def save(self) -> None:
        """Write the state and the head to the folder that was opened, if one was."""
        if self._save is not None:
            self._save()
        self._saved_at = time.monotonic()

    def prepare(self, base_params: Params) -> None:
        if self._is_prepared:
            return
        batch, state = self._batch(np.zeros(self._rows, np.int32)), self.state
        train = jax.tree.map(jnp.copy, state.train)
        # Twice, on copies: the second time tells what a step will take, with both heads judged.
        for _ in range(2):
            began = time.perf_counter()
            for head in (train.params, state.kept):
                float(self._judge(self._greedy, head, base_params, batch))
            train, _ = self._step(train, base_params, batch)
            jax.block_until_ready((_copied(train.params, self.params), _begin(state.kept)))
        self._slowest = time.perf_counter() - began
        self._is_prepared = True

    def watch(self, seconds: float, forwards: int, is_greedy: bool) -> None:
        self.decoded += seconds
        self.state = self.state.replace(forwards=self.state.forwards + forwards)
        self._greedy = is_greedy

    def take(self, text: np.ndarray, num_taken: int, is_last: bool) -> int:
        """Write the end of a text to the ring if half of a ring's row is new, or it has ended."""
        new = len(text) - num_taken
        if new < (1 if is_last else LENGTH // 2):
            return num_taken
        place, end = self.state.texts % len(self.state.tokens), text[-LENGTH:]
        for row, values in ((self.state.tokens[place], end), (self.state.kind[place], 1)):
            row[:], row[: len(end)] = 0, values
        self.state.kind[place, max(len(end) - new, 0) : len(end)] = 2
        self.state = self.state.replace(texts=self.state.texts + 1)
        return len(text)

    def learn(self, base_params: Params, now: Callable[[], float]) -> Params | None:
        """Make a step on texts of the ring if the budget has room for it.

        The latest texts wait: the head is judged on them before it learns from them.
        """
        # Full but for what waits: else the first texts would be learned again and again.
        texts, size = self.state.texts, len(self.state.tokens)
        if self._every is None:
            is_due = self.spent + self._slowest <= BUDGET * self.decoded
        else:
            is_due = self.state.forwards >= self._every
        if texts < size or not is_due:
            return None

        began = now()
        waiting = np.arange(texts - self._rows, texts) % size
        if self.state.steps % JUDGED_EVERY == JUDGED_EVERY - 1:
            self._keep_or_take_back(base_params, self._batch(waiting))

        # Drawn by the step's number: a resumed run draws the same.
        known = np.setdiff1d(np.arange(size), waiting)
        drawn = np.random.default_rng(self.state.steps).choice(known, self._rows, replace=False)
        train, _ = self._step(self.state.train, base_params, self._batch(drawn))
        self.params = _copied(train.params, self.params)
        self.state = self.state.replace(train=train, steps=self.state.steps + 1, forwards=0)
        jax.block_until_ready(self.params)
        if time.monotonic() - self._saved_at > SAVED_EVERY:
            self.save()

        seconds = now() - began
        self.spent += seconds
        self._slowest = max(self._slowest, seconds)
        return self.params

    def _batch(self, rows: np.ndarray) -> Batch:
        kind = self.state.kind[rows]
        batch = Batch(
            tokens=jnp.asarray(self.state.tokens[rows]),
            segment_ids=jnp.asarray(kind > 0, jnp.int32),
            positions=jnp.broadcast_to(jnp.arange(LENGTH), kind.shape),
            loss_mask=jnp.asarray(kind == 2),
        )
        return batch if self._mesh is None else place_rows(batch, self._mesh)

    def _keep_or_take_back(self, base_params: Params, batch: Batch) -> None:
        """Compare the head with the one that is kept, on texts that neither has learned from."""
        state = self.state
        heads = state.train.params, state.kept
        ours, kept = [float(self._judge(self._greedy, head, base_params, batch)) for head in heads]
        if ours >= kept:
            self.state = state.replace(kept=_copied(state.train.params, state.kept))
        elif not ours >= FALL * kept:  # NaN too
            train, taken_back = _begin(state.kept), state.taken_back + 1
            self.state = state.replace(train=train, taken_back=taken_back)


@contextlib.contextmanager
def adapting(models: Models, folder: str | None) -> Iterator[Adapter | None]:
    """Yield an adapter of the models' head that goes on from `folder` and is saved there; or None.

    The folder has the adapter's state, and in draft/ the head as any other. It is written every few
    minutes and at the end. Raises UserError for a folder of another head, or that is in use.
    """
    if folder is None:
        yield None
        return

    adapter, place = Adapter(models), Path(folder).expanduser()
    with only_process_in(place, "adapts a head", "--adapt"):
        adapter.open(models, place)
        try:
            yield adapter
        finally:
            # Also after an interruption: what was learned is kept.
            adapter.save()
            state, where = adapter.state, place / DRAFT
            say(
                f"the head made {state.steps} steps, in this run for {adapter.spent:.1f} s besides "
                f"{adapter.decoded:.1f} s of decoding; {state.taken_back} times the one before it "
                f"was better; it is in {where}"
            )


@functools.lru_cache(maxsize=8)  # or each adapter of one head would compile them again
def _programs(config: TrainStepConfig) -> tuple[Callable, Callable]:
    """Return the compiled step, and `_expected_tau` of a head."""
    return make_train_step(config), jax.jit(functools.partial(_expected_tau, config))


@jax.jit
def _copied(params: Params, like: Params) -> Params:
    """Return a copy of a head's params, which a step would consume, in the types of another's."""
    return jax.tree.map(lambda leaf, other: jnp.copy(leaf).astype(other.dtype), params, like)


@jax.jit
def _begin(params: Params) -> TrainState:
    """Return the state before the first step, from a head's params."""
    # In float32, whatever the head's type: small updates would be lost in bfloat16.
    params = jax.tree.map(lambda leaf: jnp.copy(leaf).astype(jnp.float32), params)
    key = jax.random.key_data(jax.random.key(0))
    return TrainState(params, make_optimizer(OPTIMIZER).init(params), jnp.zeros((), jnp.int32), key)


def _expected_tau(
    config: TrainStepConfig,
    greedy: Bool[Array, ""] | bool,
    params: Params,
    base_params: Params,
    batch: Batch,
) -> Float[Array, ""]:
    """Return the tau of a chain of drafted tokens, as the losses of its positions tell it.

    A position is accepted where the head's best token is the base's, or, of a drawn token, with one
    less the distance of the two distributions.
    """
    teacher = teach(config.base, base_params, config.head.config.features, batch, config.mesh)
    whole, key = gathered(base_params, config.mesh), jax.random.key(0)
    metrics = head_loss(config, params, whole, teacher, batch, key)[1]
    accepted = jnp.where(greedy, metrics.accuracy, 1 - metrics.terms.total_variation)
    return 1 + jnp.cumprod(accepted).sum()
