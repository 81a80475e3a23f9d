"""``stratakv VERB``: serve, route, plan, config, verify, bench, fsck, doctor, why-miss, completion.

Owns exit codes: 0 done, 1 an engine or a rank died, a store has damage that was not mended, or a
check has failed, 2 a flag, a model or a store that cannot be honoured, 130 interrupted before there
was a server to drain.
"""

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from stratakv.connect import doctor_command
from stratakv.core import logs
from stratakv.core.choices import DEVICES, check_choice, check_model_directory, check_written, given
from stratakv.core.completion import bash_completion
from stratakv.core.config import EngineConfig, RouteConfig, ServerConfig, flag_of
from stratakv.core.errors import ConfigError, RankLostError, StorageError
from stratakv.core.flag_help import RENAMED
from stratakv.core.flag_parser import FlagParser, Renamed, WholeNumber
from stratakv.core.options import MODEL, options_of
from stratakv.core.server_checks import check_together
from stratakv.core.settings import resolve
from stratakv.serve import config_command, verify_command, why_miss_command
from stratakv.serve.config_command import (
    SERVER_OPTIONS,
    model_of,
    offer_config_file,
    offer_server,
)
from stratakv.serve.hub import locate

log = logging.getLogger(__name__)

SERVE_MODULES: Final = (
    "torch", "transformers", "accelerate", "safetensors", "tokenizers", "jinja2", "starlette",
    "uvicorn", "h11", "prometheus_client", "llguidance",
)  # fmt: skip
"""What the extra ``serve`` brings, by the names that are imported."""
ROUTE_MODULES: Final = ("httpx", "starlette", "uvicorn", "h11")
"""The same of the extra ``route``."""
BENCHES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "tree": (
        "match, lease, insert, evict of the prefix tree, beside SGLang's",
        ("python", "stand-ins"),
    ),
    "transfer": ("copies between device and host", ("device",)),
    "serve": (
        "the engine by cache tier, beside Hugging Face's, and to the first token",
        ("trace", "model", "device"),
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
    "growth": ("how the costs of steps and stores grow with their size", ()),
    "sparse": ("what selected rows on the host cost and bring", ("selections", "text", "device")),
    "observability": ("what metrics, the split of a step's time and log lines cost a step", ()),
    "http": ("how long others wait while a server works on a body that takes long", ("model",)),
    "connect": (
        "the tier inside vLLM and SGLang, beside the engine's own",
        ("python", "stand-ins", "engine", "model", "directory"),
    ),
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
    "selections": {
        "metavar": "FILE",
        "help": "also what was recorded: .npy of int32 [steps, top-k], -1 for none",
    },
    "text": {
        "metavar": "FILE",
        "help": "what the built-in model reads while its selections are recorded; default: its own "
        "sources",
    },
    "device": {
        "choices": DEVICES,
        "default": DEVICES[0],
        "help": "what is measured; cuda has cases of its own (default: cpu)",
    },
    "tp": {"action": WholeNumber, "default": 2, "metavar": "INT", "help": "ranks (default: 2)"},
    "python": {"metavar": "FILE", "help": "the Python that has the engines (tree: SGLang)"},
    "stand-ins": {
        "type": Path,
        "metavar": "DIR",
        "help": "what stands in for a GPU in the engines, as tests/connect; default: there is one",
    },
    "engine": {"metavar": "NAME", "help": "vllm or sglang; default: those that are installed"},
}
LIBRARY_BENCHES: Final = ("tree", "imports", "connect", "policy")
"""Parts of ``bench`` that need no more than the library."""
SIZING: Final = (
    "page_tokens", "dtype", "device", "cache", "device_memory", "host_memory", "host_ratio",
    "max_running", "max_model_len", "step_tokens", "chunk_tokens", "chat_tokens",
    "snapshot_tokens", "tp",
)  # fmt: skip
"""Settings of a server that decide what its cache takes, or whether that can be."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``stratakv`` command; returns the exit code."""
    logs.set_up("info", "text")
    try:
        arguments = argument_parser().parse_args(argv)
        arguments.line = sys.argv[1:] if argv is None else list(argv)
        code: int = arguments.run(arguments)
    except (ConfigError, StorageError) as error:
        logs.last_words(str(error))
        return 2
    except KeyboardInterrupt:  # while a model loads or a bench runs; a server drains instead
        logs.last_words("interrupted")
        return 130
    return code


