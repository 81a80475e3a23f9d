"""Whether a store can stand below an engine that is installed here, the command line for it, and
why a prompt missed.

Owns the checks of an engine and their words. Loads neither a model nor weights.
"""

import io
import json
import shlex
from collections.abc import Mapping, Sequence
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
from stratakv.connect.remote_code import refuse_code_elsewhere
from stratakv.connect.store_checks import store_check
from stratakv.connect.stores import open_engine_store
from stratakv.connect.why_miss import AskedPrompt, BlockHashes, look_up
from stratakv.connect.why_miss import lines_of as why_miss_lines
from stratakv.core.errors import ConfigError
from stratakv.core.familiar import meant
from stratakv.core.identity.file_stat import Kernel, boot_of_this_machine
from stratakv.core.identity.model_files import read_checkpoint
from stratakv.storage.backend import StorageBackend, StoreFormat
from stratakv.storage.urls import hidden

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
        if known:
            return Check("release", "fine", f"{package} {installed}")
        advice = (
            f"pip install {package}=={engine.tested[-1]}; or this one, if its interface is fine"
        )
        return Check("release", "untested", f"{package} {installed}; tested is {tested}", advice)
    return Check(
        "release",
        "bad",
        f"not installed beside this Python; tested is {tested}",
        "pip install stratakv into the environment of the engine, and run its bin/stratakv",
    )


def _interface(engine: SupportedEngine) -> Check:
    """An engine's modules may do anything when they are imported."""
    advice = f"a tested release ({', '.join(engine.tested)}), or a newer StrataKV"
    try:
        found = broken(engine)
    except Exception as error:  # noqa: BLE001 - whatever it is, the operator should see it
        text = f"{engine.adapter}: {type(error).__name__}: {error}"
        return Check("interface", "bad", text, advice)
    if found:
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
    helping = shlex.join([*ENGINES[setup.engine].program, "--help"])
    advice = f"other --engine-flags, of those that this lists: {helping}"
    try:
        with redirect_stderr(errors):
            values, rest = contract.parsed_flags(_arguments(setup))
        contract.check_flags(values)
    except ConfigError as error:
        return Check("flags", "bad", str(error), advice)
    except SystemExit:
        lines = errors.getvalue().strip().splitlines() or ["they are not taken"]
        return Check("flags", "bad", lines[-1], advice)
    except Exception as error:  # noqa: BLE001 - whatever it is, the operator should see it
        return Check("flags", "bad", f"{type(error).__name__}: {error}", advice)
    if rest:
        return Check("flags", "bad", _unknown(setup.engine, rest, values), advice)
    return Check("flags", "fine", f"{setup.engine} takes them")


def _unknown(engine: str, rest: Sequence[str], values: Mapping[str, Any]) -> str:
    """``rest``: words that no flag takes. ``values``: by names of flags that there are."""
    known = [name.replace("_", "-") for name in values]
    found: list[str] = []
    for word in rest:
        flag = word.partition("=")[0]
        if flag.startswith("-"):
            near = meant(flag, known)
            which = f" (did you mean --{near}?)" if near else ""
            found.append(f"{flag}: no flag of {engine}{which}")
    return "; ".join(found) or f"{shlex.join(rest)}: no flag of {engine} takes it"


def _model(name: str) -> Check:
    advice = "the directory of a checkpoint, with its config.json and safetensors"
    directory = Path(name)
    if not directory.is_dir():
        return Check("model", "bad", f"{name} is no directory of this machine", advice)
    try:
        refuse_code_elsewhere("MODEL", directory)
        found = read_checkpoint(directory.resolve(), Kernel(boot=boot_of_this_machine()))
    except ConfigError as error:
        return Check("model", "bad", str(error), "a copy of the directory, mended as it says")
    except (OSError, ValueError) as error:
        return Check("model", "bad", f"{name}: {error}", advice)
    size = sum(file.stat.size for file in found.weights)
    return Check("model", "fine", f"{len(found.weights)} files of weights, {size:,} bytes")
