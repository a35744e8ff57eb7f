"""Corrupted and odd files: right, named in a notice, or refused in one line; none hangs.

What is read without a word must be what the file says: `used` judges that.
"""

import contextlib
import dataclasses
import gzip
import json
import os
import resource
import signal
import struct

import pytest

from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.stored_head import load_draft
from clover_jax.data.prompts import read_prompt_files
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.data.training_data import read_records
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.errors import UserError
from tests.tiny_checkpoints import copy_of
from tests.tiny_folders import save_tiny_base, save_tiny_draft

pytestmark = pytest.mark.slow
SECONDS, MEGABYTES = 60, 1500
REFUSED, SAID, SILENT = "refused", "said", "silent"
ODD = ({}, [], "", "x", [1], {"a": 1}, -1, 0, 1, 1.5, True, False, 10**400, float("nan"), None)


@pytest.fixture
def outcome(capsys):
    """Return a function that reads something: (how it ended, its line or what was read).

    It ends what waits, and fails where memory grows with what a file claims.
    """

    def stop(*_):
        raise TimeoutError(f"no answer in {SECONDS} s")

    def judge(read):
        capsys.readouterr()
        signal.alarm(SECONDS)
        try:
            value = read()
        except UserError as error:
            (line,) = str(error).splitlines()
            return REFUSED, line
        finally:
            signal.alarm(0)
        said = capsys.readouterr().err
        return (SAID, said) if said else (SILENT, value)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGALRM, stop)
    yield judge
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES * 1024


FOLDERS = {
    "base": ("clover2_reference/base", None),
    "clover2": ("clover2_reference/clover2", "clover2_reference/base"),
    "eagle": ("clover2_reference/eagle1", "clover2_reference/base"),
    "eagle3": ("eagle3_reference/eagle3", "eagle3_reference/base"),
    "dflash2": ("dflash2_reference/dflash2", "dflash2_reference/base"),
}


@pytest.fixture(params=FOLDERS)
def folder(request, fixtures_dir, tmp_path):
    """A copy of a base or a head, and a function that reads its config and weights."""
    name, of_base = FOLDERS[request.param]
    where = copy_of(fixtures_dir / name, tmp_path / "model")
    base = load_base(str(fixtures_dir / of_base)) if of_base else None
    if base is None:
        return where, lambda: load_base(str(where)).config
    return where, lambda: load_draft(str(where), base).head.config


def flat(config, place=""):
    if not dataclasses.is_dataclass(config):
        return {place: config}
    pairs = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    return {key: x for name, one in pairs for key, x in flat(one, f"{place}.{name}").items()}


# Fields that neither a base nor a head needs here, and those that a head has from its base.
NEEDLESS = {"pad_token_id", "torch_dtype", "initializer_range", "pretraining_tp", "use_cache"}
OF_BASE = {"max_position_embeddings", "bos_token_id", "eos_token_id", "tie_word_embeddings"}


def used(odd, name, found, reference):
    """Whether a config that was read without a word says what its file says."""
    changed = [value for key, value in found.items() if value != reference[key]]
    if changed:
        listed = tuple(odd) if isinstance(odd, list) else (odd,)
        return odd is None or odd in changed or listed in changed
    # Null, and an empty object or list, mean that nothing is given; 0 and 1 may be what it had.
    is_needless = name in NEEDLESS or (".kind" in reference and name in OF_BASE)
    return is_needless or odd in (None, {}, [], 0, 1)


def test_odd_values_of_a_field(folder, outcome):
    where, read = folder
    values, reference = json.loads((where / "config.json").read_text()), flat(read())
    ends = dict.fromkeys((REFUSED, SAID, SILENT), 0)
    for name in [*values, "head_dim", "rope_parameters", "quantization_config", "num_experts"]:
        for odd in ODD:
            (where / "config.json").write_text(json.dumps(values | {name: odd}))
            how, what = outcome(read)
            ends[how] += 1
            assert how != SILENT or used(odd, name, flat(what), reference), (name, odd)
    assert min(ends.values()) > 0, ends


