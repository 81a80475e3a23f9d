"""Mooncake-format traces: who asked for how much, when, and which blocks they had in common.

Owns the format: JSON lines, 512 tokens behind one hash id. Must not know caches.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final

from stratakv.core.errors import ConfigError

BLOCK_TOKENS: Final = 512
FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
ALLOWED: Final = "allowed is a Mooncake-format trace, JSON lines"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """``hash_ids``: one per 512 tokens of the prompt, the last block may be partly filled. Equal
    ids are equal blocks after equal prefixes."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def total_tokens(self) -> int:
        return self.input_length + self.output_length

    @property
    def full_blocks(self) -> tuple[int, ...]:
        return self.hash_ids[: self.input_length // BLOCK_TOKENS]


def read_trace(path: Path, flag: str, most: int | None = None) -> list[TraceRequest]:
    """Requests of a file in its order, from at most its first ``most`` lines. ConfigError begins
    with ``flag`` and names the line that cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:most]
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read: {error.strerror}; {ALLOWED}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path}: is not UTF-8 text; {ALLOWED}") from error
    requests: list[TraceRequest] = []
    above: dict[int, int] = {}  # by hash id: the one before it
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{flag} {path}, line {number}"
        request = _request(line, where)
        if requests and request.timestamp_ms < requests[-1].timestamp_ms:
            raise ConfigError(
                f"{where}: timestamp lies before the line above; allowed are times that do not fall"
            )
        before = -1
        for block in request.hash_ids:
            if above.setdefault(block, before) != before:
                raise ConfigError(
                    f"{where}: hash id {block} follows another block than before; allowed are "
                    "ids that mean one prefix"
                )
            before = block
        requests.append(request)
    if not requests:
        raise ConfigError(f"{flag} {path}: holds no request; {ALLOWED}")
    return requests


def _request(line: str, where: str) -> TraceRequest:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON; {ALLOWED}") from error
    if not isinstance(data, dict) or not all(name in data for name in FIELDS):
        raise ConfigError(f"{where}: allowed is an object with {', '.join(FIELDS)}")
    timestamp, prompt, answer, blocks = (data[name] for name in FIELDS)
    if not isinstance(timestamp, int | float) or not isfinite(timestamp) or timestamp < 0:
        raise ConfigError(f"{where}: timestamp {timestamp!r}: allowed are milliseconds from 0 up")
    if not _is_count(prompt) or prompt < 1:
        raise ConfigError(f"{where}: input_length {prompt!r}: allowed are whole numbers from 1 up")
    if not _is_count(answer):
        raise ConfigError(f"{where}: output_length {answer!r}: allowed are whole numbers from 0 up")
    if not isinstance(blocks, list) or not all(_is_count(block) for block in blocks):
        raise ConfigError(f"{where}: hash_ids: allowed are whole numbers from 0 up")
    if len(blocks) != -(-prompt // BLOCK_TOKENS):
        raise ConfigError(
            f"{where}: {len(blocks)} hash ids for {prompt} tokens; allowed is one for each "
            f"{BLOCK_TOKENS}"
        )
    return TraceRequest(
        timestamp_ms=float(timestamp),
        input_length=prompt,
        output_length=answer,
        hash_ids=tuple(blocks),
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def write_trace(path: Path, requests: Sequence[TraceRequest]) -> None:
    """One line per request, as ``read_trace`` and other tools read them."""
    with path.open("w", encoding="utf-8") as file:
        for one in requests:
            values = (round(one.timestamp_ms), one.input_length, one.output_length, one.hash_ids)
            file.write(json.dumps(dict(zip(FIELDS, values, strict=True))) + "\n")
