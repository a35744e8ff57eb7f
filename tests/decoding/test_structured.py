"""Structured outputs: masks of every slot, text equal to plain constrained decoding's, refusals."""

import collections
import dataclasses
import functools
import json
import os
import pathlib

import numpy as np
import pytest
from transformers import AutoTokenizer

from clover_jax import api
from clover_jax.decoding.engine import Engine
from clover_jax.decoding.grammars import Grammars, draft_chain, fill_masks, form_text
from clover_jax.decoding.requests import Request
from clover_jax.decoding.row_settings import GenerationSettings
from clover_jax.decoding.sampling_config import GREEDY, SamplingConfig, SamplingParams
from clover_jax.decoding.tree_config import TreeConfig, parse_tree
from clover_jax.errors import UserError
from tests.decoding.reference import _logits
from tests.tiny_folders import SPEAKING
from tests.tiny_models import SMALL_TREE, random_base, random_head, texts_of
from tests.tiny_models import decode as decode_requests
from tests.tiny_tokenizers import save_byte_level

EOS = 1
BASE = dataclasses.replace(SPEAKING, eos_token_ids=(EOS,))
RULES = SamplingConfig("greedy", masked=True)
FORMS = [
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"regex": "(the|he)+ [0-9]{2,5}"},
    {"choice": ["yes", "no", "the end"]},
    None,
    {"grammar": 'start: "<" item+ ">"\nitem: /[a-h]{2}/ | "(" item ")"'},
]
NUMBERS = {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 2}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_byte_level(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def forms(tokenizer):
    return Grammars(tokenizer, BASE.vocab_size, (EOS,))


@pytest.fixture(scope="module")
def tiny():
    return api.load_draft(api.load_base("builtin:tiny"), "lookup")


def requests(**more):
    prompts = np.random.default_rng(0).integers(2, 259, size=(len(FORMS), 9)).tolist()
    rows = zip(prompts, map(form_text, FORMS), strict=True)
    return [Request(i, ids, 24, (EOS,), form=form, **more) for i, (ids, form) in enumerate(rows)]


decode = functools.partial(decode_requests, config=BASE)


def allowed(forms, form, ids):
    """Return which tokens may follow these, by a matcher of their own."""
    matcher = forms.matcher(form)
    assert matcher.consume_tokens(ids)
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, bitorder="little")[: BASE.vocab_size] == 1


def slow(forms, request):
    """Return the text of plain decoding whose scores are masked, one full forward a token."""
    answer = []
    while len(answer) < request.max_new_tokens and EOS not in answer:
        text = [*request.prompt_ids, *answer]
        logits = np.array(_logits(BASE, random_base(BASE), text)[len(text) - 1])
        if request.form is not None:
            logits[~allowed(forms, request.form, answer)] = -np.inf
        answer.append(int(logits.argmax()))
    return answer


def test_every_slot_has_the_mask_after_its_path(forms):
    rng, reached = np.random.default_rng(0), 0
    form = form_text({"regex": "[ab]*(ab|ba)[a-c]{1,3}"})
    ids = {letter: 2 + i for i, letter in enumerate(sorted(set(map(chr, range(33, 127)))))}
    letters = [ids[letter] for letter in "abcd"]
    for _ in range(60):
        parent = [-1, *(int(rng.integers(0, slot)) for slot in range(1, 12))]
        tokens = [letters[0], *rng.choice([*letters, EOS, -1], size=11).tolist()]
        matcher, masks = forms.matcher(form), np.full((12, 9), -1, np.int32)
        assert matcher.consume_tokens(tokens[:1])
        fill_masks(matcher, tokens, parent, masks, (EOS,))
        # The matcher stays at the root.
        assert np.frombuffer(matcher.compute_bitmask(), np.int32).tolist() == masks[0].tolist()
        for slot in range(12):
            path = [slot]
            while parent[path[0]] >= 0:
                path.insert(0, parent[path[0]])
            text = [tokens[each] for each in path]
            fresh = forms.matcher(form)
            if min(text) >= 0 and EOS not in text and fresh.try_consume_tokens(text) == len(text):
                bits = np.frombuffer(fresh.compute_bitmask(), np.int32)
                assert masks[slot].tolist() == bits.tolist()
                reached += 1
            else:
                assert (masks[slot] == -1).all()
    assert reached > 100


