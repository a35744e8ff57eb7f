"""Tokenizers of folders that hold a SentencePiece model only: older Llamas, Vicuna, Baichuan.

The ids are those that the SentencePiece library gives, and special tokens are cut out of a text
before, as the tokenizer classes that these folders name do. Baichuan's class is code in its folder,
which does no more than that; it is never run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from clover_jax.errors import UserError
from clover_jax.storage.json_files import read_json_object
from clover_jax.tokenizers.sentencepiece_model import Kind, SentencePieceModel, read_sentencepiece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_FILE = "tokenizer.model"
SPACE = "▁"
# Classes that do what is done here, and for configs that name none the models that have them.
CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast", "BaiChuanTokenizer", "BaichuanTokenizer")
MODEL_TYPES = ("llama", "mistral", "baichuan")
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def is_sentencepiece_folder(directory: Path) -> bool:
    """Return whether a folder's tokenizer is one that `load_sentencepiece` reads."""
    # A tokenizer.json is read by transformers itself.
    if (directory / "tokenizer.json").exists() or not (directory / MODEL_FILE).is_file():
        return False
    name = _settings(directory).get("tokenizer_class")
    if name is not None:
        return name in CLASSES
    return _optional_json(directory / "config.json").get("model_type") in MODEL_TYPES


def load_sentencepiece(directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of such a folder.

    Raises UserError for a model file that cannot be read, or an added token whose id is taken.
    """
    from transformers import PreTrainedTokenizerFast

    # The model has the words; which of them are special, the configs say.
    settings = _settings(directory)
    model = read_sentencepiece(directory / MODEL_FILE)
    roles = {name: _content(settings[name]) for name in _ROLES if settings.get(name)}
    tokenizer = build_tokenizer(model, legacy=settings.get("legacy") is not False)
    # Special: control pieces, and pieces of the model to which the configs give roles.
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys([*model.texts(Kind.CONTROL), *roles.values()])
            if tokenizer.token_to_id(text) is not None
        ]
    )

    # Only now: added tokens take the ids after the model's.
    _add_tokens(tokenizer, _added_tokens(directory, settings), directory)
    tokenizer.post_processor = _ends(tokenizer, settings, roles)

    template = directory / "chat_template.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=(
            template.read_text(encoding="utf-8")
            if template.is_file()
            else settings.get("chat_template")
        ),
        clean_up_tokenization_spaces=False,
        **roles,
    )


def build_tokenizer(model: SentencePieceModel, legacy: bool = True) -> Tokenizer:
    """Return a tokenizer that encodes as the model's library does.

    legacy: where special tokens cut a text, each part starts with the model's space, as Llama's
        first tokenizers did it; else the start of the text only.
    """
    vocabulary = {piece.text: id_ for id_, piece in enumerate(model.pieces)}
    symbols = model.texts(Kind.USER_DEFINED)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            merges_of(model),
            unk_token=next(iter(model.texts(Kind.UNKNOWN)), None),
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
            ignore_merges=bool(symbols),  # a symbol is one token, which nothing merges to
        )
    )
    tokenizer.normalizer = _normalizer(model, legacy)

    # Cut before merging, where a part must not merge with its neighbours.
    parts: list[pre_tokenizers.PreTokenizer] = []
    if model.add_dummy_prefix and not legacy:
        parts.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False))
    if symbols:
        # The pattern takes the first that fits, the library the longest.
        longest_first = sorted(map(re.escape, symbols), key=len, reverse=True)
        parts.append(pre_tokenizers.Split(Regex("|".join(longest_first)), "isolated"))
    if parts:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = _decoder(model)
    return tokenizer


def merges_of(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Return the pairs of pieces that merge into a piece, those of the highest score first.

    Example: of the pieces a, b, ab (score 0), c and abc (score -1) merge (a, b), then (ab, c).
    """
    # SentencePiece merges by score alone, and leaves out control and byte pieces.
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind == Kind.NORMAL}
    order = {text: index for index, text in enumerate(scores)}
    # Pairs of all pieces together: where scores are equal, the ids of the parts decide.
    pairs = [
        (-score, order[text[:cut]], order[text[cut:]], text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]


def _normalizer(model: SentencePieceModel, legacy: bool) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    # In the library's order: characters are replaced, then spaces, then marked.
    if model.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if model.add_dummy_prefix and legacy:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _decoder(model: SentencePieceModel) -> decoders.Decoder:
    # Bytes are joined before the space at the start is dropped: it may be a byte's.
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _ends(
    tokenizer: Tokenizer, settings: dict[str, Any], roles: dict[str, str]
) -> processors.PostProcessor | None:
    """Return what puts the tokens of start and end around a text, as the settings ask."""
    # Defaults of transformers' Llama tokenizers: BOS at the start, no EOS.
    bos = roles.get("bos_token") if settings.get("add_bos_token", True) else None
    eos = roles.get("eos_token") if settings.get("add_eos_token", False) else None
    if not bos and not eos:
        return None
    single = [text for text in (bos, "$A", eos) if text]
    ids = [(text, tokenizer.token_to_id(text)) for text in (bos, eos) if text]
    return processors.TemplateProcessing(single=single, special_tokens=ids)


def _added_tokens(directory: Path, settings: dict[str, Any]) -> dict[int, AddedToken]:
    """Return id -> token of those that the folder adds to the model's."""
    added = {
        id_: AddedToken(text, normalized=False)
        for text, id_ in _optional_json(directory / "added_tokens.json").items()
    }
    for id_, fields in (settings.get("added_tokens_decoder") or {}).items():
        flags = {name: bool(fields.get(name)) for name in ("lstrip", "rstrip", "special")}
        added[int(id_)] = AddedToken(fields["content"], normalized=False, **flags)
    # By id: tokens are added one after the other and take the next free id.
    return dict(sorted(added.items()))


def _add_tokens(tokenizer: Tokenizer, added: dict[int, AddedToken], directory: Path) -> None:
    for wanted, token in added.items():
        tokenizer.add_tokens([token])
        # The library gives the next free id, or the one of a piece with this text.
        given = tokenizer.token_to_id(token.content)
        if given is None:
            raise UserError(f"{directory}: its added token with id {wanted} is an empty text")
        if given != wanted:
            raise UserError(
                f"{directory}: its added token {token.content!r} should have id {wanted}, but "
                f"{MODEL_FILE} has {given} for it or places up to {given - 1} only"
            )


def _settings(directory: Path) -> dict[str, Any]:
    """Return tokenizer_config.json; what it leaves out is taken from special_tokens_map.json."""
    special = _optional_json(directory / "special_tokens_map.json")
    return special | _optional_json(directory / "tokenizer_config.json")


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _content(token: str | dict[str, Any]) -> str:
    """Return the text of a special token, which is stored as such or with its flags."""
    return token["content"] if isinstance(token, dict) else str(token)
