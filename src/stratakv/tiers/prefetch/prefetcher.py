"""Prefetches under way: what each request asks of storage, holds in the tree and has allocated.

Owns the host pages of a fetch until its I/O has ended, also when the request has long left, and the
holds of requests that wait. ``policy.prefetch`` decides. Must not seat a request.
"""

from typing import Final, assert_never

from stratakv.agreement.agreement import Figures
from stratakv.agreement.ballot import Flags
from stratakv.core.clock import Clock
from stratakv.core.ids import NONE, AskId, GroupId, PageIds, PageKey, RequestId, TicketId
from stratakv.core.page_keys import PageHasher
from stratakv.policy.checkpoints import last_end
from stratakv.policy.prefetch import (
    Abandoned,
    Fetching,
    Landed,
    MakeRoom,
    Prefetch,
    PrefetchRules,
    Probing,
)
from stratakv.policy.prefetch_book import PrefetchBook
from stratakv.policy.prefetch_ends import Held
from stratakv.policy.prefetch_pace import PrefetchPolicy, Start, allowance_s, stops
from stratakv.policy.prefetch_reasons import Arrivals, Reason
from stratakv.storage.backend import ReadStatus
from stratakv.storage.io_jobs import Answer, Ending, Fetch, Fetched, Queried, Query
from stratakv.storage.io_worker import IoWorker
from stratakv.tiers.object_keys import of_pages
from stratakv.tiers.prefetch.fetches import Fetches, FromStorage, arrivals_of
from stratakv.tiers.prefetch.request import Left, PrefetchRequest, Told, ballot_of, ends_of
from stratakv.tree.matching import Match
from stratakv.tree.observer import CacheObserver
from stratakv.tree.prefix_tree import PrefixTree

GRACE_S: Final = 0.5
"""How long a request whose prefetch was stopped still waits for what is being read right now, to
use what has arrived. After that it goes without: a store that hangs holds nobody up."""
HUNG_S: Final = 5.0
"""An operation that was told to stop ends with its batch. One that has not come back for this long
will not soon, and nobody who may go without storage waits for it any more."""