def argument_parser() -> FlagParser:
    parser = FlagParser(
        prog="stratakv", description="A tiered KV cache for LLM serving.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"stratakv {version('stratakv')}")
    add_verb = parser.divide("VERB")
    serve = add_verb(
        "serve",
        help="serve a Hugging Face model directory over an OpenAI-compatible API",
        allow_abbrev=False,
    )
    offer_server(serve)
    for old in RENAMED:
        serve.add_argument(f"--{old}", action=Renamed, help=argparse.SUPPRESS)
    serve.set_defaults(run=_serve)
    route = add_verb(
        "route",
        help="one address for servers that compute prompts and servers that decode",
        allow_abbrev=False,
    )
    offer_config_file(route)
    route.offer(options_of(RouteConfig), "route")
    route.set_defaults(run=_route)
    add_plan = add_verb("plan", help="what a server would do, without one").divide("PART")
    _plan_flags(add_plan("bytes", help="what a model's cache takes", allow_abbrev=False))
    config_command.add_verb(add_verb)
    verify_command.add_verb(add_verb, _verify)
    add_bench = add_verb("bench", help="measure one part on this machine").divide("PART")
    for name, (text, flags) in BENCHES.items():
        part = add_bench(name, help=text, allow_abbrev=False)
        part.add_argument("--json", metavar="FILE", help="also write the figures there")
        part.set_defaults(run=_bench, part=name)
        for flag in flags:
            part.add_argument(f"--{flag}", **_BENCH_FLAGS[flag])
        if name == "policy":
            _policy_flags(part)
    _fsck_flags(add_verb("fsck", help="check a file store", allow_abbrev=False))
    doctor_command.add_verb(add_verb)
    why_miss_command.add_verb(add_verb)
    completion = add_verb("completion", help="print what completes words in a shell")
    completion.need("SHELL", "bash, also for zsh's bashcompinit")
    completion.set_defaults(run=_completion)
    return parser


def _plan_flags(part: FlagParser) -> None:
    part.description = (
        "Print where every byte of the device and the host tier would go, as a server does at "
        "start. Weights are not needed, and this machine's memory does not matter."
    )
    part.offer([MODEL])
    part.add_argument(
        "--rows",
        choices=("plain", "fp8"),
        default="plain",
        help="fp8: latents and index keys as DeepSeek's kernels pack them, which this engine plans "
        "for and does not run (default: plain)",
    )
    part.add_argument("--json", metavar="FILE", help="also write the figures there")
    offer_config_file(part)
    part.offer(options_of(EngineConfig, SIZING), "engine")
    part.set_defaults(run=_plan)


def _fsck_flags(parser: FlagParser) -> None:
    parser.description = (
        "Read every page of a file store. Exit code 0: all is well, or was mended; 1: there is "
        "damage; 2: this is no store, or it cannot be read."
    )
    parser.need("DIR", "a store's directory, or file:///DIR")
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
            f"--{flag}", action=WholeNumber, default=default, metavar="INT", help=text + shown
        )
    part.add_argument("--save-trace", metavar="FILE", help="also write what is replayed there")
    for flag, text in (("policies", "eviction policies"), ("specs", "kinds of model")):
        part.add_argument(
            f"--{flag}", metavar="NAME,..", default="", help=f"{text} to replay; default: all"
        )


def _serve(arguments: argparse.Namespace) -> int:
    settings = resolve(arguments, SERVER_OPTIONS, os.environ)
    form = settings["log_format"].value
    if form in logs.FORMATS:  # before all others are looked at: what is refused is a line too
        logs.set_up("info", str(form))
    with settings.naming_sources():
        engine, server = settings.record(EngineConfig), settings.record(ServerConfig)
        check_together(engine, server)
        logs.set_up(server.log_level, server.log_format)
        for doubt in settings.doubts:
            log.warning("%s", doubt)
        named = model_of(settings)
        _check_extra("serve")
        found = locate(named)
        model, server = found.path, found.named(server)
        if engine.tp == 1:  # a rank that is refused has to notify the others
            from stratakv.serve.start_checks import check_start  # noqa: PLC0415

            check_start(model, engine, server)
        log.info("importing torch and transformers")  # a start that is slow shows where it is
        import torch  # noqa: PLC0415 - --help and bad flags answer without loading torch

        from stratakv.serve import launch  # noqa: PLC0415

        if server.threads is not None:
            torch.set_num_threads(server.threads)
        elif engine.tp > 1:
            launch.share_threads(engine)
        if engine.tp > 1:
            return launch.serve_ranks(model, engine, server, arguments.line)
        return launch.serve_alone(model, engine, server)


