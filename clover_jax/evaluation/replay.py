"""The accepted lengths of drafts without training on texts that are written already.

Such drafts read nothing but tokens, so a written answer determines what each of their steps would
have accepted, without a base (`replayed.py`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover_jax.config import BaseConfig
from clover_jax.data.chat_templates import with_chat_template
from clover_jax.data.prompt_encoding import encode_prompt
from clover_jax.data.prompts import Prompt
from clover_jax.data.records import Conversation, Record, Text, TokenRow, data_hash, parse_row
from clover_jax.data.rows import open_rows, parse_line
from clover_jax.decoding.step import StepConfig
from clover_jax.decoding.tree_config import CopyTree, parse_tree
from clover_jax.drafters import registry
from clover_jax.errors import UserError
from clover_jax.evaluation.markdown import number, share, table
from clover_jax.evaluation.methods import choose_baselines
from clover_jax.evaluation.options import Options, parse_trees
from clover_jax.evaluation.replayed import Written, replay_rows
from clover_jax.evaluation.tally import Tally
from clover_jax.generation.settings import GenerationSettings
from clover_jax.loading.heads import TREES
from clover_jax.pretrained.loading import describe_base
from clover_jax.runtime.compile_clock import CompileClock
from clover_jax.runtime.distributed import process_count
from clover_jax.runtime.progress import passing_note, progress_bar
from clover_jax.runtime.provenance import git_revision, versions
from clover_jax.storage.files import write_json, write_text
from clover_jax.storage.jsonl import plain_values
from clover_jax.tokenizers.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

JSON, MARKDOWN = "replay.json", "replay.md"
_KINDS = ("category", "kind")  # fields of a row with its kind


def replay(options: Options, flags: dict[str, Any]) -> dict[str, Any]:
    """Measure drafts without training on the answers of a file; return the key figures.

    flags: every flag's value, for the report.
    Raises UserError for rows that cannot be read, and where none has an answer.
    """
    if process_count() > 1:
        raise UserError(f"--replay reads in one process, and here are {process_count()}")

    # The config and the tokenizer are enough: no weights are read.
    source = Path(str(options.replay)).expanduser()
    described = describe_base(options.spec.base)
    methods = _methods(options, described.config)
    tokenizer = load_tokenizer(described.directory)
    tokenizer = with_chat_template(tokenizer, options.spec.chat_template)
    with passing_note(f"reading {source}"):
        records = list(_records(source, options.limit_prompts))
    vocab_size = described.config.vocab_size

    answers: list[Written] = []
    without_answer = 0
    with progress_bar(len(records), "tokenizing", "row") as bar:
        for kind, record in records:
            turns = _turns(record, tokenizer, vocab_size)
            _check_ids(record.source, turns, vocab_size)
            without_answer += not turns
            # An answer's first token is prefill's own, so a single one has no forward.
            answers += (Written(kind, *turn) for turn in turns if turn[0] and len(turn[1]) > 1)
            bar.update()
    if not answers:
        raise UserError(
            f"--replay={source}: no row has an answer; give rows of prompt and response, messages, "
            "conversations, or prompt_ids and output_ids"
        )

    measured = {name: _measure(name, answers, config) for name, config in methods.items()}
    report = {
        "source": str(options.replay),
        "hash": data_hash(record for _, record in records),
        "rows": len(records),
        "rows_without_answer": without_answer,
        "tokenizer": options.spec.base,
        "methods": measured,
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
        "rows": len(records),
        "answers": len(answers),
        "tau": {name: figures["overall"]["tau"] for name, figures in measured.items()},
        "tau_by_kind": {
            name: {kind: tally["tau"] for kind, tally in figures["kinds"].items()}
            for name, figures in measured.items()
        },
        "problems": [],
    }


def _methods(options: Options, base: BaseConfig) -> dict[str, StepConfig]:
    """Return the step of every draft; raises UserError for one that only decoding can measure."""
    others = {
        "drafts": options.drafts,
        "copy": options.spec.copy,
        "copy_from": options.spec.copy_from,
    }
    for name, value in others.items():
        if value:
            raise UserError(f"--replay measures copies of a row alone: leave --{name}={value} out")

    # The same baselines as in a run that decodes with default settings.
    names = [choice.name for choice in choose_baselines(options, GenerationSettings())]
    if not names:
        raise UserError(f"--replay has nothing to measure with --baselines={options.baselines}")
    # A tree without a name is lookup's: no other draft has copies only.
    given = options.tree if options.tree and "=" in options.tree else None
    trees = parse_trees(given, names)
    if options.tree and not given:
        trees["lookup"] = options.tree

    configs = {}
    for name in names:
        tree = parse_tree(trees[name] or TREES[name])
        copies_only = isinstance(tree, CopyTree) and not tree.drafted.num_nodes
        if copies_only != (name == "lookup"):
            wanted = "copy:N" if name == "lookup" else f"such as {TREES[name]}"
            raise UserError(f"--tree={options.tree}: the tree of {name} should be {wanted}")
        # A base without layers keeps no keys and values.
        head = registry.head(registry.config_for_base(name, base))
        configs[name] = StepConfig(dataclasses.replace(base, num_layers=0), head, tree)
    return configs


def _measure(name: str, answers: list[Written], config: StepConfig) -> dict[str, Any]:
    """Return a method's figures, of all answers and by kind."""
    depth = config.tree.depth
    tallies = {kind: Tally(depth) for kind in dict.fromkeys(one.kind for one in answers)}
    overall = Tally(depth)

    # Rows come in an order of their own, so each brings its kind.
    with (
        CompileClock() as compiling,
        progress_bar(len(answers), name, "answer", compiling=compiling) as bar,
    ):
        for row in replay_rows(answers, config, bar):
            tallies[row["kind"]].add(row)
            overall.add(row)
            bar.show(f"tau {overall.tau or 1:.2f}")
    return {
        "tree": config.tree.name,
        "overall": overall.to_dict(),
        "kinds": {kind: tally.to_dict() for kind, tally in tallies.items()},
    }


