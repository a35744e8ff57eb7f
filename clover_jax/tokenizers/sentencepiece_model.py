"""A SentencePiece model, `tokenizer.model`, read without its library: data, no code.

The file is a protocol buffer, `ModelProto` of sentencepiece_model.proto; the numbers below are
those of its fields. Fields that encoding does not need are skipped.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from clover_jax.errors import UserError

BPE = 2  # TrainerSpec.ModelType


class Kind(enum.IntEnum):
    """The use of a piece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class TextPiece(NamedTuple):
    """One entry of the vocabulary; its place in the list is its id."""

    text: str
    score: float
    kind: Kind


class SentencePieceModel(NamedTuple):
    """The parts of a BPE model that encoding needs.

    byte_fallback: characters without a piece become pieces of their UTF-8 bytes.
    add_dummy_prefix: a text starts with a space more.
    remove_extra_whitespaces: no spaces at the ends, and single ones between.
    charsmap: characters to replace, as the library compiles them; b"" without.
    """

    pieces: tuple[TextPiece, ...]
    byte_fallback: bool
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    charsmap: bytes

    def texts(self, *kinds: Kind) -> list[str]:
        """Return the texts of the pieces of some kinds, in the order of their ids."""
        return [piece.text for piece in self.pieces if piece.kind in kinds]


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a model file.

    Raises UserError for a file that is none, or a model of another kind than BPE.
    """
    try:
        return _parse(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not a SentencePiece model that can be read: {error}") from error
    # Errors for a file that ends too soon, or is something else altogether.
    except (LookupError, TypeError, AttributeError, struct.error) as error:
        raise UserError(f"{path} is not a whole SentencePiece model") from error


def _parse(data: bytes) -> SentencePieceModel:
    # Three of the fields of ModelProto: pieces, trainer_spec and normalizer_spec.
    pieces, trainer, normalizer = [], {}, {}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(dict(_fields(value))))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))

    # Other kinds would be read without an error and encode otherwise.
    if not pieces:
        raise ValueError("it has no pieces")
    if trainer.get(3, 1) != BPE:
        raise ValueError("it is not of the BPE kind")
    if trainer.get(24) or not normalizer.get(5, True):
        raise ValueError("it marks spaces in another way than by a leading ▁")
    if any(piece.kind == Kind.UNUSED for piece in pieces):
        raise ValueError("it has unused pieces")

    # An absent field has the default of the .proto file.
    return SentencePieceModel(
        pieces=tuple(pieces),
        byte_fallback=bool(trainer.get(35, False)),
        add_dummy_prefix=bool(normalizer.get(3, True)),
        remove_extra_whitespaces=bool(normalizer.get(4, True)),
        charsmap=normalizer.get(2, b""),
    )


def _piece(fields: dict[int, Any]) -> TextPiece:
    # A float of four bytes, little-endian; one that is left out is 0.
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return TextPiece(fields[1].decode("utf-8"), score, Kind(fields.get(3, Kind.NORMAL)))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value): an integer for varints, else the bytes of the value."""
    at = 0
    value: int | bytes
    while at < len(data):
        # A field begins with its number and, in the lowest three bits, the type: how long it is.
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
        else:
            # Types 1 and 5 have 8 and 4 bytes, type 2 says its length.
            size, at = _varint(data, at) if wire_type == 2 else ({1: 8, 5: 4}[wire_type], at)
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise ValueError("it ends in the middle of a field")
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer that starts at a position, and the position behind it."""
    value, shift = 0, 0
    while True:
        # Seven bits a byte, the lowest first; the eighth says that more follow.
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number in it has no end")
