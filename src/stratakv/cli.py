"""``stratakv serve | route | plan | bench | fsck``. Owns flags and exit codes; decides nothing.

Exit codes: 0 done, 1 an engine or a rank died or a store has damage that was not mended, 2 a flag,
a model or a store that cannot be honoured, 130 interrupted before there was a server to drain.
"""

import argparse
import json
import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

from stratakv.core.choices import check_count
from stratakv.core.config import EngineConfig, RouteConfig, ServerConfig
from stratakv.core.errors import ConfigError, RankLostError, StorageError
from stratakv.core.flag_help import HELP, METAVAR, RENAMED

Record = TypeVar("Record")


class _Parser(argparse.ArgumentParser):
    """One that reports what it does not know itself: a verb's usage, not that of all verbs."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - one of its forms
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        into = argparse.Namespace() if namespace is None else namespace
        known, unknown = super().parse_known_args(args, into)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


class _Number(argparse.Action):
    """What argparse's ``type`` would be, which words a refusal itself."""

    kind: type[int | float] = float
    allowed = "a number"

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        del parser
        flag = option_string or self.option_strings[0]
        try:
            setattr(namespace, self.dest, self.kind(str(values)))
        except ValueError:
            raise ConfigError(f"{flag} {values}: allowed is {self.allowed}") from None


class _Whole(_Number):
    kind = int
    allowed = "a whole number"


class _Renamed(argparse.Action):
    """A flag that has another name now; refused, so that nobody's server changes unseen."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        old = self.option_strings[0]
        parser.error(f"{old}: its name is {RENAMED[old.removeprefix('--')]} now")


_NUMBERS: Final = {"int": _Whole, "float": _Number}
SERVE_MODULES: Final = (
    "torch", "transformers", "safetensors", "tokenizers", "jinja2", "starlette", "uvicorn", "h11",
    "prometheus_client", "tqdm",
)  # fmt: skip
"""What the extra ``serve`` brings, by the names that are imported."""
ROUTE_MODULES: Final = ("httpx", "starlette", "uvicorn", "h11")
"""The same of the extra ``route``."""
BENCHES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "tree": ("match, lease, insert, evict of the prefix tree", ()),
    "transfer": ("copies between device and host", ()),
    "serve": (
        "the engine by cache tier, beside Hugging Face's, and to the first token",
        ("trace", "model"),
    ),
    "policy": ("token hit rates of the eviction policies on a trace", ()),
    "storage": ("pages into a file store and back, beside a raw loop", ("directory", "redis")),
    "imports": ("the library's packages, beside NumPy alone", ()),
    "load": (
        "a model from disk with its identity, beside Hugging Face's loader alone",
        ("directory",),
    ),
    "disagg": ("prompts computed elsewhere: admission by group, and bytes", ()),
    "ranks": ("what ranks exchange in a step, beside bare collectives", ("tp",)),
    "http": ("how long others wait while a server works on a body that takes long", ("model",)),
}
"""What each part of ``bench`` measures, and its flags."""
_BENCH_FLAGS: Final[Mapping[str, dict[str, Any]]] = {
    "trace": {"metavar": "FILE", "help": "a Mooncake-format trace to replay"},
    "model": {"metavar": "DIR", "help": "a model directory; default: built-in"},
    "directory": {
        "type": Path,
        "metavar": "DIR",
        "help": "where its files lie meanwhile; default: the one for temporary files",
    },
    "redis": {"metavar": "URL", "help": "also measure this server"},
    "tp": {"action": _Whole, "default": 2, "metavar": "INT", "help": "ranks (default: 2)"},
}
LIBRARY_BENCHES: Final = ("tree", "policy", "imports")
"""Parts of ``bench`` that need no more than the library."""
SIZING: Final = (
    "page_tokens", "dtype", "cache", "device_memory", "host_memory", "host_ratio", "max_running",
    "max_model_len", "step_tokens", "chunk_tokens", "chat_tokens", "snapshot_tokens", "tp",
)  # fmt: skip
"""Settings of a server that decide what its cache takes, or whether that can be."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``stratakv`` command; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        arguments = argument_parser().parse_args(argv)
        arguments.line = sys.argv[1:] if argv is None else list(argv)
        code: int = arguments.run(arguments)
    except (ConfigError, StorageError) as error:
        print(f"stratakv: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while a model loads or a bench runs; a server drains instead
        print("stratakv: interrupted", file=sys.stderr)
        return 130
    return code


def argument_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="stratakv", description="A tiered KV cache for LLM serving.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"stratakv {version('stratakv')}")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    serve = verbs.add_parser(
        "serve",
        help="serve a Hugging Face model directory over an OpenAI-compatible API",
        allow_abbrev=False,
    )
    serve.add_argument(
        "model", type=Path, metavar="MODEL", help="directory with config.json and safetensors"
    )
    _flags(serve, EngineConfig)
    _flags(serve, ServerConfig)
    serve.add_argument(
        "--threads", action=_Whole, metavar="INT", help="threads of the forward; default: torch's"
    )
    for old in RENAMED:
        serve.add_argument(f"--{old}", action=_Renamed, help=argparse.SUPPRESS)
    serve.set_defaults(run=_serve)
    route = verbs.add_parser(
        "route",
        help="one address for servers that compute prompts and servers that decode",
        allow_abbrev=False,
    )
    _flags(route, RouteConfig)
    route.set_defaults(run=_route)
    plan = verbs.add_parser("plan", help="what a server would do, without one")
    plans = plan.add_subparsers(required=True, metavar="PART")
    _plan_flags(plans.add_parser("bytes", help="what a model's cache takes", allow_abbrev=False))
    bench = verbs.add_parser("bench", help="measure one part on this machine")
    parts = bench.add_subparsers(required=True, metavar="PART")
    for name, (text, flags) in BENCHES.items():
        part = parts.add_parser(name, help=text, allow_abbrev=False)
        part.add_argument("--json", metavar="FILE", help="also write the figures there")
        part.set_defaults(run=_bench, part=name)
        for flag in flags:
            part.add_argument(f"--{flag}", **_BENCH_FLAGS[flag])
        if name == "policy":
            _policy_flags(part)
    _fsck_flags(verbs.add_parser("fsck", help="check a file store", allow_abbrev=False))
    return parser


