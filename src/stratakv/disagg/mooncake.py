"""Writes through Mooncake's TransferEngine: TCP, or RDMA where there is any.

Owns an engine for each peer: to delete it is the one way to stop what is under way.
"""

import base64
import importlib
import json
import os
import threading
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from stratakv.core.clock import Clock
from stratakv.core.errors import ConfigError, TransportError
from stratakv.core.wakeup import Wake
from stratakv.disagg.link import DEFAULT_LINK, LinkOptions
from stratakv.disagg.transport import Memory
from stratakv.disagg.wire import OpenWire, Ranges
from stratakv.disagg.wire_transport import WiredTransport

_RANGES: Final = 256
"""In one batch: each is a request of its own, and with thousands connections are refused."""
_SLICE_BYTES: Final = 32 << 20

Library: TypeAlias = Any
MooncakeEngine: TypeAlias = Any
"""The wheel has no types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeTransportOptions:
    """``host``: this machine's address, as peers reach it. ``protocol``: ``tcp`` or ``rdma``, over
    ``devices`` ("": all)."""

    host: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: str = ""
    link: LinkOptions = DEFAULT_LINK


class MooncakeTransport(WiredTransport):
    """A ``Transport``. ConfigError where Mooncake is missing."""

    def __init__(
        self,
        memories: Sequence[Memory],
        options: MooncakeTransportOptions | None = None,
        clock: Clock | None = None,
        wake: Wake | None = None,
    ) -> None:
        options = options or MooncakeTransportOptions()
        link = replace(
            options.link,
            slice_bytes=min(options.link.slice_bytes, _SLICE_BYTES),
            slice_ranges=min(options.link.slice_ranges, _RANGES),
        )
        super().__init__("mooncake", memories, mooncake_wire(options), link, clock, wake)


def mooncake_wire(options: MooncakeTransportOptions) -> OpenWire:
    """ConfigError where Mooncake is missing."""
    return partial(MooncakeWire, _library(), options)


_ALONE: Final = threading.Lock()
"""Over making an engine, of all in this process: it reads the environment meanwhile."""


class MooncakeWire:
    """One engine. A notification goes with a byte that nobody reads."""

    def __init__(
        self, library: Library, options: MooncakeTransportOptions, memories: Sequence[Memory]
    ) -> None:
        self._library, self._host = library, options.host
        self._name = str(uuid.uuid4())
        self._peer = self._peer_name = ""
        self._peer_byte = 0
        self._byte = np.zeros(64, np.uint8)
        with _ALONE, _limits(options.link.lost_after_s):
            engine: MooncakeEngine = library.TransferEngine()
            code = engine.initialize(
                options.host, "P2PHANDSHAKE", options.protocol, options.devices
            )
        regions = [*memories, self._byte]
        if code == 0:
            code = engine.batch_register_memory(
                [each.ctypes.data for each in regions], [each.nbytes for each in regions]
            )
        if code != 0:
            raise TransportError(f"mooncake: no engine at {options.host}: code {code}")
        self._engine: MooncakeEngine | None = engine

    def describe(self) -> bytes:
        place = f"{self._host}:{self._open().get_rpc_port()}"
        fields = {"place": place, "name": self._name, "byte": self._byte.ctypes.data}
        return json.dumps(fields).encode()

    def connect(self, description: bytes) -> None:
        try:
            fields: Any = json.loads(description)
            self._peer, self._peer_name = str(fields["place"]), str(fields["name"])
            self._peer_byte = int(fields["byte"])
        except (ValueError, KeyError, TypeError) as error:
            raise TransportError(f"mooncake: the peer's description: {error!r}") from error

    def write(self, ranges: Ranges, message: bytes | None, given_up: threading.Event) -> None:
        """Blocks at a peer that hangs for as long as ``_limits`` says, ``given_up`` or not."""
        if given_up.is_set():
            raise TransportError("given up")
        columns = (ranges.sources.tolist(), ranges.targets.tolist(), ranges.sizes.tolist())
        self._check("write", self._batch(columns, message))

    def notify(self, message: bytes) -> None:
        byte = [self._byte.ctypes.data], [self._peer_byte], [1]
        self._check("notify", self._batch(byte, message))

    def notifications(self) -> Sequence[bytes]:
        found: Sequence[Any] = self._open().get_notifies()
        # Anybody who finds the port can send one.
        return [base64.b64decode(each.msg) for each in found if each.name == self._peer_name]

    def sever(self) -> bool:
        self._engine = None
        return True

    def _open(self) -> MooncakeEngine:
        if self._engine is None:
            raise TransportError("mooncake: the link has ended")
        return self._engine

    def _batch(self, columns: tuple[list[int], ...], message: bytes | None) -> int:
        """Mooncake sends a message when all ranges of its batch are at the peer."""
        notify = None
        if message is not None:
            encoded = base64.b64encode(message).decode()
            notify = self._library.TransferNotify(self._name, encoded)
        write = self._library.TransferOpcode.Write
        code: int = self._open().batch_transfer_sync(self._peer, *columns, write, notify)
        return code

    def _check(self, what: str, code: int) -> None:
        if code != 0:
            raise TransportError(f"mooncake: {what} to {self._peer} failed with code {code}")


def _library() -> Library:
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise ConfigError(
            f"--transport mooncake: its library cannot be imported ({error}); allowed after: "
            "pip install 'stratakv[mooncake]' and apt-get install libibverbs1 libcurl4 libnuma1 "
            "(Linux)"
        ) from error


@contextmanager
def _limits(lost_after_s: float) -> Generator[None]:
    """An engine that is made meanwhile gives a peer that hangs up after so long: it reads that from
    the environment only, where the operator's own go first."""
    names = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
    ours = [name for name in names if name not in os.environ]
    os.environ.update({name: str(max(1, round(lost_after_s))) for name in ours})
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