def with_header(change):
    """Return a function that changes the header of a safetensors file: (entries, first name)."""

    def spoil(content):
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header, min(header.keys() - {"__metadata__"}))
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return spoil


FIRST = {
    "shape": ([1], [2**40, 2**40], [-1, 4], "4", None),
    "dtype": ("I8", "F3", 32),
    "data_offsets": ([0, 2**50], [8, 0], [-8, 8]),
}
PAGE, POINTER = b"<html>404</html>", b"version https://git-lfs.github.com/spec/v1\nsize 10\n"
BYTES = [
    *(lambda c, end=end: c[:end] for end in (0, 1, 7, 8, 9, 100, 1000, -1, -1000)),
    *(lambda c, size=size: struct.pack("<Q", size) + c[8:] for size in (0, 9, 2**60, 2**63)),
    *(lambda c, new=new: new for new in (PAGE, POINTER, struct.pack("<Q", 2) + b"{}", bytes(99))),
    *(lambda c, text=text: text + c for text in (b"PK\x03\x04", struct.pack("<Q", 2) + b"{}")),
    *(lambda c: c * 2, lambda c: c + b"x", lambda c: c[:-256] + b"\xff" * 256),
    *(
        with_header(lambda header, first, key=key, value=value: header[first].update({key: value}))
        for key, values in FIRST.items()
        for value in values
    ),
    with_header(lambda header, first: header.pop(first)),
    with_header(lambda header, first: header.update({"": header.pop(first)})),
    with_header(lambda header, first: header.update(other=header.pop(first))),
    with_header(lambda header, first: header.update(other=header[first])),
]


def test_spoilt_weights(folder, outcome):
    where, read = folder
    whole = (where / "model.safetensors").read_bytes()
    for number, spoil in enumerate(BYTES):
        (where / "model.safetensors").write_bytes(spoil(whole))
        assert outcome(read)[0] == REFUSED, number


DEEP = b"[" * 100_000
TEXTS = [
    *(b"", b"null", b"[]", b"1", b'{"a": 3', DEEP, b'{"a":' * 100_000, PAGE, POINTER, b"{'a': 3}"),
    *(b'{"a": ' + b"9" * 10_000 + b"}", b'{"vocab_size": 1, "vocab_size": 2}', b'{"a": 3} // b'),
    *(b'{"model_type": "\\ud83d"}', b'{"model_type": "\x00"}', '{"a": 1}'.encode("utf-16")),
]


def test_spoilt_json(folder, outcome):
    where, read = folder
    for name in ("config.json", "model.safetensors.index.json"):
        whole = (where / name).read_bytes() if (where / name).exists() else b""
        for text in [*TEXTS, b"{}", b'{"weight_map": {"a": "../x"}}']:
            (where / name).write_bytes(text)
            assert outcome(read)[0] == REFUSED, (name, text[:60])
        (where / name).write_bytes(whole)
        # Without the whole file the index is read.
        (where / "model.safetensors").unlink(missing_ok=True)
    assert outcome(lambda: parse_tree(f"file:{where}/config.json"))[0] == REFUSED
    for text in [*TEXTS, b"[[-1]]", b"[[0.5]]", b"[[0, 0]]", b'["x"]', b"[[]]", b"[[true]]"]:
        (where / "tree.json").write_bytes(text)
        assert outcome(lambda: parse_tree(f"file:{where}/tree.json"))[0] == REFUSED, text[:60]


def odd_places(path):
    """Put odd things in the place of a file, one after another, and yield their names."""
    content, elsewhere = path.read_bytes(), path.with_name("elsewhere")
    elsewhere.write_bytes(content)
    makes = {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "nothing": lambda: None}
    targets = (path.name, "nowhere", path.parent, "/dev/zero", elsewhere)
    makes |= {f"link to {to}": lambda to=to: path.symlink_to(to) for to in targets}
    for name, make in makes.items():
        path.unlink()
        make()
        yield name
        with contextlib.suppress(OSError):
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(content)


