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
from stratakv.tiers.prefetch.asks import Ask, Left, Told, ballot_of, ends_of
from stratakv.tiers.prefetch.fetches import Fetches, FromStorage, arrivals_of
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
        self._by_request: dict[RequestId, Ask] = {}
        self._by_id: dict[AskId, Ask] = {}  # of requests that wait
        self._by_ticket: dict[TicketId, Ask] = {}  # with an operation under way
        self._leaders: dict[PageKey, Ask] = {}  # by the first page that is being asked for
        self._followers: dict[AskId, Ask] = {}
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
        return any(ask.hold is not None for ask in self._by_request.values())

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
        """Ask storage for what the tree lacks of a prompt of ``tokens``."""
        whole = last_end(tokens, self._spec.page_tokens)
        ask = Ask(AskId(self._asked), prefix, whole, self._clock.now_s())
        self._asked += 1
        self._by_request[request] = self._by_id[ask.id] = ask
        self._try(ask, worker)

    def _try(self, ask: Ask, worker: IoWorker) -> None:
        self._book.disarm(ask.id)
        found = self._tree.match(ask.keys, ask.whole)
        ahead = (ask.whole - found.end) * self._spec.page_tokens
        match self._policy.weigh(ahead, self._book.in_flight_tokens):
            case Start.TOO_SHORT:
                pass
            case Start.RATE_LIMITED:
                self._book.put_off(ask.id, self._step)
            case Start.PROBE:
                self._probe(ask, found, worker)

    def _probe(self, ask: Ask, found: Match, worker: IoWorker) -> None:
        first = ask.keys[found.end]
        if first in self._leaders:
            ask.follows = self._leaders[first]
            self._followers[ask.id] = ask
            return
        end = found.anchor_end
        hold = self._leases.hold_present(ask.keys, end, [0] * len(self._spec.groups))
        held = Held(found.end, self._leases.present(hold, ask.whole))
        objects = self._rules.ends.question(held)
        names = of_pages(ask.keys, objects.groups, objects.pages)
        ticket = worker.submit(Query(names)) if names else None
        if ticket is None:
            self._leases.release(hold)
            if names:
                self._book.put_off(ask.id, self._step)
            return
        ask.hold, ask.objects, ask.first, ask.stopped_s = hold, objects, first, None
        ask.epoch = self._stored.epoch
        self._leaders[first] = ask
        self._move(ask, Probing(held, self._book.before(ask.id)), ticket)

    def _move(self, ask: Ask, state: Prefetch, ticket: TicketId | None) -> None:
        self._book.move(ask.id, state, self._step)
        ask.ticket = ticket
        if ticket is not None:
            self._by_ticket[ticket] = ask

    # -- storage has answered --------------------------------------------------------------------

    def stored_here(self, answer: Answer) -> Flags:
        """This rank's vote on a question that storage has answered."""
        assert isinstance(answer, Queried), f"{answer} is no answer to a question"
        _, state, stored = self._question(answer)
        ends = self._rules.usable(state, stored)
        return ballot_of(state.held, ends, done=answer.ending is Ending.DONE)

    def _question(self, answer: Queried) -> tuple[Ask, Probing, tuple[Flags, ...]]:
        """Who asked, and what of it is stored here, as flags over pages by group."""
        ask = self._by_ticket[answer.ticket]
        state = self._book.state(ask.id)
        assert isinstance(state, Probing), "storage answered what it was not asked"
        assert ask.objects is not None
        return ask, state, ask.objects.flags(answer.present, len(self._spec.groups), ask.whole)

    def queried(self, answer: Answer, agreed: Flags, worker: IoWorker) -> None:
        """``agreed``: what every rank has voted for."""
        assert isinstance(answer, Queried), f"{answer} is no answer to a question"
        ask, state, stored = self._question(answer)
        self._ended(answer.ticket)
        if not agreed[0]:
            reason = Reason.IO_ERROR if ask.stopped_s is None else self._why(ask)
            self._give_up(ask, self._rules.abandon(state, reason))
            return
        ends = ends_of(state.held, agreed)
        found = self._rules.answered(
            state, stored, ends, self._fetches.room(), self._book.in_flight_tokens
        )
        if ask.stopped_s is not None and not isinstance(found, Abandoned):
            found = self._rules.abandon(found, self._why(ask))
        self._go_on(ask, found, worker)

    def _ended(self, ticket: TicketId) -> None:
        self._stopped.pop(ticket, None)
        del self._by_ticket[ticket]

    def _why(self, ask: Ask) -> Reason:
        return ask.left.reason if ask.left is not None else Reason.DEADLINE

    def _go_on(self, ask: Ask, state: MakeRoom | Fetching | Abandoned, worker: IoWorker) -> None:
        match state:
            case MakeRoom(pages=pages):
                free = self._fetches.make_room(pages)
                self._go_on(ask, self._rules.made_room(state, free), worker)
            case Fetching():
                self._fetch(ask, state, worker)
            case Abandoned():
                self._give_up(ask, state)
            case _:
                assert_never(state)

    def _fetch(self, ask: Ask, state: Fetching, worker: IoWorker) -> None:
        pages = self._fetches.allocate(state.plan)
        if pages is None:
            self._give_up(ask, self._rules.abandon(state, Reason.HOST_CAPACITY))
            return
        objects = state.plan.objects
        names = of_pages(ask.keys, objects.groups, objects.pages)
        ticket = worker.submit(Fetch(names, self._fetches.buffers(state.plan, pages)))
        if ticket is None:
            self._fetches.free(pages)
            self._give_up(ask, self._rules.abandon(state, Reason.RATE_LIMITED))
            return
        ask.pages = pages
        self._move(ask, state, ticket)

    def arrived_here(self, answer: Answer) -> Flags:
        """This rank's vote on a fetch that has ended."""
        assert isinstance(answer, Fetched), f"{answer} is no answer to a fetch"
        _, state, arrivals = self._delivery(answer)
        return ballot_of(state.held, self._rules.landable(state, arrivals), done=True)

    def _delivery(self, answer: Fetched) -> tuple[Ask, Fetching, Arrivals]:
        ask = self._by_ticket[answer.ticket]
        state = self._book.state(ask.id)
        assert isinstance(state, Fetching), "storage delivered what it was not asked for"
        return ask, state, arrivals_of(answer, len(state.plan.objects.pages))

    def fetched(self, answer: Answer, agreed: Flags) -> None:
        """``agreed``: what every rank has voted for."""
        assert isinstance(answer, Fetched), f"{answer} is no answer to a fetch"
        ask, state, arrivals = self._delivery(answer)
        self._ended(answer.ticket)
        if ask.left is not None:
            self._give_up(ask, self._rules.abandon(state, ask.left.reason))
            return
        self.fetched_pages += answer.statuses.count(ReadStatus.HIT)
        stopped = Reason.IO_ERROR if ask.stopped_s is None else Reason.DEADLINE
        ended = self._rules.arrived(state, arrivals, ends_of(state.held, agreed), stopped)
        match ended:
            case Landed():
                self._land(ask, ended)
            case Abandoned():
                self._give_up(ask, ended)
            case _:
                assert_never(ended)

    def _land(self, ask: Ask, landed: Landed) -> None:
        if self._observer is not None:
            prefix = ask.prefix
            keys = prefix.keys[: landed.end]
            self._observer.inserted(prefix.namespace, keys, 0, prefix.tokens)
        ask.landed = self._fetches.land(ask.keys, landed, ask.pages)
        ask.pages = ()
        end = landed.end
        hold = self._leases.hold_present(ask.keys, end, self._tree.starts(end))
        if ask.epoch != self._stored.epoch:  # it was emptied meanwhile
            self._stored.unmark(hold)
        self._let_go(ask)
        ask.hold = hold
        self._move(ask, landed, None)

    def _give_up(self, ask: Ask, state: Abandoned) -> None:
        self._fetches.free(ask.pages)
        ask.pages = ()
        self._let_go(ask)
        self._move(ask, state, None)
        if ask.left is not None:
            ask.left.told(self._book.settle(ask.id, ask.left.end, ask.left.reason))

    def _let_go(self, ask: Ask) -> None:
        if ask.hold is not None:
            self._leases.release(ask.hold)
            ask.hold = None
        if ask.first is not None and self._leaders.get(ask.first) is ask:
            del self._leaders[ask.first]
            self._leader_ended = True
        ask.first = None

    # -- its turn comes, or it leaves ------------------------------------------------------------

    def holds_back(self, request: RequestId, worker: IoWorker) -> bool:
        """Whether a request whose turn it is must wait for its prefetch. One that must not wait any
        longer is stopped, and waits for what is being read right now."""
        ask = self._by_request.get(request)
        if ask is None:
            return False
        if ask.follows is not None and not ask.follows.asking:
            self._go_alone(ask, worker)
        leader = ask.follows or ask
        if not leader.asking:
            return False
        state = self._book.state(leader.id)
        assert isinstance(state, Probing | Fetching), "it waits for nothing"
        assert leader.ticket is not None
        now_s = self._clock.now_s()
        allowed_s = allowance_s(self._policy.stop, self._rules.tokens(state))
        passed = allowed_s is not None and now_s - ask.started_s >= allowed_s
        passed |= self._hangs(now_s)
        if not stops(self._policy.stop, deadline_passed=passed):
            return True
        if leader is not ask:
            return False
        stopped_s = self._stop(ask, worker)
        return isinstance(state, Fetching) and now_s - stopped_s < GRACE_S

    def _hangs(self, now_s: float) -> bool:
        oldest_s = next(iter(self._stopped.values()), now_s)
        return now_s - oldest_s > HUNG_S

    def _stop(self, ask: Ask, worker: IoWorker | None) -> float:
        """Begin no more of the operation under way; when that was said first."""
        assert ask.ticket is not None, "there is nothing to stop"
        if ask.stopped_s is None:
            ask.stopped_s = self._stopped[ask.ticket] = self._clock.now_s()
            if worker is not None:
                worker.cancel(ask.ticket)
        return ask.stopped_s

    def _go_alone(self, ask: Ask, worker: IoWorker) -> None:
        """The request that ``ask`` followed has its pages, or will not get them."""
        del self._followers[ask.id]
        ask.follows = None
        self._try(ask, worker)

    def admitted(self, request: RequestId, end: int, told: Told) -> FromStorage | None:
        """A request has its lease, at ``end`` pages: what had landed for it is its own business.
        ``told``: hears, perhaps later, what storage had for it and what came of that."""
        ask = self._leave(request, Left(end, Reason.DEADLINE, told), Reason.NOT_LOADED)
        return ask.landed if ask is not None else None

    def forget(self, request: RequestId, worker: IoWorker | None, told: Told) -> None:
        """A request ends before it was admitted. Buffers of I/O under way stay its own."""
        ask = self._by_request.get(request)
        if ask is not None and ask.ticket is not None:
            self._stop(ask, worker)
        self._leave(request, Left(0, Reason.ABORTED, told), Reason.ABORTED)

    def cancel(self, worker: IoWorker) -> None:
        """Begin to fetch no more of what is under way."""
        for ask in self._by_ticket.values():
            self._stop(ask, worker)

    def _leave(self, request: RequestId, left: Left, unused: Reason) -> Ask | None:
        """A request waits no longer; what had landed beyond ``left.end`` is lost as ``unused``.
        None, and it counts as ``left`` says when it has ended, where an operation is under way."""
        ask = self._by_request.pop(request, None)
        if ask is None:
            left.told(None)
            return None
        del self._by_id[ask.id]
        if ask.follows is not None:
            del self._followers[ask.id]
            ask.follows = None
        ended = ask.ticket is None
        if ended:
            left.told(self._book.settle(ask.id, left.end, unused))
        else:
            ask.left = left
            self._stop(ask, None)
        self._let_go(ask)
        return ask if ended else None

    # -- time ------------------------------------------------------------------------------------

    def tick(self, head: RequestId | None, worker: IoWorker) -> None:
        """Try again what was put off, or waited for another request's prefetch. ``head``: the
        request whose turn comes next."""
        self._step += 1
        if self._leader_ended:
            self._leader_ended = False
            for ask in list(self._followers.values()):
                if ask.follows is not None and not ask.follows.asking:
                    self._go_alone(ask, worker)
        first = self._by_request.get(head) if head is not None else None
        for due in self._book.due(self._step, first.id if first else None):
            self._try(self._by_id[due], worker)

    def owned(self, group: GroupId) -> list[PageIds]:
        """Host pages that fetches are filling, for ``check``."""
        return [ask.pages[group] for ask in self._by_ticket.values() if ask.pages]
