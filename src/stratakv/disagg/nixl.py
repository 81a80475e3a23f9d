"""Writes through NIXL over UCX: shared memory, TCP, and whatever network UCX finds.

Owns an agent for each peer: to delete it is the one way to stop what is under way. What UCX may use
comes from its own environment variables (``UCX_TLS``, ``UCX_NET_DEVICES``) or ``NixlOptions``.
"""

import importlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.core.clock import Clock
from stratakv.core.errors import ConfigError, TransportError
from stratakv.core.wakeup import Wake
from stratakv.disagg.link import DEFAULT_LINK, LinkOptions
from stratakv.disagg.transport import Memory
from stratakv.disagg.wire import Addresses, OpenWire, Ranges
from stratakv.disagg.wire_transport import WiredTransport
from stratakv.disagg.writer_token import TokenPlace, WriterToken, watched

_MODULES: Final = ("nixl", "nixl_cu12", "nixl_cu13")
"""The first chooses between the others, where there are several."""
_COPYING: Final = frozenset({"cma", "knem", "xpmem"})
"""With these a peer's own process copies into our memory: what it has begun, we cannot stop
(``writer_token``). Any other writes through what ends with our agent: a socket, a network card's
registration, or, of ``posix`` and ``sysv``, segments of UCX's own."""
_FAMILIES: Final = {"all": _COPYING, "sm": _COPYING, "shm": _COPYING, "mm": frozenset({"xpmem"})}
_FENCED: Final = "^cma,knem,xpmem"
_LOOK_S: Final = 0.0002
"""Between two looks at a write that is under way."""

