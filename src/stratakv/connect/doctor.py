"""Whether a store can stand below an engine that is installed here, the command line for it, and
why a prompt missed.

Owns the checks and their words. Loads neither a model nor weights; writes nothing to a store but
one page of its own, which it removes, and nothing at all to a file store that is there: it would
make room for that page.
"""

import io
import json
import os
import secrets
import shlex
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from stratakv.connect.checks import Check, check_lines
from stratakv.connect.contract import broken
from stratakv.connect.engines import ENGINES, SupportedEngine
from stratakv.connect.namespace_records import load_records
from stratakv.connect.stores import open_engine_store
from stratakv.connect.why_miss import AskedPrompt, BlockHashes, look_up
from stratakv.connect.why_miss import lines_of as why_miss_lines
from stratakv.core.errors import ConfigError, StorageError
from stratakv.core.identity.file_stat import Kernel, boot_of_this_machine
from stratakv.core.identity.model_files import read_checkpoint
from stratakv.core.ids import GroupId, PageKey
from stratakv.core.units import format_bytes
from stratakv.storage.backend import (
    ObjectKey,
    ReadStatus,
    StorageBackend,
    StoreFormat,
    WriteStatus,
)
from stratakv.storage.ends import close_ends
from stratakv.storage.registry import plugin_schemes
from stratakv.storage.store_key import read_key
from stratakv.storage.urls import FileUrl, hidden, parse_storage_url

PROBE_BYTES: Final = 4096
APART: Final = ("cache_salt", "extra_key")
"""Fields of a request that keep its pages apart; the second is SGLang's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What is to run: an engine by name, a model, a store, bytes of the engine's host tier, and
    more flags of the engine's."""

    engine: str
    model: str
    storage: str
    storage_key_file: str | None
    host_bytes: int
    flags: tuple[str, ...] = ()


def examine(setup: EngineSetup) -> Sequence[Check]:
    """Every check, also after one has failed."""
    engine = ENGINES[setup.engine]
    interface = _interface(engine)
    return [
        _release(engine),
        interface,
        *([_flags(setup)] if interface.verdict == "fine" else []),
        _model(setup.model),
        store_check(setup.storage, setup.storage_key_file),
    ]


def command_line(setup: EngineSetup) -> str:
    """What starts the engine over that store, for a shell."""
    engine = ENGINES[setup.engine]
    return shlex.join([*engine.program, *_arguments(setup)])


def _arguments(setup: EngineSetup) -> list[str]:
    tier = {"storage": setup.storage}
    if setup.storage_key_file is not None:
        tier["storage_key_file"] = setup.storage_key_file
    given = ENGINES[setup.engine].arguments(setup.model, tier, setup.host_bytes)
    return [*given, *setup.flags]


def lines_of(checks: Sequence[Check], setup: EngineSetup) -> list[str]:
    """For people."""
    return [*check_lines(checks), "", command_line(setup)]


def read_prompt(name: str) -> AskedPrompt:
    """Of a file; ConfigError where it has none."""
    try:
        found: object = json.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--why-miss {name}: {error}; allowed is JSON, token ids") from error
    given: dict[str, Any] = dict(found) if isinstance(found, dict) else {"prompt": found}
    tokens: object = given.pop("prompt", None)
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ConfigError(f"--why-miss {name}: allowed is JSON, a list of token ids")
    if unknown := sorted(given.keys() - set(APART)):
        raise ConfigError(
            f"--why-miss {name} {', '.join(unknown)}: allowed are prompt, {', '.join(APART)}"
        )
    for field, value in given.items():
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"--why-miss {name} {field} {value}: allowed is text")
    return AskedPrompt(tokens=tokens, **given)


def explain(setup: EngineSetup, prompt: AskedPrompt) -> list[str]:
    """Why a prompt is computed, for people. ConfigError where nothing is known."""
    where = hidden(setup.storage)
    records = [one for one in load_records(setup.engine) if one.storage == where]
    if not records:
        raise ConfigError(
            f"--why-miss: no start of {setup.engine} over {where} is recorded on this machine; "
            "allowed after one, by the same user"
        )
    try:
        hashes: BlockHashes = import_module(ENGINES[setup.engine].hashes).block_hashes
    except ImportError as error:
        raise ConfigError(
            f"--why-miss: {error}; allowed where {setup.engine} is installed beside this Python"
        ) from error

    def opening(form: StoreFormat) -> StorageBackend:
        ends = open_engine_store(setup.storage, setup.storage_key_file, form)
        if ends.writing is not ends.reading:
            ends.writing.close()
        return ends.reading

    found = [look_up(one, prompt, hashes, opening) for one in records]
    shared = look_up(records[0], prompt.shared, hashes, opening)
    return why_miss_lines(found, len(prompt.tokens), shared)


def _release(engine: SupportedEngine) -> Check:
    tested = ", ".join(engine.tested)
    for package in engine.packages:
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        known = installed.partition("+")[0] in engine.tested
        text = f"{package} {installed}" + ("" if known else f"; tested is {tested}")
        return Check("release", "fine" if known else "untested", text)
    return Check("release", "bad", f"not installed beside this Python; tested is {tested}")


