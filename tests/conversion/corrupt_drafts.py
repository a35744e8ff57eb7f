"""Draft directories, spoilt or given with another base: name -> (how, what is said of it)."""

import hashlib
import json

from tests.conversion.spoiling import cut_file, other_lm_head, remove
from tests.tiny_checkpoints import edit_json
from tests.tiny_tokenizers import CHAT_TEMPLATE, save_byte_fallback, save_byte_level

OUR_TOKENIZER = "3abccf9bda48"  # the start of the byte-level tokenizer's hash
OTHER_TEMPLATE = CHAT_TEMPLATE + "!"


def short_hash(text):
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def card(**changes):
    return lambda folder: edit_json(folder / "head" / "draft.json", **changes)


def fingerprint_of(**changes):
    def spoil(folder):
        path = folder / "head" / "draft.json"
        edit_json(path, base=json.loads(path.read_text())["base"] | changes)

    return spoil


NATIVE = {
    "card gone": (remove("head/draft.json"), "is not a draft: it has neither draft.json"),
    "card cut": (cut_file("head/draft.json", 99), "draft.json is not JSON"),
    "card of the future": (card(format_version=2), "draft.json has format_version 2; this"),
    "card without a drafter": (card(drafter=...), "draft.json has no 'drafter' object"),
    "unknown drafter": (card(drafter={"kind": "clover9"}), "drafter 'clover9' is unknown; the"),
    "unknown field": (
        lambda folder: edit_json(
            folder / "head" / "draft.json",
            drafter=json.loads((folder / "head/draft.json").read_text())["drafter"] | {"w": 1},
        ),
        "Clover2Config has no field 'w'",
    ),
    "files not listed": (card(files=...), "draft.json does not list the files of params/"),
    "another tokenizer": (
        lambda folder: save_byte_fallback(folder / "base"),
        f": tokenizer {OUR_TOKENIZER} against ",
    ),
    "another chat template": (
        lambda folder: save_byte_level(folder / "base", OTHER_TEMPLATE),
        f": chat_template {short_hash(CHAT_TEMPLATE)} against {short_hash(OTHER_TEMPLATE)}; give",
    ),
    "another lm_head": (other_lm_head, "was trained for another base than"),
    "a base of another depth": (fingerprint_of(num_layers=9), "num_layers 9 against 2"),
    "a base of other heads": (
        fingerprint_of(num_kv_heads=4, num_heads=8),
        "num_heads 8 against 4, num_kv_heads 4 against 2",
    ),
    "a base of another lm_head, another tokenizer": (
        fingerprint_of(lm_head="1" * 64, tokenizer="2" * 64),
        f"tokenizer 222222222222 against {OUR_TOKENIZER}; give the base that it was trained for",
    ),
    "number for a hash": (card(files={"d": 1}), "params/d is missing; was the draft copied whole"),
}