def _route(arguments: argparse.Namespace) -> int:
    settings = resolve(arguments, options_of(RouteConfig), os.environ)
    with settings.naming_sources():
        config = settings.record(RouteConfig)
        _check_extra("route", ROUTE_MODULES, "route")
        from stratakv.serve.route_server import route  # noqa: PLC0415

        return route(config)


def _plan(arguments: argparse.Namespace) -> int:
    options = (MODEL, *options_of(EngineConfig, SIZING))
    settings = resolve(arguments, options, os.environ, SERVER_OPTIONS)
    with settings.naming_sources():
        engine = settings.record(EngineConfig)
        check_written("--json", arguments.json)
        _check_extra("plan")
        model = model_of(settings)
        check_model_directory("MODEL", model)
        from stratakv.serve.memory_plan import plan_bytes  # noqa: PLC0415

        plan = plan_bytes(model, engine, arguments.rows)
    _write_json(arguments.json, plan.figures())
    print(plan.render())
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    _check_extra("verify")
    return verify_command.verify(arguments)


def _completion(arguments: argparse.Namespace) -> int:
    check_choice("SHELL", arguments.shell, ("bash",))
    print(bash_completion(argument_parser()), end="")
    return 0


def _check_extra(verb: str, modules: Sequence[str] = SERVE_MODULES, extra: str = "serve") -> None:
    """ConfigError that names the extra, where the library alone is installed."""
    if missing := [name for name in modules if find_spec(name) is None]:
        raise ConfigError(
            f"{verb}: {', '.join(missing)} not installed; "
            f"allowed after: pip install 'stratakv[{extra}]'"
        )


def _write_json(path: str | None, figures: object) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _store_directory(name: str) -> Path:
    """Of a file store, as ``--storage`` takes it or without ``file://``."""
    path = name
    if name.startswith("file://"):
        path = name.removeprefix("file://").partition("?")[0]
    if "://" in path or not path.strip() or (path != name and path[0] != "/"):
        raise StorageError(f"{given('DIR', name)}: allowed is a directory, or file:///DIR")
    return Path(path)


def _fsck(arguments: argparse.Namespace) -> int:
    from stratakv.storage.file.fsck import fsck, lines_of  # noqa: PLC0415

    check_written("--json", arguments.json)
    try:
        directory = _store_directory(arguments.dir)
        found = fsck(directory, repair=arguments.repair)
    except (StorageError, OSError) as error:
        logs.last_words(str(error))
        return 2
    _write_json(arguments.json, asdict(found) | {"clean": found.clean})
    for line in lines_of(directory, found, repair=arguments.repair):
        print(line)
    return 0 if found.clean else 1


def _bench(arguments: argparse.Namespace) -> int:
    check_written("--json", arguments.json)
    values, name = vars(arguments), arguments.part
    chosen = {flag.replace("-", "_"): values[flag.replace("-", "_")] for flag in BENCHES[name][1]}
    for flag in ("directory", "stand_ins"):
        if (directory := chosen.get(flag)) is not None and not directory.is_dir():
            raise ConfigError(f"{flag_of(flag)} {directory}: allowed is a directory that exists")
    if (model := chosen.get("model")) is not None:
        check_model_directory("--model", Path(model))
    if name not in LIBRARY_BENCHES:
        _check_extra(f"bench {name}")
    if chosen.get("redis") is not None:
        _check_extra(f"bench {name} --redis", ("redis",), "redis")
    bench = import_module(f"stratakv.bench.{name}")
    if name == "policy":
        check_written("--save-trace", arguments.save_trace)
        options = {field.name: values[field.name] for field in fields(bench.PolicyOptions)}
        for flag in ("policies", "specs"):
            options[flag] = tuple(filter(None, values[flag].split(",")))
        chosen["options"] = bench.PolicyOptions(**options)
    try:
        _report(arguments.json, bench.run(**chosen))
    except ConfigError as error:  # a model is an argument of a server, and a flag of a bench
        raise ConfigError(re.sub(r"^MODEL\b", "--model", str(error))) from error
    except RankLostError as error:
        logs.last_words(str(error))
        return 1
    return 0


def _report(path: str | None, found: dict[str, object]) -> None:
    _write_json(path, found)
    if found.get("interrupted"):  # what it had by then has been printed and is written
        raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
