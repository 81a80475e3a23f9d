"""Pages that a remote writer may still touch, and who that is.

Owns when a session's pages are this engine's own again: when each of its writers has reported that
it writes no more, or is behind a fence. Time alone frees nothing: what is overdue, and what a lost
peer may write, is in quarantine, counted, until then. Pure; ``transport`` says what a fence is.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from stratakv.cache.footprint import TransferPages
from stratakv.core.ids import GroupId, RequestId
from stratakv.disagg.transport import PeerId


@dataclass(frozen=True, slots=True)
class Writer:
    """One rank of the other side, in one attempt of a session. A late message of an attempt that is
    over names another ``generation``, and so frees nothing of the next one's."""

    session: RequestId
    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class LeaseCounts:
    """``leased`` and ``quarantined``: pages now, by group, the second among the first. ``overdue``:
    sessions that were ever past their deadline; ``ignored``: messages without a lease."""

    leased: Mapping[GroupId, int]
    quarantined: Mapping[GroupId, int]
    overdue: int
    ignored: int


@dataclass(slots=True, eq=False)
class _Lease:
    pages: TransferPages
    writers: dict[Writer, PeerId]
    deadline_s: float
    overdue: bool = False
    lost: bool = False  # a writer's peer


class PageLeases:
    def __init__(self) -> None:
        self._leases: dict[RequestId, _Lease] = {}
        self._overdue = self._ignored = 0

    def __len__(self) -> int:
        return len(self._leases)

    def lease(
        self,
        session: RequestId,
        pages: TransferPages,
        writers: Mapping[Writer, PeerId],
        deadline_s: float,
    ) -> None:
        """Before any of ``writers``, each behind its peer's link, is notified of ``pages``."""
        assert session not in self._leases, f"{session} is leased already"
        assert writers, f"{session} has no writer"
        assert all(writer.session == session for writer in writers), "of another session"
        self._leases[session] = _Lease(pages, dict(writers), deadline_s)

    def extend(self, session: RequestId, deadline_s: float) -> None:
        """Its writers have shown that they go on. What is in quarantine stays there."""
        self._leases[session].deadline_s = deadline_s

    def acknowledge(self, writer: Writer) -> TransferPages | None:
        """``writer`` has finished, or knows of an abort and is done with what was under way.
        The session's pages where it was the last; they may be used again."""
        lease = self._leases.get(writer.session)
        if lease is None or lease.writers.pop(writer, None) is None:
            self._ignored += 1
            return None
        return self._free(writer.session, lease)

    def disconnected(self, peer: PeerId) -> dict[RequestId, TransferPages]:
        """``peer`` is behind its fence: what nobody may write any more, by session."""
        found: dict[RequestId, TransferPages] = {}
        for session, lease in list(self._leases.items()):
            left = {writer: at for writer, at in lease.writers.items() if at != peer}
            if len(left) < len(lease.writers):
                lease.writers = left
                pages = self._free(session, lease)
                if pages is not None:
                    found[session] = pages
        return found

    def expire(self, now_s: float) -> frozenset[PeerId]:
        """Put what is overdue in quarantine. Peers whose links are to be torn down for it: those
        that such pages still wait for, named once for each session."""
        found: set[PeerId] = set()
        for lease in self._leases.values():
            if now_s >= lease.deadline_s and not lease.overdue:
                lease.overdue = True
                self._overdue += 1
                found.update(lease.writers.values())
        return frozenset(found)

    def lost(self, peer: PeerId) -> None:
        """Nobody answers for ``peer`` any more: what it may write is in quarantine."""
        for lease in self._leases.values():
            if peer in lease.writers.values():
                lease.lost = True

    def counts(self) -> LeaseCounts:
        leased, quarantined = Counter[GroupId](), Counter[GroupId]()
        for lease in self._leases.values():
            for group in lease.pages.groups:  # one may be on two tiers
                leased[group.group] += len(group.pages)
                if lease.overdue or lease.lost:
                    quarantined[group.group] += len(group.pages)
        return LeaseCounts(leased, quarantined, self._overdue, self._ignored)

    def _free(self, session: RequestId, lease: _Lease) -> TransferPages | None:
        if lease.writers:
            return None
        del self._leases[session]
        return lease.pages