def _interface(engine: SupportedEngine) -> Check:
    """An engine's modules may do anything when they are imported."""
    try:
        found = broken(engine)
    except Exception as error:  # noqa: BLE001 - whatever it is, the operator should see it
        return Check("interface", "bad", f"{engine.adapter}: {type(error).__name__}: {error}")
    if found:
        advice = f"a tested release ({', '.join(engine.tested)}), or a newer StrataKV"
        return Check("interface", "bad", "; ".join(found), advice)
    return Check(
        "interface",
        "fine",
        f"{', '.join(engine.classes)} of {engine.adapter}: methods, names and behaviour are those "
        "that it relies on",
    )


def _flags(setup: EngineSetup) -> Check:
    """Of the command line that is printed: what the engine's own parser says, and what the tier
    would refuse at the start."""
    contract, errors = import_module(ENGINES[setup.engine].contract), io.StringIO()
    try:
        with redirect_stderr(errors):
            values, rest = contract.parsed_flags(_arguments(setup))
        contract.check_flags(values)
    except ConfigError as error:
        return Check("flags", "bad", str(error))
    except SystemExit:
        lines = errors.getvalue().strip().splitlines() or ["they are not taken"]
        return Check("flags", "bad", lines[-1])
    except Exception as error:  # noqa: BLE001 - whatever it is, the operator should see it
        return Check("flags", "bad", f"{type(error).__name__}: {error}")
    if rest:
        text = f"{shlex.join(rest)}: not the engine's; its server may know them"
        return Check("flags", "untested", text)
    return Check("flags", "fine", f"{setup.engine} takes them")


def _model(name: str) -> Check:
    directory = Path(name)
    if not directory.is_dir():
        return Check("model", "bad", f"{name} is no directory of this machine")
    try:
        found = read_checkpoint(directory.resolve(), Kernel(boot=boot_of_this_machine()))
    except (OSError, ValueError) as error:
        return Check("model", "bad", f"{name}: {error}")
    size = sum(file.stat.size for file in found.weights)
    return Check("model", "fine", f"{len(found.weights)} files of weights, {size:,} bytes")


def store_check(url: str, key_file: str | None) -> Check:
    """Whether a page can be written there, read and removed; of a file store that is there, whether
    this user may write to it."""
    try:
        parsed = parse_storage_url(url, plugin_schemes())
        if isinstance(parsed, FileUrl) and _is_used(parsed.directory):
            if key_file is not None:
                read_key(key_file)
            return _used_store(parsed)
    except ConfigError as error:
        return Check("store", "bad", str(error))
    except OSError as error:
        return Check("store", "bad", f"{hidden(url)}: {error.strerror}")
    form = StoreFormat(spec_digest=secrets.token_bytes(16), page_bytes=(PROBE_BYTES,))
    try:
        ends = open_engine_store(url, key_file, form)
    except ConfigError as error:
        return Check("store", "bad", str(error))
    try:
        problem = _probe(ends.writing, ends.reading)
    except StorageError as error:
        problem = str(error)
    finally:
        close_ends(ends)
    if problem:
        return Check("store", "bad", f"{hidden(url)}: {problem}")
    text = f"{hidden(url)}: a page was written, read and removed"
    return _room(parsed, text) if isinstance(parsed, FileUrl) else Check("store", "fine", text)


def _room(url: FileUrl, text: str) -> Check:
    """Whether the disk has what the quota allows."""
    used = sum(path.stat().st_blocks * 512 for path in url.directory.rglob("*") if path.is_file())
    disk = os.statvfs(url.directory)
    free = disk.f_bavail * disk.f_frsize
    quota = f"quota {format_bytes(url.quota_bytes)}"
    if url.quota_bytes <= used + free:
        return Check("store", "fine", f"{text}; {quota}, of which {format_bytes(used)} are used")
    return Check(
        "store",
        "poor",
        f"{text}; {quota}, but the disk has no more than {format_bytes(free)} free",
        "a quota that the disk can hold: a full disk refuses pages, and evicts none",
    )


def file_directory(url: str) -> Path | None:
    """Of a file store; None for another, and for what is no store's URL."""
    try:
        parsed = parse_storage_url(url, plugin_schemes())
    except ConfigError:
        return None
    return parsed.directory if isinstance(parsed, FileUrl) else None


def _is_used(directory: Path) -> bool:
    """OSError where this user may not look."""
    try:
        return any(directory.iterdir())
    except FileNotFoundError:
        return False


def _used_store(url: FileUrl) -> Check:
    directory = url.directory
    if os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return _room(url, f"{directory}: is there; nothing was written to it")
    return Check(
        "store", "bad", f"{directory}: is there", "a directory that this user may write to"
    )


def _probe(writing: StorageBackend, reading: StorageBackend) -> str:
    """What does not work; empty where all does."""
    keys = [ObjectKey(PageKey(secrets.token_bytes(32)), GroupId(0))]
    page, back = secrets.token_bytes(PROBE_BYTES), bytearray(PROBE_BYTES)
    if writing.write(keys, [memoryview(page)]) != [WriteStatus.STORED]:
        return "a page was not stored"
    if reading.read(keys, [memoryview(back)]) != [ReadStatus.HIT] or bytes(back) != page:
        return "a page did not come back"
    writing.remove(keys)
    return ""