def test_odd_things_in_the_place_of_a_file(folder, outcome):
    where, read = folder
    for file in ("config.json", "model.safetensors"):
        for name in odd_places(where / file):
            wanted = SILENT if name.endswith("elsewhere") else REFUSED
            assert outcome(read)[0] == wanted, (file, name)


def test_spoilt_tokenizers(tmp_path, outcome):
    base = save_tiny_base(tmp_path / "base")
    for text in [*TEXTS, b'{"added_tokens": [{"id": -1}]}', b'{"model": {}}']:
        (base / "tokenizer.json").write_bytes(text)
        for read in (lambda: load_tokenizer(base), lambda: load_base(str(base))):
            assert outcome(read)[0] == REFUSED, text[:60]


def test_spoilt_cards_of_heads(tmp_path, outcome):
    base = save_tiny_base(tmp_path / "base")
    head = save_tiny_draft(tmp_path / "head", base)
    loaded, card = load_base(str(base)), json.loads((head / "draft.json").read_text())
    objects = {
        (): card,
        ("drafter",): card["drafter"],
        ("drafter", "layer"): card["drafter"]["layer"],
    }
    for path in [(*outer, name) for outer, values in objects.items() for name in values]:
        for odd in ODD:
            changed = json.loads(json.dumps(card))
            within = changed
            for name in path[:-1]:
                within = within[name]
            before, within[path[-1]] = within[path[-1]], odd
            (head / "draft.json").write_text(json.dumps(changed))
            how, what = outcome(lambda: load_draft(str(head), loaded))
            if how == SILENT and len(path) > 1 and odd != {}:
                found = what.head.config
                for name in path[1:]:
                    found = getattr(found, name)
                found = list(found) if isinstance(found, tuple) else found
                assert found in (before, odd), (path, odd)
    for text in TEXTS:
        (head / "draft.json").write_bytes(text)
        assert outcome(lambda: load_draft(str(head), loaded))[0] == REFUSED, text[:60]


GOOD = b'{"prompt": "a", "response": "b"}'
READ = [
    *(
        GOOD + b"\r\n" + GOOD,
        b"\xef\xbb\xbf" + GOOD,
        GOOD.replace(b'"a"', b'"' + b"a" * 10**7 + b'"'),
    ),
    GOOD[:-1] + b"".join(b', "k%d": 1' % n for n in range(100_000)) + b"}",
]
UNREAD = [
    *(b"", b" \n\t\n\r\n", GOOD + b"\r" + GOOD, b"\x00" + GOOD, GOOD[:-3], GOOD * 2, GOOD + b","),
    *(b"[" + GOOD + b"]", DEEP, b'{"prompt": ' + DEEP, PAGE, POINTER, b"prompt,response\na,b\n"),
    *(GOOD.replace(b'"a"', x) for x in (b"NaN", b"9" * 9999, b'"\\ud83d"', b'"\x01"', b'"\xe9"')),
    *(GOOD.replace(b'"b"', b'"b", "prompt": "c"'), GOOD.decode().encode("utf-16"), b"null\n[]\n3"),
    b'{"prompt_ids": [-1], "output_ids": [1]}',
]  # fmt: skip


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".parquet"])
def test_odd_lines_of_data(tmp_path, outcome, ending):
    path = tmp_path / f"a{ending}"
    # Only these two are what their endings say.
    pack = {".jsonl": bytes, ".jsonl.gz": gzip.compress}.get(ending)
    for content in [*READ, *UNREAD]:
        path.write_bytes(content if pack is None else pack(content))
        how, what = outcome(lambda: read_records(str(path)))
        wanted = (SILENT, SAID) if content in READ and pack else (REFUSED,)
        assert how in wanted, content[:60]
        assert how == SILENT or len(what) < 1000, content[:60]
        outcome(lambda: read_prompt_files(str(path), strict=True))
    for name in odd_places(path):
        how, _ = outcome(lambda: read_records(str(path)))
        assert how == REFUSED or name.endswith("elsewhere"), name
