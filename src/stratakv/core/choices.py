"""What settings may be, their defaults, and the words in which another value is refused.

Owns the choices and limits that the records of settings share with the policies which carry them
out: those take no record, and load none. Must not know a setting's record.

A policy checks its bounds again (``WriteBack``, ``LoadBackPolicy``; ValueError): who embeds it
makes one without a record of settings, whose refusals name an operator's flags.
"""

from collections.abc import Collection
from typing import Final

from stratakv.core.errors import ConfigError

SNAPSHOT_TOKENS: Final = 256
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
BOOTSTRAP_PORT: Final = 8998
TRANSFER_TIMEOUT_S: Final = 300.0
MAX_NAME_CHARS: Final = 512
"""Of a model's or an adapter's name."""


def check_port(flag: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigError(f"{flag} {port}: allowed are 0 (any free one) to 65535")


def check_count(flag: str, value: int | None, least: int = 1) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{flag} {value}: allowed is {least} and more")


def check_choice(flag: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} {value}: allowed are {', '.join(allowed)}")


def check_share(flag: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ConfigError(f"{flag} {value}: allowed is above 0, and 1 at most")


def check_seconds(flag: str, value: float, least: int = 0) -> None:
    if not least <= value < float("inf"):
        raise ConfigError(f"{flag} {value}: allowed are finite seconds from {least} up")