def test_a_mask_does_not_depend_on_the_branches_before(tiny):
    """llguidance 1.9.1 fails this after a rollback."""
    text = [tiny.tokenizer.convert_tokens_to_ids(token) for token in ("{", '",', 'Ġ"', ":")]
    bracket, spaced = map(tiny.tokenizer.convert_tokens_to_ids, ("[", "Ġ["))
    tree, masks = [text[-1], bracket, bracket, spaced], np.zeros((4, 64), np.int32)
    matcher, fresh = (tiny.grammars.matcher('{"json_object": true}') for _ in range(2))
    assert matcher.consume_tokens(text)
    fill_masks(matcher, tree, [-1, 0, 1, 0], masks, (1,))
    assert fresh.consume_tokens([*text, spaced])
    assert masks[3].tobytes() == fresh.compute_bitmask()[: 64 * 4]


def test_a_chain_takes_equal_tokens_then_unused_slots_then_others():
    def drafted(chain, tokens, parent, is_shared):
        tokens, parent = np.array(tokens), np.array(parent)
        draft_chain(chain, tokens, parent, is_shared)
        return tokens.tolist(), parent.tolist()

    # The docstring's example.
    assert drafted([7, 8], [5, 7, -1], [-1, 0, 0], False) == ([5, 7, 8], [-1, 0, 1])
    # No slot is free: the first child makes way, and a leaf ends the chain.
    full = [5, 6, 7, 8], [-1, 0, 0, 1]
    assert drafted([9, 1, 2], *full, True) == ([5, 9, 7, 1], full[1])
    assert drafted([7, 1], *full, True) == full
    draft_chain(chain := [7, 1], *map(np.array, full), True)
    assert chain == [7]
    # Parents that all rows share stay.
    assert drafted([9], [5, 6, -1, -1], [-1, 0, 1, 0], True) == ([5, 6, -1, 9], [-1, 0, 1, 0])


def test_what_a_form_forces_is_drafted(forms):
    """Every token of a text that only one path spells is accepted as drafted."""
    form = form_text({"regex": "[0-9]: the heh the heh the heh!"})
    request = dataclasses.replace(requests()[0], form=form, max_new_tokens=40)
    tree = parse_tree("chain:4")
    rules = dataclasses.replace(RULES, verify="lossless", draft_sampling="topk")
    engine = Engine(BASE, random_head(BASE)[0], tree, rules, grammars=forms)
    before = dict(forms.counts)
    (row,) = decode(engine, [request])
    assert row.output_ids == slow(forms, request)
    assert row.tau > 2
    counts = {name: count - before[name] for name, count in forms.counts.items()}
    assert counts["accepted_tokens"] == counts["draft_tokens"] > 10
    assert min(counts.values()) > 0


@pytest.mark.parametrize(
    ("tree", "rules"),
    [
        (TreeConfig.root_only(), RULES),
        (SMALL_TREE, RULES),
        (parse_tree("dynamic:5:3:3+copy:4"), RULES),
        (SMALL_TREE, SamplingConfig("lossless", "sampled", masked=True, penalized=True)),
    ],
    ids=["none", "small", "copies", "lossless"],
)
def test_greedy_text_is_plain_constrained_decoding_s(forms, tree, rules):
    head = random_head(BASE)[0] if tree.num_nodes else None
    rows = decode(Engine(BASE, head, tree, rules, batch_size=3, grammars=forms), requests())
    assert texts_of(rows) == [slow(forms, request) for request in requests()]
    assert {row.finish_reason for row in rows} == {"eos", "length"}
    assert all(row.output_ids[-1] == EOS for row in rows if row.finish_reason == "eos")


