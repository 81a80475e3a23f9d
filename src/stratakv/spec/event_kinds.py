"""What KV events call a retention rule: the words of vLLM's ``KVCacheSpecKind``.

Owns the names, which routers use to tell the group that decides a match from the others. Must not
decide anything itself.
"""

from typing import NamedTuple, assert_never

from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    Retention,
)


class EventKind(NamedTuple):
    """``window``: tokens of a sliding window, where the rule is one."""

    name: str
    window: int | None = None


def event_kind(rule: Retention) -> EventKind:
    match rule:
        case KeepAll():
            return EventKind("full_attention")
        case KeepWindow(tokens):
            return EventKind("sliding_window", tokens)
        case KeepChunk():
            return EventKind("chunked_local_attention")
        case KeepBoundary():
            return EventKind("mamba")
        case KeepLive():
            return EventKind("unknown")
        case _:
            assert_never(rule)
