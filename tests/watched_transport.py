"""What a transport does to pages, looked at: whoever is written to has poison there, or somebody
else's page is overwritten; and whoever is read has not changed it since it was posted. Owns the
looks.
"""

import ctypes
from collections.abc import Sequence

import numpy as np

from stratakv.disagg.transport import Done, Event, Failed, Memory, PeerId, TransferId, Writes


def assert_poisoned(target: int, size: int) -> None:
    """``size`` bytes at the address ``target`` are nobody's."""
    held = np.ctypeslib.as_array((ctypes.c_float * (size // 4)).from_address(target))
    assert np.isnan(held).all(), "somebody's page is overwritten"


class Watched:
    """Any transport, of whose posts no byte may change until they have ended."""

    def __init__(self, transport, memories: Sequence[Memory]) -> None:
        self._transport, self._memories = transport, memories
        self._posted: dict[TransferId, tuple[Writes, bytes]] = {}
        self.describe, self.connect = transport.describe, transport.connect
        self.disconnect, self.close = transport.disconnect, transport.close

    def post(self, peer: PeerId, writes: Writes, notification: bytes | None = None) -> TransferId:
        transfer = self._transport.post(peer, writes, notification)
        if len(writes.sizes):
            self._posted[transfer] = writes, self._bytes(writes)
        return transfer

    def poll(self) -> Sequence[Event]:
        found = self._transport.poll()
        for event in found:
            if isinstance(event, Done | Failed) and event.transfer in self._posted:
                writes, before = self._posted.pop(event.transfer)
                assert self._bytes(writes) == before, "a page changed while it was read"
        return found

    @property
    def reading(self) -> bool:
        """Whether pages here may be read."""
        return bool(self._posted)

    def _bytes(self, writes: Writes) -> bytes:
        columns = (writes.regions, writes.offsets, writes.sizes)
        return b"".join(
            self._memories[region][offset : offset + size].tobytes()
            for region, offset, size in zip(*columns, strict=True)
        )
