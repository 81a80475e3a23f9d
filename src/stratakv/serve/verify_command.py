"""``stratakv verify``: flags, what it prints, and its exit codes. Owns these; verifies nothing."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from stratakv.core.choices import (
    DTYPES,
    check_choice,
    check_count,
    check_model_directory,
    check_written,
)
from stratakv.core.flag_parser import FlagParser, WholeNumber


def add_verb(add_parser: Callable[..., FlagParser], run: Callable[..., int]) -> None:
    """``add_parser``: of the verbs of ``stratakv``. ``run``: what checks that the engine is
    installed, and calls ``verify``."""
    parser = add_parser(
        "verify",
        help="hit = recompute on a model of yours, for every tier and path",
        description="Load the model, compute prompts without the cache and with it, from the "
        "device, the host and a store, and compare tokens and logits. Exit code 0: all that ran is "
        "exact; 1: something differs; 2: a model or a flag that cannot be honoured.",
        allow_abbrev=False,
    )
    parser.need("MODEL", "a directory with config.json and safetensors", Path)
    parser.add_argument(
        "--dtype",
        default="float32",
        metavar=f"{{{','.join((*DTYPES, 'auto'))}}}",
        help="what it is computed in; float32 separates rounding from faults (default: float32)",
    )
    parser.add_argument("--page-tokens", action=WholeNumber, metavar="INT", help="as of serve")
    parser.add_argument(
        "--prompt-tokens",
        action=WholeNumber,
        metavar="INT",
        help="of the longest of three prompts; default: beyond the model's windows, of up to 4,096",
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="as of serve, but not memory://, and of file:// only a directory that is empty or "
        "not there yet; default: files in a directory for temporary ones, which go afterwards",
    )
    parser.add_argument(
        "--threads", action=WholeNumber, metavar="INT", help="of the forward; default: torch's"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report there")
    parser.set_defaults(run=run)


def verify(arguments: argparse.Namespace) -> int:
    """The exit code; errors as of ``verify_model``, but for those that say that the cache is
    wrong."""
    check_written("--json", arguments.json)
    check_choice("--dtype", arguments.dtype, (*DTYPES, "auto"))
    for flag, count in (
        ("--page-tokens", arguments.page_tokens),
        ("--prompt-tokens", arguments.prompt_tokens),
        ("--threads", arguments.threads),
    ):
        check_count(flag, count)
    check_model_directory("MODEL", arguments.model)
    if arguments.storage is not None:
        from stratakv.serve.verify_storage import check_store  # noqa: PLC0415 - loads stores

        check_store(arguments.storage)
    import torch  # noqa: PLC0415 - bad flags answer without loading torch

    from stratakv.serve.verify_model import VerifyOptions, verify_model  # noqa: PLC0415

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    options = VerifyOptions(
        model=arguments.model,
        dtype=arguments.dtype,
        page_tokens=arguments.page_tokens,
        prompt_tokens=arguments.prompt_tokens,
        storage=arguments.storage,
    )
    try:
        found = verify_model(options, _progress)
    except (AssertionError, TimeoutError) as error:
        sys.stdout.write(f"hit is NOT recompute: {error}\n")
        return 1
    sys.stdout.write("\n".join(found.lines()) + "\n")
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(found.figures(), indent=2) + "\n", "utf-8")
    return 0 if found.report.exact else 1


def _progress(text: str) -> None:
    sys.stderr.write(f"verify: {text}\n")
    sys.stderr.flush()
