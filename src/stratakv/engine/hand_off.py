"""Requests whose pages go to another engine or come from one, between the loop and its role.

Owns which rows a transfer touches. Torch-free; must not end a request (``endings``), move bytes or
decide who is transferred (``roles``).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never

from stratakv.cache.footprint import TransferPages
from stratakv.cache.kv_cache import KVCache
from stratakv.core.ids import RequestId
from stratakv.engine.request import Phase, Request, Signal
from stratakv.engine.roles import (
    ChunkComputed,
    FirstToken,
    MayStart,
    PartSent,
    Received,
    Role,
    RoleEvent,
    Sent,
    TransferFailed,
    TransferLost,
)
from stratakv.engine.running import Running


class Transfers:
    """``vocab_size``: token ids are below it."""

    def __init__(self, cache: KVCache, running: Running, role: Role, vocab_size: int) -> None:
        self._cache = cache
        self._running = running
        self._role = role
        self._vocab_size = vocab_size
        self._receiving: dict[RequestId, int] = {}
        self._sending: dict[RequestId, int] = {}

    def __len__(self) -> int:
        return len(self._receiving) + len(self._sending)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._receiving or request in self._sending

    def touch(self, row: int) -> bool:
        """Whether somebody else may still read or write the row's pages."""
        return row in self._receiving.values() or row in self._sending.values()

    def receives(self, request: Request) -> bool:
        """Whether its pages hold less than its row says: they are being filled."""
        return request.id in self._receiving

    def receive(self, request: Request, computed: int) -> None:
        """``request`` has been admitted, with KV of its first ``computed`` tokens; that of all
        others which it knows is to come."""
        request.signal(Signal.RESERVED)
        self._running.open(request, computed)
        self._receiving[request.id] = request.row
        pages = self._cache.hand_off.reserve(request.row, len(request.known))
        self._role.reserved(request, pages)

    def knows(self, first: FirstToken) -> bool:
        """Whether the model has such a token: it comes from another machine."""
        return 0 <= first.token < self._vocab_size

    def received(self, request: Request) -> None:
        """All it knows has its KV, and it decodes from now on."""
        tokens = self._running.rows.known_tokens(request.row)
        self._running.computed_elsewhere(request)
        self._cache.hand_off.received(request.row, tokens)
        request.signal(Signal.RECEIVED)
        self._decode(request)

    def chunk_computed(self, request: Request) -> None:
        """Some of its prompt is computed: what is there for good may be sent while the rest is
        computed."""
        row, columns = request.row, self._running.rows
        if self._cache.hand_off.is_loading(row):
            return  # with a later chunk
        tokens = columns.computed.item(row)
        part = partial(self._cache.hand_off.part, row, tokens, columns.length.item(row))
        phase = self._role.computed(
            request, ChunkComputed(tokens), partial(self._lend, request, part)
        )
        assert phase is Phase.PREFILLING, f"a role leads from a chunk to {phase.name}"

    def prefilled(self, request: Request, first: FirstToken) -> None:
        """Its prompt is computed, and ``first`` is its newest token: it decodes, or is sent."""
        tokens = self._running.rows.computed.item(request.row)
        pages = partial(self._cache.hand_off.pages, request.row, tokens)
        match self._role.computed(request, first, partial(self._lend, request, pages)):
            case Phase.DECODING:
                request.signal(Signal.PREFILL_DONE)
                self._decode(request)
            case Phase.TRANSFERRING:
                request.signal(Signal.SENDING)
                self._sending[request.id] = request.row
                self._running.pause(request)
            case phase:
                raise AssertionError(f"a role leads from prefill to {phase.name}")

    def _lend(self, request: Request, pages: Callable[[], TransferPages]) -> TransferPages:
        """From now on they are read, until the role reports otherwise."""
        self._sending[request.id] = request.row
        return pages()

    def _decode(self, request: Request) -> None:
        self._running.decode(request)
        tokens = self._running.rows.computed.item(request.row)
        self._cache.prefilled(request.row, tokens, request.total_tokens)

    def events(self) -> Sequence[RoleEvent]:
        """What the role reports; nobody else touches the rows of transfers that have ended."""
        found = self._role.poll()
        for end in found:
            if isinstance(end, MayStart | TransferLost):
                continue
            received = self._receiving.pop(end.request, None)
            sent = self._sending.pop(end.request, None)
            match end:
                case Received():
                    assert received is not None, f"{end}: it was not received"
                case Sent() | PartSent():
                    assert sent is not None, f"{end}: it was not sent"
                case TransferFailed():
                    pass  # perhaps before it began
                case _:
                    assert_never(end)
        return found