def _plan_flags(part: argparse.ArgumentParser) -> None:
    part.description = (
        "Print where every byte of the device and the host tier would go, as a server does at "
        "start. Weights are not needed, and this machine's memory does not matter."
    )
    part.add_argument("model", type=Path, metavar="MODEL", help="directory with config.json")
    part.add_argument(
        "--rows",
        choices=("plain", "fp8"),
        default="plain",
        help="fp8: latents and index keys as DeepSeek's kernels pack them, which this engine plans "
        "for and does not run (default: plain)",
    )
    part.add_argument("--json", metavar="FILE", help="also write the figures there")
    _flags(part, EngineConfig, SIZING)
    part.set_defaults(run=_plan)


def _fsck_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Read every page of a file store. Exit code 0: all is well, or was mended; 1: there is "
        "damage; 2: this is no store, or it cannot be read."
    )
    parser.add_argument("directory", metavar="DIR", help="the store's directory, or file:///DIR")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="remove what is damaged, but for what a running server writes",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report there")
    parser.set_defaults(run=_fsck)


def _policy_flags(part: argparse.ArgumentParser) -> None:
    part.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="a Mooncake-format trace, JSON lines; default: generated chats",
    )
    for flag, text, default in (
        ("chats", "conversations to generate where there is no TRACE; default: 400", None),
        ("branching", "sessions to generate instead, whose prompts part inside older ones", None),
        ("message-tokens", "mean length of a user's message in --chats; default: 200", None),
        ("seed", "of what is generated", 0),
        ("requests", "replay only the first of them", None),
        ("device-tokens", "what the device holds in full; default: by the trace", None),
        ("chat-tokens", "typical length of a conversation; default: the mean request", None),
        ("max-running", "requests that run at once", 16),
        ("chunk-tokens", "most prompt tokens of one request in a step", 512),
    ):
        shown = "" if default is None else f" (default: {default})"
        part.add_argument(
            f"--{flag}", action=_Whole, default=default, metavar="INT", help=text + shown
        )
    part.add_argument("--save-trace", metavar="FILE", help="also write what is replayed there")
    for flag, text in (("policies", "eviction policies"), ("specs", "kinds of model")):
        part.add_argument(
            f"--{flag}", metavar="NAME,..", default="", help=f"{text} to replay; default: all"
        )


def _flags(
    parser: argparse.ArgumentParser, record: type[Any], only: Collection[str] | None = None
) -> None:
    """One flag per field of a config record, or per field that is in ``only``."""
    group = parser.add_argument_group(record.__name__.removesuffix("Config").lower())
    for field in fields(record):
        if only is not None and field.name not in only:
            continue
        kind = str(field.type)
        number = "int" if "int" in kind else "float" if "float" in kind else None
        many = kind.startswith("tuple")
        default = None if many or field.default is MISSING else field.default
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            action=_NUMBERS[number] if number else "append" if many else "store",
            default=default,
            help=HELP[field.name] + shown,
            metavar=METAVAR.get(field.name, (number or "str").upper()),
        )


