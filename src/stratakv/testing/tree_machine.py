"""The tree machine: Hypothesis drives a prefix tree through everything a server can do to it.

Requests of a tiny alphabet arrive, load, extend in chunks with or without their states, keep marks,
are retracted, resumed or given up, finish or abort at any moment; copies and fetches begin, end and
fail in any order; every group is evicted on both tiers. The driver compares each answer with the
perfect model. Owns the walks; must not decide what is right.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from stratakv.spec.groups import CacheSpec
from stratakv.testing.specs import MAX_GROUPS, specs
from stratakv.testing.tree_books import Prefix
from stratakv.testing.tree_driver import TreeDriver
from stratakv.testing.tree_records import Copy, WalkRequest
from stratakv.testing.tree_retraction import RetractionDriver
from stratakv.testing.tree_storing import StoringDriver
from stratakv.tree.nodes import Tier
from stratakv.tree.residency import Residency, ResidencyEvent

MAX_PAGES = 8
MAX_REQUESTS = 3
STEPS = 16
"""Steps of one walk; its opening has served up to three prompts already."""

PICK = st.integers(0, 1 << 16)
YES = st.booleans()
TIER = st.sampled_from(Tier)
CHUNK = st.integers(1, 4)
TAIL = st.lists(st.integers(0, 1), max_size=4).map(tuple)


class TreeMachine(RuleBasedStateMachine):
    """``did`` and ``stepped`` count, over all walks, what was exercised. ``it``, ``retraction`` and
    ``storing`` are there once a walk has begun."""

    it: TreeDriver
    retraction: RetractionDriver
    storing: StoringDriver
    policy: ClassVar[str] = "lru"
    did: ClassVar[Counter[str]] = Counter()
    stepped: ClassVar[Counter[tuple[Residency, ResidencyEvent]]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[Prefix] = [()]
        self.sound = False  # no step has failed: the walk may be wound up

    @initialize(
        spec=specs(),
        device=st.tuples(*[st.integers(4, 12)] * MAX_GROUPS),
        host=st.tuples(*[st.integers(2, 10)] * MAX_GROUPS),
        served=st.lists(st.tuples(PICK, TAIL, CHUNK), min_size=1, max_size=3),
        running=st.lists(st.tuples(PICK, TAIL, CHUNK), max_size=2),
        stored=st.integers(0, 3),
    )
    def begin(
        self,
        spec: CacheSpec,
        device: tuple[int, ...],
        host: tuple[int, ...],
        served: list[tuple[int, Prefix, int]],
        running: list[tuple[int, Prefix, int]],
        stored: int,
    ) -> None:
        groups = len(spec.groups)
        self.opened(TreeDriver(self.drawn(spec), device[:groups], host[:groups], self.policy))
        if stored:
            self.storing.start()
        with self.step():
            for pick, tail, chunk in served:  # a walk that begins with something cached does more
                self._serve(pick, tail, chunk, generous=bool(pick & 1))
                if pick & 2:
                    self._save_all(pick, ok=True)
                if pick & 4:
                    self._push_out(pick)
            for pick, tail, chunk in running:
                prompt = self.prompt(pick, (*tail, 0))
                request = self.it.arrive(prompt, len(prompt) - 1, load=True)
                self.it.extend(request, chunk, generous=False, state=bool(pick & 1))
                self.began(request, pick // 4)
                if pick & 2:
                    self._park(request, pick // 4)

    def drawn(self, spec: CacheSpec) -> CacheSpec:
        """What a walk runs on."""
        return spec

    def opened(self, it: TreeDriver) -> None:
        self.it = it
        self.retraction = RetractionDriver(it)
        self.storing = StoringDriver(it)

    def began(self, request: WalkRequest, pick: int) -> None:
        """A request runs as the walk begins."""

    @property
    def full(self) -> bool:
        return len(self.it.requests) >= MAX_REQUESTS

    @contextmanager
    def step(self) -> Generator[TreeDriver]:
        self.sound = False
        yield self.it
        self.it.verify()
        self.sound = True

    def prompt(self, pick: int, tail: Prefix) -> Prefix:
        """An earlier prompt, cut somewhere, and something new: prefixes must collide."""
        base = self.prompts[pick % len(self.prompts)]
        prompt = (*base[: pick // 64 % (MAX_PAGES + 1)], *tail)[:MAX_PAGES] or (0,)
        self.prompts.append(prompt)
        return prompt

    def request(self, pick: int) -> WalkRequest:
        return self.it.requests[pick % len(self.it.requests)]

    # -- requests ------------------------------------------------------------------------------

    @precondition(lambda self: not self.full)
    @rule(pick=PICK, tail=TAIL, exact=YES, load=YES)
    def arrive(self, pick: int, tail: Prefix, exact: bool, load: bool) -> None:  # noqa: FBT001
        with self.step() as it:
            prompt = self.prompt(pick, tail)
            # A prompt of exactly k pages may match k - 1: one token is always computed.
            it.arrive(prompt, len(prompt) - exact, load=load)

    @precondition(lambda self: not self.full)
    @rule(pick=PICK, tail=TAIL, chunk=CHUNK, generous=YES)
    def serve(self, pick: int, tail: Prefix, chunk: int, generous: bool) -> None:  # noqa: FBT001
        with self.step():
            self._serve(pick, tail, chunk, generous=generous)

    def _serve(self, pick: int, tail: Prefix, chunk: int, *, generous: bool) -> None:
        it, prompt = self.it, self.prompt(pick, tail)
        request = it.arrive(prompt, len(prompt) - 1, load=True)
        last, late = len(prompt) - 1, bool(pick & 16)
        while request.lease.end < len(prompt):
            due = request.lease.end + chunk >= last and not late
            if not it.extend(request, chunk, generous=generous, state=due or bool(pick & 8)):
                break
            if request.lease.end == last:
                it.keep(request, request.lease.end, request.continued)
            elif pick & 32:
                it.pave(request, request.lease.end)
        if late:
            it.snapshot(request)
        it.keep(request, request.lease.end, request.continued)
        it.finish(request)

    @precondition(lambda self: self.it.requests)
    @rule(pick=PICK, chunk=CHUNK, generous=YES, state=YES, roll=YES)
    def extend(self, pick: int, chunk: int, generous: bool, state: bool, roll: bool) -> None:  # noqa: FBT001
        """``roll``: as a request that decodes keeps its state from time to time."""
        with self.step() as it:
            request = self.request(pick)
            if request.lease.end < len(request.prompt):
                it.extend(request, chunk, generous=generous, state=state)
                if roll:
                    it.roll(request)

    @precondition(lambda self: self.it.requests)
    @rule(pick=PICK, answer=TAIL, every=st.integers(1, 3))
    def decode(self, pick: int, answer: Prefix, every: int) -> None:
        """Page by page, with a rolling checkpoint every few pages."""
        with self.step() as it:
            request = self.request(pick)
            self.extend_prompt(request, answer)
            for page in range(request.lease.end + 1, len(request.prompt) + 1):
                due = not page % every
                if not it.extend(request, 1, generous=False, state=due):
                    break
                if due:
                    it.roll(request)

    def extend_prompt(self, request: WalkRequest, answer: Prefix) -> None:
        """Its prompt goes on with what it has generated."""
        request.prompt = (*request.prompt, *answer)[:MAX_PAGES]
        self.prompts.append(request.prompt)

    @precondition(lambda self: self.it.requests)
    @rule(pick=PICK)
    def snapshot(self, pick: int) -> None:
        with self.step() as it:
            request = self.request(pick)
            if it.snapshot(request) and pick % 2:
                it.roll(request)

    @precondition(lambda self: self.it.requests)
    @rule(pick=PICK, back=st.integers(0, 3), pave=YES, every=st.integers(0, 3))
    def keep(self, pick: int, back: int, pave: bool, every: int) -> None:  # noqa: FBT001
        with self.step() as it:
            request = self.request(pick)
            if pave:
                it.pave(request, request.lease.end - back, every)
            else:
                it.keep(request, request.lease.end - back, request.continued)

    @precondition(lambda self: self.it.requests)
    @rule(pick=PICK, keep=YES)
    def finish(self, pick: int, keep: bool) -> None:  # noqa: FBT001
        """With a checkpoint at the end, or as an abort at any moment."""
        with self.step() as it:
            request = self.request(pick)
            if keep:
                it.snapshot(request)
                rolling, end = request.rolling, request.lease.end
                it.keep(request, end, request.continued, rolling if pick % 4 else 0)
                if it.tree.checkpoints.at(request.lease, rolling):
                    it.keep(request, rolling, request.continued)
            it.finish(request)

    @precondition(lambda self: self.it.requests)
    @rule(pick=PICK, beyond=CHUNK)
    def go_apart(self, pick: int, beyond: int) -> None:
        with self.step() as it:
            if self.request(pick).lease.near:  # nobody who is spilled is apart
                return
            it.go_apart(self.request(pick), beyond)
            while len(it.apart) > 1 + pick % 2:
                it.finish(it.apart[0])

    # -- retraction ----------------------------------------------------------------------------

    @precondition(lambda self: self.it.requests and len(self.retraction.retracted) < MAX_REQUESTS)
    @rule(pick=PICK)
    def retract(self, pick: int) -> None:
        with self.step():
            self._park(self.request(pick), pick // 4)

    def _park(self, request: WalkRequest, pick: int) -> None:
        """And leave it at that, or push what it has off the device, perhaps to bring it back at
        once; or fail to save it."""
        it = self.it
        if not self.retraction.retract(request, pick // 4 % it.spec.page_tokens):
            return
        then = pick % 4
        for copy in [copy for copy in it.copies if then and not copy.load]:
            it.end_copy(copy, ok=then < 3)
        if 0 < then < 3:
            self._push_out(pick // 16)
        if then == 1:
            self.retraction.resume(self.retraction.retracted[-1], decline=not pick // 16 % 8)

    @precondition(lambda self: self.retraction.retracted and not self.full)
    @rule(pick=PICK, decline=YES)
    def resume(self, pick: int, decline: bool) -> None:  # noqa: FBT001
        with self.step():
            away = self.retraction.retracted
            self.retraction.resume(away[pick % len(away)], decline=decline and pick % 2 == 0)

    @precondition(lambda self: self.retraction.retracted)
    @rule(pick=PICK, lose=YES)
    def give_up(self, pick: int, lose: bool) -> None:  # noqa: FBT001
        """``lose``: a backup under it fails; else it is aborted."""
        with self.step() as it:
            retracted = self.retraction.retracted[pick % len(self.retraction.retracted)]
            held = it.model.leases[retracted.id].on_host
            under: list[Copy] = [
                copy
                for copy in it.copies
                if not copy.load and any(held & set(at) for at in copy.places.values())
            ]
            if lose and under:
                it.end_copy(under[pick % len(under)], ok=False)
            else:
                self.retraction.forget(retracted)

    # -- tiers ---------------------------------------------------------------------------------

    @precondition(lambda self: self.it.model.nodes)
    @rule(pick=PICK, group=st.integers(0, MAX_GROUPS - 1), count=st.integers(1, 6))
    def backup(self, pick: int, group: int, count: int) -> None:
        with self.step() as it:
            tips = list(it.model.nodes)
            it.backup(tips[-1 - pick % len(tips)], group % len(it.spec.groups), count)

    @precondition(lambda self: self.it.model.nodes)
    @rule(pick=PICK, ok=YES)
    def save_all(self, pick: int, ok: bool) -> None:  # noqa: FBT001
        """Write a whole path through, every group of it."""
        with self.step():
            self._save_all(pick, ok=ok or pick % 4 > 0)

    def _save_all(self, pick: int, *, ok: bool) -> None:
        it = self.it
        tips = list(it.model.nodes) or [()]
        tip = tips[-1 - pick % len(tips)]
        before = len(it.copies)
        for group in it.model.groups:
            if tip in it.model.nodes:
                it.backup(tip, group, len(tip))
        for copy in it.copies[before:]:
            it.end_copy(copy, ok=ok)

    @precondition(lambda self: self.it.model.nodes)
    @rule(pick=PICK)
    def offload(self, pick: int) -> None:
        with self.step():
            self._save_all(pick, ok=True)
            self._push_out(pick // 8)

    def _push_out(self, pick: int) -> None:
        for group in self.it.model.groups:
            self.it.evict(Tier.DEVICE, group, 1 + pick % 8)

    @precondition(lambda self: self.it.copies)
    @rule(pick=PICK, ok=YES)
    def end_copy(self, pick: int, ok: bool) -> None:  # noqa: FBT001
        with self.step() as it:
            it.end_copy(it.copies[pick % len(it.copies)], ok=ok)

    @precondition(lambda self: not self.full)
    @rule(pick=PICK, tail=TAIL, decline=YES)
    def load(self, pick: int, tail: Prefix, decline: bool) -> None:  # noqa: FBT001
        """A request for something that is in the tree."""
        with self.step() as it:
            tips = list(it.model.nodes) or [(0,)]
            prompt = (*tips[-1 - pick % len(tips)], *tail)[:MAX_PAGES]
            self.prompts.append(prompt)
            it.arrive(prompt, len(prompt), load=True, decline=decline and pick % 2 == 0)

    @precondition(lambda self: len(self.it.fetches) < 2)
    @rule(pick=PICK, tail=TAIL, generous=YES, race=YES)
    def fetch(self, pick: int, tail: Prefix, generous: bool, race: bool) -> None:  # noqa: FBT001
        """``race``: a request computes the same pages meanwhile."""
        with self.step() as it:
            prompt = self.prompt(pick, tail)
            begun = it.fetch(prompt, generous=generous)
            if race and not self.full:
                request = it.arrive(prompt, len(prompt), load=False)
                if request.lease.end < len(prompt):
                    it.extend(request, 2, generous=generous)
            if begun and pick & 1:
                it.end_fetch(it.fetches[-1], landed=True)

    @precondition(lambda self: self.it.fetches)
    @rule(pick=PICK, landed=YES)
    def end_fetch(self, pick: int, landed: bool) -> None:  # noqa: FBT001
        with self.step() as it:
            it.end_fetch(it.fetches[pick % len(it.fetches)], landed=landed or pick % 4 > 0)

    @precondition(lambda self: self.it.model.nodes)
    @rule(tier=TIER, group=st.integers(0, MAX_GROUPS - 1), count=st.integers(1, 6))
    def evict(self, tier: Tier, group: int, count: int) -> None:
        with self.step() as it:
            group %= len(it.spec.groups)
            if group and count % 3 == 2:
                it.evict_spare(tier, group, count)
            elif self.policy != "lru" and tier == Tier.DEVICE and count % 2:
                it.evict_saved(group, count)
            else:
                it.evict(tier, group, count)

    @precondition(lambda self: len(self.it.model.nodes) > 4)
    @rule()
    def probe(self) -> None:
        """Every prompt ever sent matches exactly as far as it should; matching changes nothing."""
        with self.step() as it:
            for prompt in self.prompts:
                it.match(prompt, len(prompt))

    @precondition(lambda self: len(self.it.model.nodes) > 4)
    @rule(tier=TIER, group=st.integers(0, MAX_GROUPS - 1))
    def rebuild(self, tier: Tier, group: int) -> None:
        """What the tree does on its own once a queue has grown long must change no order."""
        with self.step() as it:
            it.tree.internals.pins.rebuild(tier, group % len(it.spec.groups))

    @precondition(lambda self: len(self.it.model.nodes) > 6)
    @rule(pick=PICK)
    def flush(self, pick: int) -> None:
        with self.step():
            if not pick % 4:
                self.drain()

    def drain(self) -> None:
        self.storing.drain()
        self.retraction.drain()

    def teardown(self) -> None:
        if not self.sound:
            return
        did = self.it.did.copy()
        self.drain()
        self.did.update(did)
        self.did.update(f"walks with {what}" for what, count in did.items() if count)
        self.did["walks"] += 1
        self.stepped.update(self.it.model.stepped)
