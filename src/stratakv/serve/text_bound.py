"""How many tokens a text has at least, without tokenizing it.

Owns the bound, and for which tokenizers there is one. Must never say more than the tokenizer would
give: a text that fits is not refused.

A byte b lies in tokens of at most L(b) bytes. Of a token's bytes, the sum of 1 / L(b) is therefore
at most 1, and the sum over a text at most its number of tokens.
"""

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet of byte-level BPE: printable bytes stand for themselves, the rest follow
    from U+0100 in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(rest)
    }


BYTE_OF_CHAR: Final = _byte_alphabet()


BLOCK_BYTES: Final = 1 << 20
SPACE: Final = "\u2581"
"""What SentencePiece writes for a space."""
KEEPING: Final = frozenset({"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"})
"""Pre-tokenizers that drop nothing, unless their ``behavior`` says so."""


@dataclass(frozen=True, slots=True, eq=False)
class TextBound:
    """``share``: least share of a token that a byte takes, float64 [256]. ``normal_form``: the text
    must be in NFC, which the tokenizer would bring it into."""

    share: NDArray[np.float64]
    normal_form: bool

    def least_tokens(self, text: str) -> int:
        if self.normal_form and not text.isascii() and not _in_nfc(text):
            return 0
        data = np.frombuffer(text.encode(), np.uint8)
        counts = np.zeros(256, np.int64)
        for at in range(0, len(data), BLOCK_BYTES):
            counts += np.bincount(data[at : at + BLOCK_BYTES], minlength=256)
        return int(np.ceil(counts @ self.share - 1e-3))


def bound_of(fast: FastTokenizer) -> TextBound | None:
    """None where a token may stand for any number of bytes, or that is not known."""
    normalizers, splits = _parts(fast.normalizer), _parts(fast.pre_tokenizer)
    model = fast.model
    if not isinstance(model, BPE) or model.end_of_word_suffix or model.continuing_subword_prefix:
        return None
    if any(one["type"] not in KEEPING or one.get("behavior") == "Removed" for one in splits):
        return None
    vocab = fast.get_vocab(with_added_tokens=False)
    kinds = {str(one["type"]) for one in normalizers}
    if any(one["type"] == "ByteLevel" for one in splits):
        if not kinds <= {"NFC"} or not vocab.keys() >= BYTE_OF_CHAR.keys():
            return None
        pieces = [_bytes_of(token) for token in vocab]
    else:
        spaces = all(_writes_spaces(one) for one in normalizers)
        if not spaces or not model.byte_fallback or not vocab.keys() >= BYTE_TOKENS:
            return None
        # A space of the text has become three bytes: whichever it was, it is in that piece.
        pieces = [t.encode() + (b" " if SPACE in t else b"") for t in vocab]
    added = fast.get_added_tokens_decoder().values()
    share = _shares([*pieces, *(token.content.encode() for token in added)])
    if any(token.lstrip or token.rstrip for token in added):  # takes any number of spaces
        share[[*b" \t\n\r\v\f\x1c\x1d\x1e\x1f", *range(128, 256)]] = 0
    return TextBound(share, normal_form="NFC" in kinds)


BYTE_TOKENS: Final = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def _parts(component: object) -> list[dict[str, object]]:
    """A normalizer or pre-tokenizer as its file spells it, sequences resolved."""
    if component is None:
        return []
    state = cast("dict[str, object]", json.loads(component.__getstate__()))  # type: ignore[attr-defined]
    return _flat(state)


def _flat(state: dict[str, object]) -> list[dict[str, object]]:
    if state["type"] != "Sequence":
        return [state]
    inner = state.get("normalizers") or state.get("pretokenizers") or []
    return [part for one in cast("list[dict[str, object]]", inner) for part in _flat(one)]


def _writes_spaces(state: dict[str, object]) -> bool:
    if state["type"] == "Prepend":
        return True
    replaced = {"pattern": {"String": " "}, "content": SPACE}
    return state["type"] == "Replace" and {k: state[k] for k in replaced} == replaced


def _bytes_of(token: str) -> bytes:
    """Of a byte-level token; one in other characters matches no text."""
    found = [BYTE_OF_CHAR.get(char) for char in token]
    return b"" if None in found else bytes(cast("list[int]", found))


def _shares(pieces: Sequence[bytes]) -> NDArray[np.float64]:
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    longest = np.ones(256, np.int64)
    data = np.frombuffer(b"".join(pieces), np.uint8)
    np.maximum.at(longest, data, np.repeat(lengths, lengths))
    return 1 / longest


def _in_nfc(text: str) -> bool:
    return unicodedata.is_normalized("NFC", text)
