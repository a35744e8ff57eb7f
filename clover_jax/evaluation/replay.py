"""What copying alone would give on texts that somebody else wrote; no base decodes them.

Lookup reads nothing but tokens, so a written answer says what every step would have accepted: the
drafter's own tree, weighed by its own counts, is held against what the text goes on with.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from clover_jax.array_types import Array, Int
from clover_jax.data.chat_templates import with_chat_template
from clover_jax.data.prompt_encoding import encode_prompt
from clover_jax.data.prompts import Prompt
from clover_jax.data.records import Conversation, Record, Text, TokenRow, data_hash, parse_row
from clover_jax.data.rows import open_rows, parse_line
from clover_jax.decoding.accept import accept_path
from clover_jax.decoding.copies import (
    CopyCounts,
    add_copies,
    count_copies,
    guessed_scores,
    no_counts,
)
from clover_jax.decoding.engine import bucket
from clover_jax.decoding.tree import (
    CopyTree,
    TokenTree,
    TreeConfig,
    ancestor_mask,
    node_depth,
    parse_tree,
)
from clover_jax.drafters.text_matches import known_text
from clover_jax.errors import UserError
from clover_jax.evaluation.markdown import number, share, table
from clover_jax.evaluation.options import Options
from clover_jax.evaluation.tally import Tally
from clover_jax.loading.models import TREES
from clover_jax.pretrained.loading import describe_base
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.progress import Progress, passing_note, progress_bar
from clover_jax.runtime.provenance import git_revision, versions
from clover_jax.storage.files import write_json, write_text
from clover_jax.storage.jsonl import plain_values
from clover_jax.tokenizers.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

JSON, MARKDOWN = "replay.json", "replay.md"
_POSITIONS_AT_ONCE = 16384  # rows of a batch x their length
_KINDS = ("category", "kind")  # fields of a row that say of what kind it is
_NO_TOKEN = -2  # after the end of a text; PAD_TOKEN stands in a tree's empty slots


class Written(NamedTuple):
    """An answer that somebody wrote, with all that stands before it."""

    kind: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


def replay(options: Options, flags: dict[str, Any]) -> dict[str, Any]:
    """Measure lookup on the answers of a file, write the report and return its key figures.

    flags: every flag's value, for the report.
    Raises UserError for rows that cannot be read, and where none has an answer.
    """
    tree = _copy_tree(options)
    source = Path(str(options.replay)).expanduser()
    described = describe_base(options.spec.base)
    tokenizer = load_tokenizer(described.directory)
    tokenizer = with_chat_template(tokenizer, options.spec.chat_template)
    with passing_note(f"reading {source}"):
        records = list(_records(source, options.limit_prompts))
    vocab_size = described.config.vocab_size

    answers: list[Written] = []
    with progress_bar(len(records), "tokenizing", "row") as bar:
        for kind, record in records:
            answers += _answers(kind, record, tokenizer, vocab_size)
            bar.update()
    if not answers:
        raise UserError(
            f"--replay={source}: no row has an answer; give rows of prompt and response, messages, "
            "conversations, or prompt_ids and output_ids"
        )

    tallies = {kind: Tally(tree.depth) for kind in dict.fromkeys(one.kind for one in answers)}
    overall = Tally(tree.depth)
    with (
        CompileClock() as compiling,
        progress_bar(len(answers), "replay", "answer", compiling=compiling) as bar,
    ):
        for row in replay_rows(answers, tree, bar):
            tallies[row["kind"]].add(row)
            overall.add(row)
            bar.show(f"tau {overall.tau or 1:.2f}")

    report = {
        "source": str(options.replay),
        "hash": data_hash(record for _, record in records),
        "rows": len(records),
        "rows_without_answer": sum(not _has_answer(record) for _, record in records),
        "tokenizer": options.spec.base,
        "tree": tree.name,
        "overall": overall.to_dict(),
        "kinds": {kind: tally.to_dict() for kind, tally in tallies.items()},
        "flags": flags,
        "versions": versions(),
        "git_revision": git_revision(),
    }
    write_json(options.directory / JSON, plain_values(report))
    page = report_text(report)
    write_text(options.directory / MARKDOWN, page)
    print(page, file=sys.stderr)
    return {
        "output": options.directory,
        "rows": report["rows"],
        "answers": overall.turns,
        "tau": overall.tau,
        "tau_by_kind": {kind: tally.tau for kind, tally in tallies.items()},
        "problems": [],
    }


def _copy_tree(options: Options) -> CopyTree:
    """Return the tree of copies; raises UserError for what only a decoding run can measure."""
    others = {
        "drafts": options.drafts,
        "copy": options.spec.copy,
        "copy_from": options.spec.copy_from,
    }
    for name, value in others.items():
        if value:
            raise UserError(f"--replay measures copies of a row alone: leave --{name}={value} out")
    tree = parse_tree(options.tree or TREES["lookup"])
    if not isinstance(tree, CopyTree) or tree.drafted.num_nodes:
        raise UserError(f"--replay has nothing but copies: --tree={options.tree} should be copy:N")
    return tree


def _records(source: Path, limit: int | None) -> Iterator[tuple[str, Record]]:
    """Yield the kind and the records of each row, `limit` rows of each kind at most."""
    stem = source.name.partition(".")[0] or "rows"
    taken: dict[str, int] = {}
    with open_rows(source) as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{source}:{line_number}"
            row = parse_line(line, where)
            named = row if isinstance(row, dict) else {}
            kind = next((str(named[key]) for key in _KINDS if named.get(key)), stem)
            taken[kind] = taken.get(kind, 0) + 1
            if limit is None or taken[kind] <= limit:
                yield from ((kind, record) for record in parse_row(row, where))


def _has_answer(record: Record) -> bool:
    if isinstance(record, Conversation):
        return any(role == "assistant" for role, _ in record.messages[1:])
    return not isinstance(record, Text)


def _answers(
    kind: str, record: Record, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> Iterator[Written]:
    """Yield every answer of a record that has two tokens: the first is prefill's own."""
    turns: list[tuple[list[int], list[int]]] = []
    if isinstance(record, Conversation):
        messages = [{"role": role, "content": text} for role, text in record.messages]
        for place, message in enumerate(messages):
            # An answer to nothing has no prompt.
            if message["role"] == "assistant" and place:
                prompt = Prompt(0, record.source, messages=tuple(messages[:place]))
                prompt_ids = encode_prompt(prompt, tokenizer, vocab_size)
                assert tokenizer is not None  # or there would be no ids
                output = tokenizer(message["content"], add_special_tokens=False).input_ids
                turns.append((prompt_ids, output))
    elif isinstance(record, TokenRow):
        turns.append((list(record.prompt_ids), list(record.output_ids)))
    elif not isinstance(record, Text):
        # A later turn has only its new tokens: what came before stands before it.
        read: list[int] = []
        for new, given in record.turns:
            turns.append(([*read, *new], list(given)))
            read += [*new, *given]
    yield from (Written(kind, *turn) for turn in turns if turn[0] and len(turn[1]) > 1)


