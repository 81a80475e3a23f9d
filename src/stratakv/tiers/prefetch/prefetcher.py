"""Prefetches of requests that wait, from the first question to pages that are the tree's.

Owns each request's way through its phases (``request``), which name what it holds: ``operations``
has those that storage works on, ``sharing`` knows who asks for several. Host pages of a fetch stay
its own until its I/O has ended, also when the request has long left. ``policy.prefetch`` decides.
Must not admit a request.
"""

from typing import Final, assert_never

from stratakv.agreement.agreement import DigestInputs
from stratakv.agreement.ballot import Flags
from stratakv.core.clock import Clock
from stratakv.core.ids import GroupId, PageIds, PrefetchId, RequestId
from stratakv.core.page_keys import PageHasher
from stratakv.policy.checkpoints import last_end
from stratakv.policy.prefetch import Abandoned, Fetching, Landed, MakeRoom, PrefetchRules, Probing
from stratakv.policy.prefetch_book import PrefetchBook
from stratakv.policy.prefetch_ends import CachedPrefix
from stratakv.policy.prefetch_pace import FetchStart, PrefetchPolicy, allowance_s, stops
from stratakv.policy.prefetch_reasons import Arrivals, Reason
from stratakv.storage.backend import ReadStatus
from stratakv.storage.io_jobs import Answer, Ending, Fetch, Fetched, Queried, Query
from stratakv.storage.io_worker import IoWorker
from stratakv.tiers.attached_store import AttachedStore
from stratakv.tiers.object_keys import of_pages
from stratakv.tiers.prefetch.fetches import Fetches, FromStorage, arrivals_of
from stratakv.tiers.prefetch.operations import Operations
from stratakv.tiers.prefetch.request import (
    IDLE,
    Asking,
    Awaiting,
    Idle,
    Left,
    OnSettled,
    PrefetchRequest,
    Reading,
    Ready,
    ballot_of,
    ends_of,
)
from stratakv.tiers.prefetch.sharing import PrefetchSharing, abandoned
from stratakv.tree.matching import Match
from stratakv.tree.observer import CacheObserver
from stratakv.tree.prefix_tree import PrefixTree

GRACE_S: Final = 0.5
"""How long a request whose prefetch was stopped still waits for what is being read right now, to
use what has arrived. After that it goes without: a store that hangs holds nobody up."""


