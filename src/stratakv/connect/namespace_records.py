"""Which namespaces engines of this machine have used lately, so that a miss can be explained.

Owns files in the user's cache directory, one per namespace: a name is a hash, and what was hashed
cannot be read back from a store. Must not be needed: an engine starts as well without them.
"""

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from stratakv.core.identity.digest_cache import cache_directory

log = logging.getLogger(__name__)

MOST: Final = 256
"""Records that are kept; the oldest go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """Pages of one cache group or pool. ``page_bytes``: of each group of its store. ``trailing``:
    how many of the last pages an end needs; None: all."""

    name: str
    digest: str
    page_bytes: tuple[int, ...]
    group: int
    shard: int
    page_tokens: int
    trailing: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceRecord:
    """``fields``: what was hashed into its names. ``hash_tokens``: that one hash of the engine is
    of. ``started_s``: wall time of the last start."""

    engine: str
    storage: str
    started_s: float
    fields: Mapping[str, str]
    hash_tokens: int
    hash_name: str
    parts: tuple[StoredPart, ...]

    @property
    def name(self) -> str:
        return self.parts[0].digest[:12]


def records_directory() -> Path | None:
    """Beside the digests of weights; None without a home."""
    weights = cache_directory()
    return None if weights is None else weights.parent / "namespaces"


def save_record(record: NamespaceRecord) -> None:
    """In place of an older one of that namespace. Logs what prevents it."""
    directory = records_directory()
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(record, directory / f"{record.engine}-{record.parts[0].digest[:32]}.json")
        for old in _newest(directory)[MOST:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.info("the namespace is not recorded: %s", error)


def _write(record: NamespaceRecord, path: Path) -> None:
    """All of it, or nothing."""
    end, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(end, "w") as file:
            json.dump(asdict(record), file)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load_records(engine: str) -> Sequence[NamespaceRecord]:
    """Of that engine, the newest first; what cannot be read is left out."""
    directory = records_directory()
    found: list[NamespaceRecord] = []
    for path in [] if directory is None else _newest(directory):
        try:
            record = _record(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if record.engine == engine:
            found.append(record)
    return sorted(found, key=lambda record: -record.started_s)


def _record(given: dict[str, Any]) -> NamespaceRecord:
    parts: list[StoredPart] = []
    for part in given["parts"]:
        part["page_bytes"] = tuple(part["page_bytes"])
        parts.append(StoredPart(**part))
    given["parts"] = tuple(parts)
    return NamespaceRecord(**given)


def _newest(directory: Path) -> list[Path]:
    """Another engine may remove one meanwhile."""
    found: list[tuple[float, Path]] = []
    for path in directory.glob("*.json"):
        with suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]
