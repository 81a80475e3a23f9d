"""The composition root's events corner: from ``--kv-events`` to a publisher that has its endpoints.

Owns the checks of those flags that need more than their text. Must not publish anything.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from stratakv.core.clock import WallClock
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError

if TYPE_CHECKING:
    from stratakv.serve.kv_events import KvEventPublisher


def open_publisher(
    config: EngineConfig, server: ServerConfig, on_dropped: Callable[[], None]
) -> "KvEventPublisher | None":
    """None where no events are wanted. ConfigError where an endpoint cannot be had, its library is
    missing, or nothing would ever be told."""
    if server.kv_events is None:
        return None
    if config.cache == "off":
        raise ConfigError("--kv-events: with --cache off nothing is cached; allowed are the others")
    try:
        from stratakv.serve.kv_events import (  # noqa: PLC0415 - only who publishes needs ZeroMQ
            KvEventPublisher,
            KvEventsOptions,
        )
    except ImportError as error:
        raise ConfigError(
            f"--kv-events {server.kv_events}: {error.name or 'its library'} cannot be imported; "
            "allowed after: pip install 'stratakv[events]'"
        ) from error
    options = KvEventsOptions(
        endpoint=server.kv_events,
        replay=server.kv_events_replay,
        topic=server.kv_events_topic or "",
    )
    return KvEventPublisher(options, WallClock(), on_dropped)
