"""What settings may be, their defaults, and the words in which another value is refused.

Owns the choices and limits that the records of settings share with the policies which carry them
out: those take no record, and load none. Must not know a setting's record.

A policy checks its bounds again (``WriteBack``, ``LoadBackPolicy``; ValueError): who embeds it
makes one without a record of settings, whose refusals name an operator's flags.
"""

from collections.abc import Collection
from os.path import dirname, isdir
from typing import TYPE_CHECKING, Final

from stratakv.core.errors import ConfigError

if TYPE_CHECKING:  # who embeds the tiers loads neither a path nor a flag
    from pathlib import Path

SNAPSHOT_TOKENS: Final = 256
DEVICES: Final = ("cpu", "cuda")
DTYPES: Final = ("float32", "bfloat16", "float16")
TIERS: Final = ("off", "device", "host")
EVICTIONS: Final = ("lru", "lfu", "slru", "s3-fifo", "priority")
WRITE_HITS: Final = 2
WRITE_BACK_RESERVE: Final = 0.1
WRITE_POLICIES: Final = ("write-through", "write-through-selective", "write-back")
PREFETCH_POLICIES: Final = ("best-effort", "wait-complete", "timeout")
PREFETCH_SHARE: Final = 0.5
PREFETCH_TIMEOUT_S: Final = 1.0
PREFETCH_TIMEOUT_PER_1K_S: Final = 0.25
TP_TIMEOUT_S: Final = 120.0
ROLES: Final = ("unified", "prefill", "decode")
TRANSPORTS: Final = ("nixl", "mooncake")
UNSALTED_ROOMS: Final = ("refuse", "share")
TOOL_CALL_PARSERS: Final = (
    "auto", "hermes", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31",
)  # fmt: skip
BOOTSTRAP_PORT: Final = 8998
TRANSFER_TIMEOUT_S: Final = 300.0
MAX_NAME_CHARS: Final = 512
"""Of a model's or an adapter's name."""


def given(flag: str, value: object) -> str:
    """How a refusal begins: the flag and its value, one that is empty too."""
    return f"{flag} {value}" if str(value).strip() else f"{flag} ''"


def check_text(flag: str, value: str | None, allowed: str) -> None:
    if value is not None and not value.strip():
        raise ConfigError(f"{given(flag, value)}: allowed is {allowed}")


def check_port(flag: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigError(f"{flag} {port}: allowed are 0 (any free one) to 65535")


def check_count(flag: str, value: int | None, least: int = 1) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{flag} {value}: allowed is {least} and more")


def check_choice(flag: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{given(flag, value)}: allowed are {', '.join(allowed)}")


def check_share(flag: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ConfigError(f"{flag} {value}: allowed is above 0, and 1 at most")


def check_seconds(flag: str, value: float, least: int = 0) -> None:
    if not least <= value < float("inf"):
        raise ConfigError(f"{flag} {value}: allowed are finite seconds from {least} up")


def check_written(flag: str, path: str | None) -> None:
    """``flag`` names a file that is to be written."""
    if path is not None and (isdir(path) or not isdir(dirname(path) or ".")):
        raise ConfigError(f"{given(flag, path)}: allowed is a file in a directory that exists")


def check_model_directory(flag: str, path: "Path") -> None:
    """``flag`` names a model directory."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"{flag} {path}: allowed is a directory with a Hugging Face config.json")