def test_drawn_text_is_plain_constrained_decoding_s(forms):
    rules = SamplingConfig("lossless", truncate=True, masked=True)
    asked = requests(params=SamplingParams(temperature=1.0, top_p=0.9))
    plain = Engine(BASE, None, TreeConfig.root_only(), rules, batch_size=5, grammars=forms)
    engine = Engine(BASE, random_head(BASE)[0], SMALL_TREE, rules, batch_size=2, grammars=forms)
    rows = decode(engine, asked)
    assert texts_of(rows) == texts_of(decode(plain, asked))
    assert max(max(row.accepted, default=0) for row in rows[:3]) > 0


def test_rows_without_a_form_run_the_programs_of_an_engine_without(chunks, forms):
    texts, head = [], random_head(BASE)[0]
    for masked in (False, True):
        sampling = SamplingConfig("lossless", masked=masked)
        options = {"adapts": True, "batch_size": 2, "grammars": forms}
        engine = Engine(BASE, head, parse_tree("chain:3"), sampling, **options)
        texts.append(decode(engine, requests()[3:4])[0].output_ids)
    assert texts[0] == texts[1]
    assert len(set(chunks)) == 1
    assert chunks[0][:2] == ("compile_chunk", dataclasses.replace(engine.config, sampling=GREEDY))
    # Next to rows with a form it has the same text by the other programs.
    assert decode(engine, requests())[3].output_ids == texts[0]
    assert {one.maker for one in chunks} == {"compile_chunk", "compile_masked_step"}


def test_a_form_that_becomes_too_complex_ends_its_row_alone(forms):
    # Its first token is still cheap.
    request = dataclasses.replace(requests()[1], form=form_text({"regex": "(a?){2000}a{2000}"}))
    others = requests()[2:4]
    engine = Engine(BASE, None, TreeConfig.root_only(), RULES, batch_size=2, grammars=forms)
    broken, *rest = decode(engine, [request, *others])
    assert broken.finish_reason == "error"
    assert broken.error == "the text cannot go on: lexer error: too many expressions constructed"
    assert texts_of(rest) == [slow(forms, other) for other in others]


SCHEMA = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
SCHEMA["additionalProperties"] = False


def test_rows_of_prompts_may_have_a_form(tiny):
    rows = [{"prompt": "def f(", "structured_outputs": {"json": SCHEMA}, "temperature": 1.0}] * 3
    done = api.generate_rows(tiny, [*rows, "def f("], max_new_tokens=250)
    *right, plain = sorted(done, key=lambda row: row["index"])
    for row in right:
        assert row["finish_reason"] == "eos"
        assert isinstance(json.loads(row["text"])["n"], bool)
    assert plain["finish_reason"] == "length"
    wrong = {"prompt": "def f(", "structured_outputs": {"json": {"type": "nothing"}}}
    with pytest.raises(UserError, match="prompt 0: structured_outputs: json: Invalid type: noth"):
        list(api.generate_rows(tiny, [wrong]))