class Prefetcher:
    def __init__(
        self,
        tree: PrefixTree,
        fetches: Fetches,
        policy: PrefetchPolicy,
        clock: Clock,
        observer: CacheObserver | None = None,
    ) -> None:
        spec = tree.spec
        self._spec = spec
        self._tree, self._leases, self._stored = tree, tree.leases, tree.stored
        self._observer = observer
        self._fetches = fetches
        self._policy = policy
        self._clock = clock
        self._rules = PrefetchRules(spec, policy)
        self._book = PrefetchBook(self._rules, spec.page_tokens)
        self.counters = self._book.counters
        self._by_request: dict[RequestId, PrefetchRequest] = {}
        self._by_id: dict[AskId, PrefetchRequest] = {}  # of requests that wait
        self._by_ticket: dict[TicketId, PrefetchRequest] = {}  # with an operation under way
        self._leaders: dict[
            PageKey, PrefetchRequest
        ] = {}  # by the first page that is being asked for
        self._followers: dict[AskId, PrefetchRequest] = {}
        self._leader_ended = False
        self._stopped: dict[TicketId, float] = {}  # when each was told to stop, oldest first
        self.fetched_pages = 0
        self._asked = 0
        self._step = 0

    @property
    def busy(self) -> bool:
        """Whether storage is being asked for anything."""
        return bool(self._by_ticket)

    @property
    def holding(self) -> bool:
        """Whether a request that waits counts on pages of the tree."""
        return any(prefetch.hold is not None for prefetch in self._by_request.values())

    def figures(self) -> Figures:
        """What is under way, for ranks to compare."""
        return {
            "asked": self._asked,
            "requests": len(self._by_request),
            "reads": len(self._by_ticket),
            "newest read": next(reversed(self._by_ticket), NONE),
            "stopped": len(self._stopped),
            "tokens in flight": self._book.in_flight_tokens,
        }

    # -- a request waits -------------------------------------------------------------------------

    def start(self, request: RequestId, prefix: PageHasher, tokens: int, worker: IoWorker) -> None:
        """PrefetchRequest storage for what the tree lacks of a prompt of ``tokens``."""
        whole = last_end(tokens, self._spec.page_tokens)
        prefetch = PrefetchRequest(AskId(self._asked), prefix, whole, self._clock.now_s())
        self._asked += 1
        self._by_request[request] = self._by_id[prefetch.id] = prefetch
        self._try(prefetch, worker)

    def _try(self, prefetch: PrefetchRequest, worker: IoWorker) -> None:
        self._book.disarm(prefetch.id)
        found = self._tree.match(prefetch.keys, prefetch.whole)
        ahead = (prefetch.whole - found.end) * self._spec.page_tokens
        match self._policy.weigh(ahead, self._book.in_flight_tokens):
            case Start.TOO_SHORT:
                pass
            case Start.RATE_LIMITED:
                self._book.put_off(prefetch.id, self._step)
            case Start.PROBE:
                self._probe(prefetch, found, worker)

    def _probe(self, prefetch: PrefetchRequest, found: Match, worker: IoWorker) -> None:
        first = prefetch.keys[found.end]
        if first in self._leaders:
            prefetch.follows = self._leaders[first]
            self._followers[prefetch.id] = prefetch
            return
        end = found.anchor_end
        hold = self._leases.hold_present(prefetch.keys, end, [0] * len(self._spec.groups))
        held = Held(found.end, self._leases.present(hold, prefetch.whole))
        objects = self._rules.ends.question(held)
        names = of_pages(prefetch.keys, objects.groups, objects.pages)
        ticket = worker.submit(Query(names)) if names else None
        if ticket is None:
            self._leases.release(hold)
            if names:
                self._book.put_off(prefetch.id, self._step)
            return
        prefetch.hold, prefetch.objects, prefetch.first, prefetch.stopped_s = (
            hold,
            objects,
            first,
            None,
        )
        prefetch.epoch = self._stored.epoch
        self._leaders[first] = prefetch
        self._move(prefetch, Probing(held, self._book.before(prefetch.id)), ticket)

    def _move(self, prefetch: PrefetchRequest, state: Prefetch, ticket: TicketId | None) -> None:
        self._book.move(prefetch.id, state, self._step)
        prefetch.ticket = ticket
        if ticket is not None:
            self._by_ticket[ticket] = prefetch

    # -- storage has answered --------------------------------------------------------------------

    def stored_here(self, answer: Answer) -> Flags:
        """This rank's vote on a question that storage has answered."""
        assert isinstance(answer, Queried), f"{answer} is no answer to a question"
        _, state, stored = self._question(answer)
        ends = self._rules.usable(state, stored)
        return ballot_of(state.held, ends, done=answer.ending is Ending.DONE)

    def _question(self, answer: Queried) -> tuple[PrefetchRequest, Probing, tuple[Flags, ...]]:
        """Who asked, and what of it is stored here, as flags over pages by group."""
        prefetch = self._by_ticket[answer.ticket]
        state = self._book.state(prefetch.id)
        assert isinstance(state, Probing), "storage answered what it was not asked"
        assert prefetch.objects is not None
        return (
            prefetch,
            state,
            prefetch.objects.flags(answer.present, len(self._spec.groups), prefetch.whole),
        )

    def queried(self, answer: Answer, agreed: Flags, worker: IoWorker) -> None:
        """``agreed``: what every rank has voted for."""
        assert isinstance(answer, Queried), f"{answer} is no answer to a question"
        prefetch, state, stored = self._question(answer)
        self._ended(answer.ticket)
        if not agreed[0]:
            reason = Reason.IO_ERROR if prefetch.stopped_s is None else self._why(prefetch)
            self._give_up(prefetch, self._rules.abandon(state, reason))
            return
        ends = ends_of(state.held, agreed)
        found = self._rules.answered(
            state, stored, ends, self._fetches.room(), self._book.in_flight_tokens
        )
        if prefetch.stopped_s is not None and not isinstance(found, Abandoned):
            found = self._rules.abandon(found, self._why(prefetch))
        self._go_on(prefetch, found, worker)

    def _ended(self, ticket: TicketId) -> None:
        self._stopped.pop(ticket, None)
        del self._by_ticket[ticket]

    def _why(self, prefetch: PrefetchRequest) -> Reason:
        return prefetch.left.reason if prefetch.left is not None else Reason.DEADLINE

    def _go_on(
        self, prefetch: PrefetchRequest, state: MakeRoom | Fetching | Abandoned, worker: IoWorker
    ) -> None:
        match state:
            case MakeRoom(pages=pages):
                free = self._fetches.make_room(pages)
                self._go_on(prefetch, self._rules.made_room(state, free), worker)
            case Fetching():
                self._fetch(prefetch, state, worker)
            case Abandoned():
                self._give_up(prefetch, state)
            case _:
                assert_never(state)

    def _fetch(self, prefetch: PrefetchRequest, state: Fetching, worker: IoWorker) -> None:
        pages = self._fetches.allocate(state.plan)
        if pages is None:
            self._give_up(prefetch, self._rules.abandon(state, Reason.HOST_CAPACITY))
            return
        objects = state.plan.objects
        names = of_pages(prefetch.keys, objects.groups, objects.pages)
        ticket = worker.submit(Fetch(names, self._fetches.buffers(state.plan, pages)))
        if ticket is None:
            self._fetches.free(pages)
            self._give_up(prefetch, self._rules.abandon(state, Reason.RATE_LIMITED))
            return
        prefetch.pages = pages
        self._move(prefetch, state, ticket)

    def arrived_here(self, answer: Answer) -> Flags:
        """This rank's vote on a fetch that has ended."""
        assert isinstance(answer, Fetched), f"{answer} is no answer to a fetch"
        _, state, arrivals = self._delivery(answer)
        return ballot_of(state.held, self._rules.landable(state, arrivals), done=True)

    def _delivery(self, answer: Fetched) -> tuple[PrefetchRequest, Fetching, Arrivals]:
        prefetch = self._by_ticket[answer.ticket]
        state = self._book.state(prefetch.id)
        assert isinstance(state, Fetching), "storage delivered what it was not asked for"
        return prefetch, state, arrivals_of(answer, len(state.plan.objects.pages))

    def fetched(self, answer: Answer, agreed: Flags) -> None:
        """``agreed``: what every rank has voted for."""
        assert isinstance(answer, Fetched), f"{answer} is no answer to a fetch"
        prefetch, state, arrivals = self._delivery(answer)
        self._ended(answer.ticket)
        if prefetch.left is not None:
            self._give_up(prefetch, self._rules.abandon(state, prefetch.left.reason))
            return
        self.fetched_pages += answer.statuses.count(ReadStatus.HIT)
        stopped = Reason.IO_ERROR if prefetch.stopped_s is None else Reason.DEADLINE
        ended = self._rules.arrived(state, arrivals, ends_of(state.held, agreed), stopped)
        match ended:
            case Landed():
                self._land(prefetch, ended)
            case Abandoned():
                self._give_up(prefetch, ended)
            case _:
                assert_never(ended)

    def _land(self, prefetch: PrefetchRequest, landed: Landed) -> None:
        if self._observer is not None:
            prefix = prefetch.prefix
            keys = prefix.keys[: landed.end]
            self._observer.inserted(prefix.namespace, keys, 0, prefix.tokens)
        prefetch.landed = self._fetches.land(prefetch.keys, landed, prefetch.pages)
        prefetch.pages = ()
        end = landed.end
        hold = self._leases.hold_present(prefetch.keys, end, self._tree.starts(end))
        if prefetch.epoch != self._stored.epoch:  # it was emptied meanwhile
            self._stored.unmark(hold)
        self._let_go(prefetch)
        prefetch.hold = hold
        self._move(prefetch, landed, None)

    def _give_up(self, prefetch: PrefetchRequest, state: Abandoned) -> None:
        self._fetches.free(prefetch.pages)
        prefetch.pages = ()
        self._let_go(prefetch)
        self._move(prefetch, state, None)
        if prefetch.left is not None:
            prefetch.left.told(
                self._book.settle(prefetch.id, prefetch.left.end, prefetch.left.reason)
            )

    def _let_go(self, prefetch: PrefetchRequest) -> None:
        if prefetch.hold is not None:
            self._leases.release(prefetch.hold)
            prefetch.hold = None
        if prefetch.first is not None and self._leaders.get(prefetch.first) is prefetch:
            del self._leaders[prefetch.first]
            self._leader_ended = True
        prefetch.first = None

    # -- its turn comes, or it leaves ------------------------------------------------------------

    def must_wait(self, request: RequestId, worker: IoWorker) -> bool:
        """Whether a request whose turn it is must wait for its prefetch. One that must not wait any
        longer is stopped, and waits for what is being read right now."""
        prefetch = self._by_request.get(request)
        if prefetch is None:
            return False
        if prefetch.follows is not None and not prefetch.follows.asking:
            self._go_alone(prefetch, worker)
        leader = prefetch.follows or prefetch
        if not leader.asking:
            return False
        state = self._book.state(leader.id)
        assert isinstance(state, Probing | Fetching), "it waits for nothing"
        assert leader.ticket is not None
        now_s = self._clock.now_s()
        allowed_s = allowance_s(self._policy.stop, self._rules.tokens(state))
        passed = allowed_s is not None and now_s - prefetch.started_s >= allowed_s
        passed |= self._hangs(now_s)
        if not stops(self._policy.stop, deadline_passed=passed):
            return True
        if leader is not prefetch:
            return False
        stopped_s = self._stop(prefetch, worker)
        return isinstance(state, Fetching) and now_s - stopped_s < GRACE_S

    def _hangs(self, now_s: float) -> bool:
        oldest_s = next(iter(self._stopped.values()), now_s)
        return now_s - oldest_s > HUNG_S

    def _stop(self, prefetch: PrefetchRequest, worker: IoWorker | None) -> float:
        """Begin no more of the operation under way; when that was said first."""
        assert prefetch.ticket is not None, "there is nothing to stop"
        if prefetch.stopped_s is None:
            prefetch.stopped_s = self._stopped[prefetch.ticket] = self._clock.now_s()
            if worker is not None:
                worker.cancel(prefetch.ticket)
        return prefetch.stopped_s

    def _go_alone(self, prefetch: PrefetchRequest, worker: IoWorker) -> None:
        """The request that ``prefetch`` followed has its pages, or will not get them."""
        del self._followers[prefetch.id]
        prefetch.follows = None
        self._try(prefetch, worker)

    def admitted(self, request: RequestId, end: int, told: Told) -> FromStorage | None:
        """A request has its lease, at ``end`` pages: what had landed for it is its own business.
        ``told``: hears, perhaps later, what storage had for it and what came of that."""
        prefetch = self._leave(request, Left(end, Reason.DEADLINE, told), Reason.NOT_LOADED)
        return prefetch.landed if prefetch is not None else None

    def forget(self, request: RequestId, worker: IoWorker | None, told: Told) -> None:
        """A request ends before it was admitted. Buffers of I/O under way stay its own."""
        prefetch = self._by_request.get(request)
        if prefetch is not None and prefetch.ticket is not None:
            self._stop(prefetch, worker)
        self._leave(request, Left(0, Reason.ABORTED, told), Reason.ABORTED)

    def cancel(self, worker: IoWorker) -> None:
        """Begin to fetch no more of what is under way."""
        for prefetch in self._by_ticket.values():
            self._stop(prefetch, worker)

    def _leave(self, request: RequestId, left: Left, unused: Reason) -> PrefetchRequest | None:
        """A request waits no longer; what had landed beyond ``left.end`` is lost as ``unused``.
        None, and it counts as ``left`` says when it has ended, where an operation is under way."""
        prefetch = self._by_request.pop(request, None)
        if prefetch is None:
            left.told(None)
            return None
        del self._by_id[prefetch.id]
        if prefetch.follows is not None:
            del self._followers[prefetch.id]
            prefetch.follows = None
        ended = prefetch.ticket is None
        if ended:
            left.told(self._book.settle(prefetch.id, left.end, unused))
        else:
            prefetch.left = left
            self._stop(prefetch, None)
        self._let_go(prefetch)
        return prefetch if ended else None

    # -- time ------------------------------------------------------------------------------------

    def tick(self, head: RequestId | None, worker: IoWorker) -> None:
        """Try again what was put off, or waited for another request's prefetch. ``head``: the
        request whose turn comes next."""
        self._step += 1
        if self._leader_ended:
            self._leader_ended = False
            for prefetch in list(self._followers.values()):
                if prefetch.follows is not None and not prefetch.follows.asking:
                    self._go_alone(prefetch, worker)
        first = self._by_request.get(head) if head is not None else None
        for due in self._book.due(self._step, first.id if first else None):
            self._try(self._by_id[due], worker)

    def owned(self, group: GroupId) -> list[PageIds]:
        """Host pages that fetches are filling, for ``check``."""
        return [prefetch.pages[group] for prefetch in self._by_ticket.values() if prefetch.pages]
