"""How byte-level tokenizers spell bytes. Owns GPT-2's alphabet."""

from typing import Final


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet of byte-level BPE: printable bytes stand for themselves, the rest follow
    from U+0100 in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(rest)
    }


BYTE_OF_CHAR: Final = _byte_alphabet()
