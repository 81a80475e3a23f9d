"""``stratakv doctor``: flags, what it prints, and its exit codes. Owns these; checks nothing."""

import argparse
import sys
from collections.abc import Callable

from stratakv.connect.engines import ENGINES
from stratakv.core.units import parse_bytes


def add_verb(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """``add_parser``: of the verbs of ``stratakv``."""
    parser = add_parser(
        "doctor",
        help="check a store below vLLM or SGLang",
        description="Check the engine's release, what it loads of StrataKV, the model and the "
        "store, and print the command that starts it. Exit code 0: nothing speaks against it; 1: "
        "something does; 2: a flag that cannot be honoured.",
        allow_abbrev=False,
    )
    parser.add_argument("engine", choices=tuple(ENGINES), metavar="ENGINE", help="vllm or sglang")
    parser.add_argument("model", metavar="MODEL", help="directory with config.json and safetensors")
    parser.add_argument("--storage", required=True, metavar="URL", help="as of serve")
    parser.add_argument("--storage-key-file", metavar="FILE", help="as of serve")
    parser.add_argument(
        "--host-memory",
        default="8GiB",
        metavar="SIZE",
        help="bytes of the engine's own host tier, above the store (default: 8GiB)",
    )
    parser.add_argument(
        "--why-miss",
        metavar="FILE",
        help="a prompt, as JSON token ids: instead, which page or which setting stops its reuse",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from stratakv.connect.doctor import (  # noqa: PLC0415
        EngineSetup,
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
    )
    if arguments.why_miss is not None:
        lines = explain(setup, read_prompt(arguments.why_miss))
        sys.stdout.write("\n".join(lines) + "\n")
        return 0
    checks = examine(setup)
    sys.stdout.write("\n".join(lines_of(checks, setup)) + "\n")
    return int(any(check.verdict == "bad" for check in checks))
