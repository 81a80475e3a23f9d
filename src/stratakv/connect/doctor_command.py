"""``stratakv doctor``: flags, what it prints, and its exit codes. Owns these; checks nothing."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stratakv.connect.engines import ENGINES
from stratakv.core.choices import check_written
from stratakv.core.errors import ConfigError
from stratakv.core.units import parse_bytes

if TYPE_CHECKING:
    from stratakv.connect.checks import Check


def add_verb(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """``add_parser``: of the verbs of ``stratakv``."""
    parser = add_parser(
        "doctor",
        help="check this machine, or a store below vLLM or SGLang",
        description="Without ENGINE: check versions, memory, limits and threads of this machine, "
        "and with --storage that store and the speed of its disk. With ENGINE: check its release, "
        "that its classes and functions are those that StrataKV relies on, its flags, the model "
        "and the store, and print the command that starts it. "
        "Exit code 0: nothing that does not work; 1: something; 2: a flag that cannot be "
        "honoured.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "engine", nargs="?", choices=tuple(ENGINES), metavar="ENGINE", help="vllm or sglang"
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="of ENGINE: directory with its safetensors"
    )
    parser.add_argument("--storage", metavar="URL", help="as of serve; ENGINE needs it")
    parser.add_argument("--storage-key-file", metavar="FILE", help="as of serve")
    parser.add_argument(
        "--host-memory",
        default="8GiB",
        metavar="SIZE",
        help="of ENGINE: bytes of its own host tier, above the store (default: 8GiB)",
    )
    parser.add_argument(
        "--engine-flags",
        default="",
        metavar="FLAGS",
        help="of ENGINE: more of its own flags, as one text: checked, and put into the command",
    )
    parser.add_argument(
        "--why-miss",
        metavar="FILE",
        help="of ENGINE: a prompt, as JSON token ids: instead, which page or which setting stops "
        "its reuse",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the findings there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    check_written("--json", arguments.json)
    if arguments.engine is None:
        return _machine(arguments)
    for flag, given in (("MODEL", arguments.model), ("--storage", arguments.storage)):
        if given is None:
            raise ConfigError(f"{flag} is missing; allowed with {arguments.engine} is one")
    from stratakv.connect.doctor import (  # noqa: PLC0415
        EngineSetup,
        command_line,
        examine,
        explain,
        lines_of,
        read_prompt,
    )

    setup = EngineSetup(
        engine=arguments.engine,
        model=arguments.model,
        storage=arguments.storage,
        storage_key_file=arguments.storage_key_file,
        host_bytes=parse_bytes(arguments.host_memory, "--host-memory"),
        flags=_words(arguments.engine_flags),
    )
    if arguments.why_miss is not None:
        lines = explain(setup, read_prompt(arguments.why_miss))
        sys.stdout.write("\n".join(lines) + "\n")
        _write(arguments.json, {"lines": lines})
        return 0
    checks = examine(setup)
    return _ended(checks, lines_of(checks, setup), arguments.json, command_line(setup))


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"--engine-flags {text}: {error}; allowed are a shell's words") from error


def _machine(arguments: argparse.Namespace) -> int:
    from stratakv.connect.checks import check_lines  # noqa: PLC0415
    from stratakv.connect.machine import disk_check, look, machine_checks  # noqa: PLC0415
    from stratakv.connect.store_checks import file_directory, store_check  # noqa: PLC0415

    for flag, given in (
        ("--why-miss", arguments.why_miss),
        ("--engine-flags", arguments.engine_flags or None),
        ("--storage-key-file", None if arguments.storage else arguments.storage_key_file),
    ):
        if given is not None:
            allowed = "--storage" if flag == "--storage-key-file" else "vllm or sglang"
            raise ConfigError(f"{flag}: allowed with {allowed}")
    checks = [*machine_checks(look())]
    if (url := arguments.storage) is not None:
        checks.append(store_check(url, arguments.storage_key_file))
        if (directory := file_directory(url)) is not None:
            checks.append(disk_check(directory))
    return _ended(checks, check_lines(checks), arguments.json)


def _ended(
    checks: "Sequence[Check]", lines: Sequence[str], path: str | None, command: str | None = None
) -> int:
    from stratakv.connect.checks import check_figures, exit_code  # noqa: PLC0415

    sys.stdout.write("\n".join(lines) + "\n")
    figures = dict(check_figures(checks))
    _write(path, figures if command is None else figures | {"command": command})
    return exit_code(checks)


def _write(path: str | None, figures: object) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
