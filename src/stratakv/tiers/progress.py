"""Time in a cache: when what has ended becomes state, and what was begun leaves.

Owns the ballots, so that all ranks see the same end in the same place: in ``tick``, and in ``wait``
where a step cannot go on without a copy. What follows for others, they register with ``after``.
Must not know a request's rows, nor read a clock.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

from stratakv.agreement.agreement import Agreement
from stratakv.agreement.ballot import BallotResult, Work
from stratakv.core.ids import RequestId
from stratakv.tiers.pools import Pools
from stratakv.tiers.storage import StorageTier
from stratakv.tiers.transfer_manager import TransferManager
from stratakv.tree.lease import HostHold
from stratakv.tree.nodes import Tier
from stratakv.tree.observer import CacheObserver
from stratakv.tree.prefix_tree import PrefixTree

POLL_S: Final = 2e-4
PAUSE_POLLS: Final = 25
"""An engine that has nothing to run looks for new requests every 5 ms or so."""
FLUSH_PAUSES: Final = 200
"""A flush gives storage a second or so: one that hangs must not stop the engine."""

Sleep: TypeAlias = Callable[[float], bool | None]
"""How a moment is waited for, in seconds. True where something of a peer has come, before its end
perhaps; there may be nobody who says so."""


class Progress:
    """Of one cache; one thread calls it."""

    def __init__(
        self,
        tree: PrefixTree,
        pools: Pools,
        copies: TransferManager,
        storage: StorageTier,
        agreement: Agreement,
        sleep: Sleep,
        observer: CacheObserver | None,
    ) -> None:
        self._tree, self._pools = tree, pools
        self._copies, self._flights, self._storage = copies, copies.flights, storage
        self._agreement, self._sleep, self._observer = agreement, sleep, observer
        self._after: list[tuple[Callable[[], None], bool]] = []

    def after(self, then: Callable[[], None], *, loads: bool = False) -> None:
        """Have ``then`` called when copies have become state, behind those who asked before; with
        ``loads`` only where loads may be among them."""
        self._after.append((then, loads))

    def tick(self, head: RequestId | None = None) -> None:
        """Vote on what has ended, and submit this step's backups while the others vote; apply what
        has ended on every rank, in submission order, and back up pages that must soon make room;
        then the same with storage. ``head``: the request whose turn comes next."""
        agreed = self._collect()
        self._ended(loads=agreed.ended(Work.LOAD) > 0)
        if self._copies.backups.clean():
            self._copies.submit()
        self._storage.tick(head, agreed)

    def _collect(self) -> BallotResult:
        ballot = self._agreement.ballot()
        self._flights.vote(ballot)
        self._storage.vote(ballot)
        agreed = self._agreement.agree(ballot, self._copies.submit)
        self._copies.apply(agreed)
        return agreed

    def _ended(self, *, loads: bool) -> None:
        for then, of_loads in self._after:
            if loads or not of_loads:
                then()

    def wait(self) -> bool:
        """Block until one more copy has ended everywhere; False when none is under way. All ranks
        wait at the same point, so they vote as often as each other."""
        waited = self._wait()
        self._ended(loads=True)
        return waited

    def _wait(self) -> bool:
        self._copies.submit()
        while self._flights:
            ballot = self._agreement.ballot()
            self._flights.vote(ballot)
            if self._copies.apply(self._agreement.agree(ballot)):
                return True
            self._sleep(POLL_S)
        return False

    @property
    def busy(self) -> bool:
        """Whether a copy or an I/O operation is under way or waits to be submitted."""
        return self._copies.busy or self._storage.busy

    def pause(self, head: RequestId | None = None) -> None:
        """Let a little time pass, less where a copy, storage or a peer has something to report, and
        tick."""
        if self.busy:
            self._pause_beside_copies()
        else:
            self._sleep(PAUSE_POLLS * POLL_S)
        self.tick(head)

    def _pause_beside_copies(self) -> None:
        for _ in range(PAUSE_POLLS):
            if self._flights.ready or self._storage.ready or self._sleep(POLL_S):
                return

    def settle(self) -> None:
        """Wait until no copy and no I/O operation is under way."""
        self._wait_for_all()
        while self.busy:
            self.pause()

    def _wait_for_all(self) -> None:
        while self.wait():
            pass

    def close(self, timeout_s: float) -> None:
        """Wait for the copies, and at most ``timeout_s`` for what storage is to keep."""
        try:
            self._wait_for_all()
        finally:
            self._storage.close(timeout_s)

    def flush(self) -> bool:
        """Drop everything cached; False, and nothing done, while anybody stands on a page or waits
        for what storage fetches, or where storage is not soon done with what it writes."""
        leases = self._tree.leases
        if not all(isinstance(lease, HostHold) for lease in leases):
            return False
        self._wait_for_all()
        for _ in range(FLUSH_PAUSES):
            if len(leases) or not self.busy:
                break
            self.pause()
        if self.busy or len(leases):
            return False
        self._pools.execute(self._tree.clear())
        if self._observer is not None:
            self._observer.dropped()
        return True

    def push_out(self, tier: Tier) -> None:
        """Wait for what is under way, then take everything that nothing pins off a tier; what the
        tier below has of it stays there."""
        self.settle()
        self._pools.push_out(tier)