def picked(arguments: argparse.Namespace, record: type[Record]) -> Record:
    values = vars(arguments)
    names = [field.name for field in fields(record)]  # pyright: ignore[reportArgumentType]
    found = {name: values[name] for name in names if values.get(name) is not None}
    return record(**{n: tuple(v) if isinstance(v, list) else v for n, v in found.items()})


def _serve(arguments: argparse.Namespace) -> int:
    engine = picked(arguments, EngineConfig)
    server = picked(arguments, ServerConfig)
    check_count("--threads", arguments.threads)
    _check_extra("serve")
    if engine.tp == 1:  # a rank that is refused has to tell the others
        _check_model(arguments.model)
    import torch  # noqa: PLC0415 - --help and bad flags answer without loading torch

    from stratakv.serve import launch  # noqa: PLC0415

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    elif engine.tp > 1:
        launch.share_threads(engine)
    if engine.tp > 1:
        return launch.serve_ranks(arguments.model, engine, server, arguments.line)
    return launch.serve_alone(arguments.model, engine, server)


def _route(arguments: argparse.Namespace) -> int:
    values = vars(arguments)
    for name in ("prefill", "decode"):
        values[name] = values[name] or []
    config = picked(arguments, RouteConfig)
    _check_extra("route", ROUTE_MODULES, "route")
    from stratakv.serve.route_server import route  # noqa: PLC0415

    return route(config)


def _plan(arguments: argparse.Namespace) -> int:
    engine = picked(arguments, EngineConfig)
    _check_json(arguments.json)
    _check_extra("plan")
    _check_model(arguments.model)
    from stratakv.serve.memory_plan import plan_bytes  # noqa: PLC0415

    plan = plan_bytes(arguments.model, engine, arguments.rows)
    _write_json(arguments.json, plan.figures())
    print(plan.render())
    return 0


def _check_model(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ConfigError(f"MODEL {path}: allowed is a directory with a Hugging Face config.json")


def _check_extra(verb: str, modules: Sequence[str] = SERVE_MODULES, extra: str = "serve") -> None:
    """ConfigError that names the extra, where the library alone is installed."""
    if missing := [name for name in modules if find_spec(name) is None]:
        raise ConfigError(
            f"{verb}: {', '.join(missing)} not installed; "
            f"allowed after: pip install 'stratakv[{extra}]'"
        )


def _check_json(path: str | None) -> None:
    if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
        raise ConfigError(f"--json {path}: allowed is a file in a directory that exists")


def _write_json(path: str | None, figures: object) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _store_directory(name: str) -> Path:
    """Of a file store, as ``--storage`` takes it or without ``file://``."""
    path = name
    if name.startswith("file://"):
        path = name.removeprefix("file://").partition("?")[0]
    if "://" in path:
        raise StorageError(f"DIR {name}: allowed is a directory, or file:///DIR")
    return Path(path)


def _fsck(arguments: argparse.Namespace) -> int:
    from stratakv.storage.file.fsck import fsck, lines_of  # noqa: PLC0415

    _check_json(arguments.json)
    try:
        directory = _store_directory(arguments.directory)
        found = fsck(directory, repair=arguments.repair)
    except (StorageError, OSError) as error:
        print(f"stratakv: {error}", file=sys.stderr)
        return 2
    _write_json(arguments.json, asdict(found) | {"clean": found.clean})
    for line in lines_of(directory, found, repair=arguments.repair):
        print(line)
    return 0 if found.clean else 1


def _bench(arguments: argparse.Namespace) -> int:
    _check_json(arguments.json)
    values, name = vars(arguments), arguments.part
    given = {flag: values[flag] for flag in BENCHES[name][1]}
    if (directory := given.get("directory")) is not None and not directory.is_dir():
        raise ConfigError(f"--directory {directory}: allowed is a directory that exists")
    if name not in LIBRARY_BENCHES:
        _check_extra(f"bench {name}")
    bench = import_module(f"stratakv.bench.{name}")
    if name == "policy":
        chosen = {field.name: values[field.name] for field in fields(bench.PolicyOptions)}
        for flag in ("policies", "specs"):
            chosen[flag] = tuple(filter(None, values[flag].split(",")))
        given["options"] = bench.PolicyOptions(**chosen)
    try:
        _write_json(arguments.json, bench.run(**given))
    except RankLostError as error:
        print(f"stratakv: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