Library: TypeAlias = Any
Agent: TypeAlias = Any
"""The wheel has no types that a checker can follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlOptions:
    """``transports``: which of UCX's may be used, as in its ``UCX_TLS``, which counts where this is
    "". ``sm,tcp,self`` has shared memory, where the fence waits for the peer to let go, or to end;
    with the default and any other that ``peer_copies`` denies, the end of our agent is the fence.
    The same on both sides."""

    transports: str = ""
    link: LinkOptions = DEFAULT_LINK


class NixlTransport(WiredTransport):
    """A ``Transport``. ConfigError where NIXL is missing."""

    def __init__(
        self,
        memories: Sequence[Memory],
        options: NixlOptions | None = None,
        clock: Clock | None = None,
        wake: Wake | None = None,
    ) -> None:
        options = options or NixlOptions()
        super().__init__("nixl", memories, nixl_wire(options), options.link, clock, wake)


def peer_copies(transports: str) -> bool:
    """Whether UCX, where it may use these (as in its ``UCX_TLS``), may have a peer's own process
    copy into our memory. Names may be patterns, and have an auxiliary one behind a colon."""
    barring = transports.startswith("^")
    names = [
        each.strip().lstrip("\\").partition(":")[0]
        for each in transports.removeprefix("^").split(",")
    ]
    named = {each for name in names for each in (*_COPYING, *_FAMILIES) if fnmatchcase(each, name)}
    found = frozenset().union(*(_FAMILIES.get(each, frozenset({each})) for each in named))
    return bool(_COPYING - found if barring else found)


def nixl_wire(options: NixlOptions) -> OpenWire:
    """ConfigError where NIXL is missing."""
    return partial(NixlWire, _library(), options.transports)


_ALONE: Final = threading.Lock()
"""Over making an agent, joining it to its peer and ending it, of all agents of this process: UCX
has aborted one in which an agent ended, its peer killed, while another was joined; and what an
agent may use is in the environment as it is made."""


class NixlWire:
    """One agent. Everything that refers to it is a field, so that ``sever`` ends it: an agent lives
    as long as any reference does."""

    def __init__(self, library: Library, transports: str, memories: Sequence[Memory]) -> None:
        self._name = f"stratakv-{uuid.uuid4()}"
        self._token = WriterToken(self._name)
        self._peer = ""
        self._transports = transports or os.environ.get("UCX_TLS") or _FENCED
        self._may_write: Callable[[], bool] | None = None  # the peer, whatever becomes of our agent
        self._agent: Agent | None = None
        self._handle: Any = None
        try:
            with _ALONE, _ucx_transports(self._transports):
                # Its thread for progress would take a core; ``notifications`` makes progress.
                config = library.nixl_agent_config(enable_prog_thread=False, backends=[])
                self._agent = library.nixl_agent(self._name, config)
                self._open().create_backend("UCX")
            regions = [(each.ctypes.data, each.nbytes, 0, "") for each in memories]
            self._open().register_memory(regions, "DRAM")
        except Exception as error:
            self.sever()
            raise TransportError(f"nixl: no agent: {error!r}") from error

    def describe(self) -> bytes:
        with _errors("describe"):
            metadata: bytes = self._open().get_agent_metadata()
        return json.dumps({"token": asdict(self._token.place)}).encode() + b"\n" + metadata

    def connect(self, description: bytes) -> None:
        head, _, metadata = description.partition(b"\n")
        with _errors("connect"):
            token: Any = json.loads(head)["token"]
            if peer_copies(self._transports):
                name, machine = str(token["name"]), str(token["machine"])
                place = TokenPlace(machine, int(token["pid"]), int(token["file"]), name)
                self._may_write = watched(place)
            with _ALONE:
                peer: str | bytes = self._open().add_remote_agent(metadata)
            self._peer = peer.decode() if isinstance(peer, bytes) else peer

    def write(self, ranges: Ranges, message: bytes | None, given_up: threading.Event) -> None:
        with _errors("write"):
            self._handle = self._open().initialize_xfer(
                "WRITE",
                self._open().get_xfer_descs(_descriptors(ranges.sources, ranges.sizes), "DRAM"),
                self._open().get_xfer_descs(_descriptors(ranges.targets, ranges.sizes), "DRAM"),
                self._peer,
                message or b"",  # none of ours is empty, which to NIXL is none
            )
            # Over shared memory this returns when all is copied.
            state = self._open().transfer(self._handle)
            while state == "PROC":
                if given_up.is_set():
                    raise TransportError("given up")
                time.sleep(_LOOK_S)
                state = self._open().check_xfer_state(self._handle)
            if state != "DONE":
                raise TransportError(f"nixl: a write ended as {state}")
            self._open().release_xfer_handle(self._handle)
            self._handle = None

    def notify(self, message: bytes) -> None:
        with _errors("notify"):
            self._open().send_notif(self._peer, message)

    def notifications(self) -> Sequence[bytes]:
        with _errors("notifications"):
            found: dict[str, list[bytes]] = self._open().get_new_notifs()
        return found.get(self._peer, [])

    def sever(self) -> bool:
        if self._agent is not None:
            # A write to a peer that has just left stays queued in UCX, which aborts our process if
            # the agent ends so; a look takes it out.
            with suppress(TransportError):
                self.notifications()
        with _ALONE:
            self._handle = self._agent = None
        self._token.close()
        return self._may_write is None or not self._may_write()

    def _open(self) -> Agent:
        if self._agent is None:
            raise TransportError("nixl: the link has ended")
        return self._agent


def _descriptors(addresses: Addresses, sizes: Addresses) -> npt.NDArray[np.uint64]:
    """(address, bytes, device 0) [n, 3]."""
    return np.stack([addresses, sizes, np.zeros_like(sizes)], axis=1)


@contextmanager
def _errors(what: str) -> Generator[None]:
    """The binding has an exception of its own for each status, and no common root for them. Its
    traceback is not kept: its frames would keep the agent alive."""
    reason = ""
    try:
        yield
    except TransportError:
        raise
    except Exception as error:  # noqa: BLE001 - see above
        reason = f"nixl: {what}: {type(error).__name__}: {error}"
    if reason:
        raise TransportError(reason)


def _library() -> Library:
    for name in _MODULES:
        try:
            found = importlib.import_module(f"{name}._api")
        except ImportError:
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)
        return found
    raise ConfigError(
        "--transport nixl: its library cannot be imported; allowed after: "
        "pip install 'stratakv[nixl]' (Linux)"
    )


@contextmanager
def _ucx_transports(names: str) -> Generator[None]:
    """UCX reads what it may use from the environment, each time an agent is made."""
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = names
    try:
        yield
    finally:
        if before is None:
            del os.environ["UCX_TLS"]
        else:
            os.environ["UCX_TLS"] = before