def _records(source: Path, limit: int | None) -> Iterator[tuple[str, Record]]:
    """Yield the kind and the records of each row, `limit` rows of each kind at most."""
    stem = source.name.partition(".")[0] or "rows"
    taken: dict[str, int] = {}
    with open_rows(source) as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            # Error messages name the line.
            where = f"{source}:{line_number}"
            row = parse_line(line, where)
            # What is no object has no kind, and `parse_row` says that it is none.
            named = row if isinstance(row, dict) else {}
            kind = next((str(named[key]) for key in _KINDS if named.get(key)), stem)
            # Rows are counted by kind, so that a file sorted by kind gives some of each.
            taken[kind] = taken.get(kind, 0) + 1
            if limit is None or taken[kind] <= limit:
                yield from ((kind, record) for record in parse_row(row, where))


def _turns(
    record: Record, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> list[tuple[list[int], list[int]]]:
    """Return the answers of a record, each after all the text before it."""
    # A record is messages, token ids or several turns of them; a plain text has no answer.
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
    return turns


def _check_ids(source: str, turns: list[tuple[list[int], list[int]]], vocab_size: int) -> None:
    """Raise UserError, naming the row, for a token that the base does not have."""
    # Recycle's table has a line for each token of the base, and would learn it for another.
    largest = max((id_ for turn in turns for ids in turn for id_ in ids), default=0)
    if largest >= vocab_size:
        raise UserError(
            f"{source}: token id {largest} is outside the base's vocabulary, 0 to "
            f"{vocab_size - 1}; give the --base that the row was decoded with"
        )


def report_text(report: Mapping[str, Any]) -> str:
    """Return the page: a table by kind of text, and what its figures are."""
    methods = report["methods"]
    kinds = list(next(iter(methods.values()))["kinds"])
    # A single kind is the whole, which has a line already.
    lines = ["overall", *kinds] if len(kinds) > 1 else kinds

    rows = []
    for kind in lines:
        cells = [
            figures["overall"] if kind == "overall" else figures["kinds"][kind]
            for figures in methods.values()
        ]
        # The texts are the same for all methods, only the accepted lengths are not.
        text, repeats = cells[0], cells[0]["repeats"]
        repeated = share(repeats["repeated"], repeats["ngrams"])
        looping = f"{repeats['looping_turns']} of {text['turns']}"
        row = [kind, text["turns"], text["tokens"], repeated, looping]
        for cell in cells:
            taus = (cell["tau"], cell["repeats"]["tau_looping"], cell["repeats"]["tau_not_looping"])
            row += map(number, taus)
        rows.append(row)

    header = ["kind", "answers", "tokens", "repeated 8-grams", "answers that loop"]
    for name in methods:
        header += [f"tau of {name}", "where they loop", "where not"]
    trees = ", ".join(f"{name} {figures['tree']}" for name, figures in methods.items())
    return "\n\n".join(
        [
            "# Copying on written answers",
            f"{report['rows']} rows of {report['source']} ({report['rows_without_answer']} without "
            f"an answer); tokenizer of {report['tokenizer']}; trees: {trees}.",
            table(header, rows),
            _DEFINITIONS,
        ]
    )


_DEFINITIONS = """\
- tau: tokens / forwards that a base would need if it wrote these very answers, with this draft
  alone; an answer's first token and its forward are left out. Recycle learns here from the text
  only, not from what a base would put after refused tokens.
- Repeated 8-grams: of 8 tokens in a row of an answer, the share that occurred before in its prompt
  or in itself. An answer loops where at least half of its 8-grams do.
"""