def replay_rows(
    answers: Sequence[Written], tree: CopyTree, bar: Progress | None = None
) -> Iterator[dict[str, Any]]:
    """Yield an output row, as `Tally` reads it, for every answer; those of one length together."""
    program = jax.jit(functools.partial(accepted_lengths, tree))
    by_size: dict[int, list[Written]] = {}
    for answer in answers:
        # Steps may look a tree's depth beyond the end.
        size = bucket(len(answer.prompt_ids) + len(answer.output_ids) + tree.depth + 1)
        by_size.setdefault(size, []).append(answer)

    for size, group in by_size.items():
        # A batch lasts as long as its longest answer, so equally long ones stand together.
        group.sort(key=lambda answer: len(answer.output_ids))
        rows = max(1, _POSITIONS_AT_ONCE // size)
        for start in range(0, len(group), rows):
            chosen = group[start : start + rows]
            result = jax.device_get(program(*_pack(chosen, rows, size)))
            for row, answer in enumerate(chosen):
                yield _output_row(answer, *(values[row] for values in result))
            if bar is not None:
                bar.update(len(chosen))


def _pack(
    answers: Sequence[Written], rows: int, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return texts, one a row, where the answers' first tokens lie, and their last ones."""
    text = np.full((rows, size), _NO_TOKEN, np.int32)
    first, last = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for row, answer in enumerate(answers):
        whole = [*answer.prompt_ids, *answer.output_ids]
        text[row, : len(whole)] = whole
        first[row], last[row] = len(answer.prompt_ids), len(whole) - 1
    return text, first, last


def _output_row(
    answer: Written, forwards: Array, accepted: Array, proposed: Array
) -> dict[str, Any]:
    count = int(forwards)
    counts = accepted[:count].tolist()
    return {
        "kind": answer.kind,
        "prompt_ids": answer.prompt_ids,
        "output_ids": answer.output_ids,
        "accepted": counts,
        "copied": counts,
        "proposed": proposed[:count].tolist(),
        "ranks": [[] for _ in counts],
        "num_cut": 0,
        "finish_reason": "length",
    }


class _Steps(struct.PyTreeNode):
    """Texts on their way: how far they have come, and what every forward did."""

    end: Int[Array, " B"]
    counts: CopyCounts
    forwards: Int[Array, " B"]
    accepted: Int[Array, "B S"]
    proposed: Int[Array, "B S"]


def accepted_lengths(
    tree: CopyTree, text: Int[Array, "B S"], first: Int[Array, " B"], last: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, "B S"], Int[Array, "B S"]]:
    """Return [B] forwards, and the copies that each accepted and proposed; the rest is zero.

    first, last: index of the first token of each answer, which prefill gives, and of its last.
    The text goes tree.depth + 1 positions beyond them, with tokens that nothing equals.
    """
    rows = jnp.arange(len(text))
    none = jnp.zeros_like(text)
    start = _Steps(first, no_counts(len(text)), jnp.zeros_like(first), none, none)

    def step(steps: _Steps) -> _Steps:
        # As the engine drafts: the row is known up to its root.
        end, is_running = steps.end, steps.end < last
        root = TokenTree(text[rows, end][:, None], jnp.full((1, 1), -1))
        score = jnp.broadcast_to(guessed_scores(TreeConfig.root_only()), root.tokens.shape)
        known, sizes = known_text(text, end, None), (tree.num_nodes, tree.depth)
        drafted, best = add_copies(root, score, known, end, steps.counts, *sizes, keep_drafted=True)

        # What the text goes on with stands for the base's choice after every node.
        following = jnp.take_along_axis(text, end[:, None] + 1 + jnp.arange(tree.depth + 1), axis=1)
        level = node_depth(ancestor_mask(drafted.parent, tree.depth))
        choices = jnp.take_along_axis(following, level, axis=1)
        accepted = accept_path(drafted, choices, tree.depth).count
        emitted = jnp.where(is_running, jnp.minimum(accepted + 1, last - end), 0)

        # An ended row writes zeros where it has written nothing.
        at = (rows, steps.forwards)
        proposed = (drafted.tokens[:, 1:] >= 0).sum(axis=1)
        return _Steps(
            end=end + emitted,
            counts=count_copies(steps.counts, best, following, emitted),
            forwards=steps.forwards + is_running,
            accepted=steps.accepted.at[at].set(jnp.where(is_running, accepted, 0)),
            proposed=steps.proposed.at[at].set(jnp.where(is_running, proposed, 0)),
        )

    done = jax.lax.while_loop(lambda steps: (steps.end < last).any(), step, start)
    return done.forwards, done.accepted, done.proposed


def report_text(report: Mapping[str, Any]) -> str:
    """Return the page: a table by kind of text, and what its figures are."""
    kinds = report["kinds"]
    # One kind is the whole: it needs no line of its own for that.
    cells = {"overall": report["overall"], **kinds} if len(kinds) > 1 else kinds

    rows = []
    for kind, cell in cells.items():
        repeats = cell["repeats"]
        rows.append(
            [
                *(kind, cell["turns"], cell["tokens"], number(cell["tau"])),
                share(repeats["repeated"], repeats["ngrams"]),
                f"{repeats['looping_turns']} of {cell['turns']}",
                number(repeats["tau_looping"]),
                number(repeats["tau_not_looping"]),
            ]
        )

    header = ["kind", "answers", "tokens", "tau of lookup", "repeated 8-grams", "answers that loop"]
    return "\n\n".join(
        [
            "# Copying on written answers",
            f"{report['rows']} rows of {report['source']} ({report['rows_without_answer']} without "
            f"an answer); tokenizer of {report['tokenizer']}; tree {report['tree']}.",
            table([*header, "tau where they loop", "tau where not"], rows),
            _DEFINITIONS,
        ]
    )


_DEFINITIONS = """\
- tau: tokens / forwards that a base would need if it wrote these very answers, with copies of the
  row's own text as its only draft; an answer's first token and its forward are left out.
- Repeated 8-grams: of 8 tokens in a row of an answer, the share that occurred before in its prompt
  or in itself. An answer loops where at least half of its 8-grams do.
"""