class Prefetcher:
    def __init__(
        self,
        tree: PrefixTree,
        fetches: Fetches,
        store: AttachedStore,
        policy: PrefetchPolicy,
        clock: Clock,
        observer: CacheObserver | None = None,
    ) -> None:
        self._spec = spec = tree.spec
        self._tree, self._observer = tree, observer
        self._fetches, self._store = fetches, store
        self._policy, self._clock = policy, clock
        self._rules = PrefetchRules(spec, policy)
        self._book = PrefetchBook(self._rules, spec.page_tokens)
        self.counters = self._book.counters
        self._waiting: dict[RequestId, PrefetchRequest] = {}
        self._by_id: dict[PrefetchId, PrefetchRequest] = {}  # of those that wait
        self._operations = Operations(clock)
        self._sharing = PrefetchSharing()
        self._asked = 0
        self._step = 0

    @property
    def busy(self) -> bool:
        """Whether storage is being asked for anything."""
        return len(self._operations) > 0

    def figures(self) -> DigestInputs:
        """What is under way, for ranks to compare."""
        return {
            "asked": self._asked,
            "requests": len(self._waiting),
            **self._operations.figures(),
            "tokens in flight": self._book.in_flight_tokens,
        }

    def records(self) -> dict[str, int]:
        """How many it keeps of each kind: none where nobody waits and nothing is under way."""
        return {
            "requests": len(self._waiting),
            "by id": len(self._by_id),
            "in the book": len(self._book),
            "shared": len(self._sharing),
            "operations": len(self._operations),
            "stopped": self._operations.stopped,
        }

    def owned(self, group: GroupId) -> list[PageIds]:
        """Host pages that fetches are filling, for ``check``."""
        under_way = [request.operation for request in self._operations]
        return [reading.pages[group] for reading in under_way if isinstance(reading, Reading)]

    # -- a request waits -------------------------------------------------------------------------

    def start(self, id_: RequestId, prefix: PageHasher, tokens: int) -> None:
        """A request with a prompt of ``tokens`` waits: ask storage, if there is one, for what the
        tree lacks of it."""
        worker = self._store.accepting
        if worker is None:
            return
        whole = last_end(tokens, self._spec.page_tokens)
        request = PrefetchRequest(PrefetchId(self._asked), prefix, whole, self._clock.now_s())
        self._asked += 1
        self._waiting[id_] = self._by_id[request.id] = request
        self._try(request, worker)

    def tick(self, head: RequestId | None, worker: IoWorker) -> None:
        """Try again what was put off, or waited for another request's prefetch. ``head``: the
        request whose turn comes next."""
        self._step += 1
        for request in self._sharing.left_alone():
            self._go_alone(request, worker)
        first = self._waiting.get(head) if head is not None else None
        for due in self._book.due(self._step, first.id if first else None):
            self._try(self._by_id[due], worker)

    def _try(self, request: PrefetchRequest, worker: IoWorker) -> None:
        self._book.disarm(request.id)
        found = self._tree.match(request.keys, request.whole)
        ahead = (request.whole - found.end) * self._spec.page_tokens
        match self._policy.weigh(ahead, self._book.in_flight_tokens):
            case FetchStart.TOO_SHORT:
                pass
            case FetchStart.RATE_LIMITED:
                self._book.put_off(request.id, self._step)
            case FetchStart.PROBE:
                self._probe(request, found, worker)

    def _probe(self, request: PrefetchRequest, found: Match, worker: IoWorker) -> None:
        first = request.keys[found.end]
        if self._sharing.join(request, first):
            return
        leases, end = self._tree.leases, found.anchor_end
        hold = leases.hold_present(request.keys, end, [0] * len(self._spec.groups))
        held = CachedPrefix(found.end, leases.present(hold, request.whole))
        objects = self._rules.ends.question(held)
        names = of_pages(request.keys, objects.groups, objects.pages)
        ticket = worker.submit(Query(names)) if names else None
        if ticket is None:
            leases.release(hold)
            if names:
                self._book.put_off(request.id, self._step)
            return
        state = Probing(held, self._book.before(request.id))
        self._sharing.lead(request, first)
        self._begin(request, Asking(ticket, state, hold, first, self._tree.stored.epoch, objects))

    def _begin(self, request: PrefetchRequest, phase: Asking | Reading) -> None:
        request.enter(phase)
        self._operations.begin(phase.ticket, request)
        self._book.move(request.id, phase.state, self._step)

    def _go_alone(self, request: PrefetchRequest, worker: IoWorker) -> None:
        """The request that this one had joined has its pages, or will not get them."""
        self._sharing.leave(request)
        self._try(request, worker)

    # -- storage has answered --------------------------------------------------------------------

    def stored_here(self, answer: Answer) -> Flags:
        """This rank's vote on a question that storage has answered."""
        assert isinstance(answer, Queried), f"{answer} is no answer to a question"
        _, asking, stored = self._question(answer)
        ends = self._rules.usable(asking.state, stored)
        return ballot_of(asking.state.held, ends, done=answer.ending is Ending.DONE)

    def _question(self, answer: Queried) -> tuple[PrefetchRequest, Asking, tuple[Flags, ...]]:
        """Who asked, and what of it is stored here, as flags over pages by group."""
        request = self._operations[answer.ticket]
        asking = request.operation
        assert isinstance(asking, Asking), "storage answered what it was not asked"
        groups = len(self._spec.groups)
        return request, asking, asking.objects.flags(answer.present, groups, request.whole)

    def queried(self, answer: Answer, agreed: Flags, worker: IoWorker) -> None:
        """``agreed``: what every rank has voted for."""
        assert isinstance(answer, Queried), f"{answer} is no answer to a question"
        request, asking, stored = self._question(answer)
        state, stopped = asking.state, self._operations.end(answer.ticket)
        why = request.phase.reason if isinstance(request.phase, Left) else Reason.DEADLINE
        if not agreed[0]:
            self._give_up(request, self._rules.abandon(state, why if stopped else Reason.IO_ERROR))
            return
        found = self._rules.answered(
            state,
            stored,
            ends_of(state.held, agreed),
            self._fetches.room(),
            self._book.in_flight_tokens,
        )
        if stopped and not isinstance(found, Abandoned):
            found = self._rules.abandon(found, why)
        self._go_on(request, found, worker)

    def _go_on(
        self, request: PrefetchRequest, state: MakeRoom | Fetching | Abandoned, worker: IoWorker
    ) -> None:
        match state:
            case MakeRoom(pages=pages):
                free = self._fetches.make_room(pages)
                self._go_on(request, self._rules.made_room(state, free), worker)
            case Fetching():
                self._fetch(request, state, worker)
            case Abandoned():
                self._give_up(request, state)
            case _:
                assert_never(state)

    def _fetch(self, request: PrefetchRequest, state: Fetching, worker: IoWorker) -> None:
        asking = request.phase
        assert isinstance(asking, Asking), "only who has asked fetches"
        pages = self._fetches.allocate(state.plan)
        if pages is None:
            self._give_up(request, self._rules.abandon(state, Reason.HOST_CAPACITY))
            return
        objects = state.plan.objects
        names = of_pages(request.keys, objects.groups, objects.pages)
        ticket = worker.submit(Fetch(names, self._fetches.buffers(state.plan, pages)))
        if ticket is None:
            self._fetches.free(pages)
            self._give_up(request, self._rules.abandon(state, Reason.RATE_LIMITED))
            return
        hold, first, epoch = asking.hold, asking.first, asking.epoch
        self._begin(request, Reading(ticket, state, hold, first, epoch, pages))

    def arrived_here(self, answer: Answer) -> Flags:
        """This rank's vote on a fetch that has ended."""
        assert isinstance(answer, Fetched), f"{answer} is no answer to a fetch"
        _, reading, arrivals = self._delivery(answer)
        ends = self._rules.landable(reading.state, arrivals)
        return ballot_of(reading.state.held, ends, done=True)

    def _delivery(self, answer: Fetched) -> tuple[PrefetchRequest, Reading, Arrivals]:
        request = self._operations[answer.ticket]
        reading = request.operation
        assert isinstance(reading, Reading), "storage delivered what it was not asked for"
        return request, reading, arrivals_of(answer, len(reading.state.plan.objects.pages))

    def fetched(self, answer: Answer, agreed: Flags) -> None:
        """``agreed``: what every rank has voted for."""
        assert isinstance(answer, Fetched), f"{answer} is no answer to a fetch"
        request, reading, arrivals = self._delivery(answer)
        state, stopped = reading.state, self._operations.end(answer.ticket)
        if isinstance(request.phase, Left):
            self._give_up(request, self._rules.abandon(state, request.phase.reason))
            return
        self.counters.add(fetched_pages=answer.statuses.count(ReadStatus.HIT))
        why = Reason.DEADLINE if stopped else Reason.IO_ERROR
        ended = self._rules.arrived(state, arrivals, ends_of(state.held, agreed), why)
        match ended:
            case Landed():
                self._land(request, reading, ended)
            case Abandoned():
                self._give_up(request, ended)
            case _:
                assert_never(ended)

    def _land(self, request: PrefetchRequest, reading: Reading, landed: Landed) -> None:
        prefix, end = request.prefix, landed.end
        if self._observer is not None:
            self._observer.inserted(prefix.namespace, prefix.keys[:end], 0, prefix.tokens)
        came = self._fetches.land(request.keys, landed, reading.pages)
        hold = self._tree.leases.hold_present(request.keys, end, self._tree.starts(end))
        if reading.epoch != self._tree.stored.epoch:  # it was emptied meanwhile
            self._tree.stored.unmark(hold)
        self._let_go(request)
        request.enter(Ready(hold, came))
        self._book.move(request.id, landed, self._step)

    def _give_up(self, request: PrefetchRequest, state: Abandoned) -> None:
        """The operation is over, and nothing comes of it."""
        before, operation = request.phase, request.operation
        if isinstance(operation, Reading):
            self._fetches.free(operation.pages)
        self._let_go(request)
        request.enter(IDLE)
        self._book.move(request.id, state, self._step)
        if isinstance(before, Left):
            before.settled(self._book.settle(request.id, before.end, before.reason))

    def _let_go(self, request: PrefetchRequest) -> None:
        """Release what a phase holds in the tree; the phase that follows holds it no more."""
        match request.phase:
            case Asking(hold=hold, first=first) | Reading(hold=hold, first=first):
                self._tree.leases.release(hold)
                self._sharing.end(first)
            case Ready(hold=hold):
                self._tree.leases.release(hold)
            case Idle() | Awaiting() | Left():
                pass
            case _:
                assert_never(request.phase)

    # -- its turn comes, or it leaves ------------------------------------------------------------

    def must_wait(self, id_: RequestId) -> bool:
        """Whether a request whose turn it is must wait for its prefetch. One that must not wait any
        longer is stopped, and waits for what is being read right now."""
        request, worker = self._waiting.get(id_), self._store.worker
        if request is None or worker is None:
            return False
        if abandoned(request):
            self._go_alone(request, worker)
        phase = request.phase
        awaited = phase.leader if isinstance(phase, Awaiting) else request
        operation = awaited.operation
        if operation is None:
            return False
        now_s = self._clock.now_s()
        allowed_s = allowance_s(self._policy.stop, self._rules.tokens(operation.state))
        passed = allowed_s is not None and now_s - request.started_s >= allowed_s
        passed |= self._operations.hang(now_s)
        if not stops(self._policy.stop, deadline_passed=passed):
            return True
        if awaited is not request:
            return False
        stopped_s = self._operations.stop(operation.ticket, worker)
        return isinstance(operation, Reading) and now_s - stopped_s < GRACE_S

    def admitted(self, id_: RequestId, end: int, settled: OnSettled) -> FromStorage | None:
        """A request has its lease, at ``end`` pages: what had landed for it is its own business.
        ``settled`` is called, perhaps later, with what storage had for it and what came of that."""
        request = self._waiting.get(id_)
        came = request.phase.came if request and isinstance(request.phase, Ready) else None
        self._leave(id_, end, Reason.DEADLINE, Reason.NOT_LOADED, settled)
        return came

    def forget(self, id_: RequestId, settled: OnSettled) -> None:
        """A request ends before it was admitted. Buffers of I/O under way stay its own."""
        request = self._waiting.get(id_)
        if request is not None and request.operation is not None:
            self._operations.stop(request.operation.ticket, self._store.worker)
        self._leave(id_, 0, Reason.ABORTED, Reason.ABORTED, settled)

    def give_up(self) -> bool:
        """Let go of what the newest prefetch that has landed holds, where somebody needs its host
        pages; False where none holds anything. The pages stay cached until they are evicted."""
        for request in reversed(self._waiting.values()):
            if isinstance(request.phase, Ready):
                self._let_go(request)
                request.enter(IDLE)
                return True
        return False

    def cancel(self, worker: IoWorker) -> None:
        """Begin to fetch no more of what is under way."""
        for request in self._operations:
            assert request.operation is not None
            self._operations.stop(request.operation.ticket, worker)

    def _leave(
        self, id_: RequestId, end: int, cut_short: Reason, unused: Reason, settled: OnSettled
    ) -> None:
        """A request waits no longer, and stands on ``end`` pages. What had landed beyond is lost as
        ``unused``; what is under way comes to nothing, for it was ``cut_short``, and counts when it
        has ended."""
        request = self._waiting.pop(id_, None)
        if request is None:
            settled(None)
            return
        del self._by_id[request.id]
        self._let_go(request)
        match request.phase:
            case Asking() | Reading() as under_way:
                self._operations.stop(under_way.ticket, None)
                request.enter(Left(under_way, end, cut_short, settled))
            case Idle() | Awaiting() | Ready() as phase:
                if isinstance(phase, Awaiting):
                    self._sharing.leave(request)
                request.enter(IDLE)
                settled(self._book.settle(request.id, end, unused))
            case Left():
                raise AssertionError("a request leaves once")
            case _:
                assert_never(request.phase)