def random_schema(rng, depth=0):
    """Return a schema whose texts have an end."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const"]
    kinds += ["object", "array", "anyOf"] * (depth < 3)
    least, size = int(rng.integers(-20, 20)), int(rng.integers(1, 4))
    match kind := str(rng.choice(kinds)):
        case "integer":
            return {"type": kind, "minimum": least, "maximum": least + 10 * size}
        case "number":
            return {"type": kind, "exclusiveMinimum": least, "maximum": least + size}
        case "string":
            ways = ({"maxLength": 6}, {"pattern": "^[a-f]{2,4}$"}, {"format": "date"})
            return {"type": kind, **ways[size - 1]}
        case "enum":
            return {kind: [None, "a b", -3, 'x"y', [1], True][: 2 * size]}
        case "const":
            return {kind: [0.5, "c", {"d": [None]}][size - 1]}
        case "object":
            names = [f"{letter}{depth}" for letter in "pqr"[:size]]
            parts = {name: random_schema(rng, depth + 1) for name in names}
            required = names[: int(rng.integers(0, size + 1))]
            closed = {"required": required, "additionalProperties": False}
            return {"type": kind, "properties": parts, **closed}
        case "array":
            return {"type": kind, "items": random_schema(rng, depth + 1), "maxItems": size}
        case "anyOf":
            return {kind: [random_schema(rng, depth + 1) for _ in range(size)]}
    return {"type": kind}


def ends_of(models, schemas):
    """Return how many answers have ended, by why; those with an end must be valid."""
    jsonschema = pytest.importorskip("jsonschema", reason="pip install -e '.[test]'")
    rows = [
        {"prompt": "def f(x):\n", "structured_outputs": {"json": schema}, "temperature": 1.0}
        for schema in schemas
    ]
    ends = collections.Counter()
    settings = {"max_new_tokens": 250, "batch_size": 12, "strict": False}
    for row in api.generate_rows(models, rows, **settings):
        if row.get("finish_reason") == "eos":
            jsonschema.validate(json.loads(row["text"]), schemas[row["index"]])
        ends[row.get("finish_reason") or row["error"].partition(": ")[2]] += 1
    return ends


@pytest.mark.parametrize("count", [30, pytest.param(400, marks=pytest.mark.slow)])
def test_answers_to_random_schemas_are_valid(tiny, count):
    rng = np.random.default_rng(0)
    assert ends_of(tiny, [random_schema(rng) for _ in range(count)])["eos"] >= 0.8 * count


SUITE = os.environ.get("CLOVER_JAX_SCHEMAS", "")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Possible (nested set|set difference):FutureWarning")
@pytest.mark.skipif(not SUITE, reason="CLOVER_JAX_SCHEMAS names no folder of JSON schemas")
def test_answers_to_a_suite_of_schemas_are_valid_or_refused_in_one_line(tiny):
    """Take 1 000 of the folder's files, evenly; on CLOVER_JAX_REAL_BASE if it is set.

    Patterns of published schemas are not always what Python would write: it warns.
    """
    files = sorted(pathlib.Path(SUITE).rglob("*.json"))
    schemas = [json.loads(file.read_bytes()) for file in files[:: max(1, len(files) // 1000)]]
    if base := os.environ.get("CLOVER_JAX_REAL_BASE"):
        tiny = api.load_draft(api.load_base(base), "lookup")
    ends = ends_of(tiny, schemas)
    for why, count in ends.most_common():
        print(count, why)
    assert all(len(why.splitlines()) == 1 for why in ends)
    assert not any("satisfy the grammar" in why for why in ends)  # a mask was wrong


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"json": {}, "regex": "a"}, "must be an object with one of json, json_object, regex"),
        ({"yaml": "a"}, "must be an object with one of json, json_object, regex"),
        ("a+", "must be an object with one of json"),
        ({"json": 5}, "json must be a JSON schema, not 5"),
        ({"choice": []}, r"choice must be a list of texts, none of them empty, not \[\]"),
        ({"regex": ""}, 'regex must be a regular expression, not ""'),
        ({"json_object": False}, "json_object must be true, not false"),
    ],
)
def test_what_is_no_form_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        GenerationSettings(structured_outputs=given)


def test_what_does_not_go_with_a_form_is_refused(forms, tokenizer):
    (request, *_) = requests()
    root = TreeConfig.root_only()
    engine = Engine(BASE, None, root, dataclasses.replace(RULES, biased=True), grammars=forms)
    for changes in ({"min_new_tokens": 1}, {"eos_ids": ()}):
        with pytest.raises(UserError, match="structured_outputs end where their form does"):
            engine.check(dataclasses.replace(request, **changes))
    with pytest.raises(UserError, match=r"need an engine with SamplingConfig\(masked=True\)"):
        Engine(BASE, None, root).check(request)
    with pytest.raises(UserError, match="need the base's tokenizer files, which are missing"):
        Engine(BASE, None, root, RULES).check(request)
    with pytest.raises(UserError, match="need a base with an end-of-sequence token"):
        Grammars(tokenizer, BASE.vocab_size, ()).matcher(request.form)
