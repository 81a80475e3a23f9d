"""What the loop decides by itself: who is refused, when a step is collected, when rows come back.

The engine is the production's over pages without bytes; what stands for a model says one token
again and again, so that every answer is known. Steps are collected as they are launched, or one is
launched ahead.
"""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from stratakv.assembly.build import Sockets, build
from stratakv.assembly.cache import allocators
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.sizing import Sizes
from stratakv.bench.policy_cache import NoMemory
from stratakv.core.config import EngineConfig
from stratakv.core.errors import RequestError
from stratakv.core.ids import RequestId
from stratakv.engine.executor import SerialExecutor
from stratakv.engine.forward import Forward
from stratakv.engine.request import Failure, FinishReason, Phase, Prompt, SamplingParams
from stratakv.engine.roles import FirstToken, MayStart, Received, Start, UnifiedRole
from stratakv.testing.compute_queue import ManualFence
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.transfer_ends import BackgroundSteps
from stratakv.tiers.progress import PAUSE_POLLS, POLL_S
from stratakv.transfer.copy_plan import NOTHING_LAUNCHED
from tests.engines import token_spec

PAGE = 4
LONGEST = 32
TOKEN = 7
VOCAB = 16
BOTH = pytest.mark.parametrize("depth", [1, 2])


@dataclass
class Model:
    """Says ``TOKEN``. ``broken``: the rows of which it says NaN."""

    broken: set[int] = field(default_factory=set)

    def forward(self, batch):
        logits = torch.zeros((int(batch.sampled.sum()), VOCAB))
        logits[:, TOKEN] = 1.0
        finite = torch.from_numpy(~np.isin(batch.rows, list(self.broken)))
        return Forward(logits, finite, batch.sampled)


class Serial(SerialExecutor):
    """Counts how a step ended."""

    def __init__(self, runner, token_source):
        super().__init__(runner, token_source)
        self.steps = []
        self.launches = deque()

    def collect(self):
        self.steps.append("collect")
        return super().collect()

    def idle(self):
        self.steps.append("idle")
        super().idle()


class Ahead(Serial):
    """Computes the oldest of two steps when it is collected."""

    depth = 2
    fence = NOTHING_LAUNCHED

    def launch(self, batch, sampling):
        assert len(self.launches) < 2, "a third step is launched"
        self.launches.append((batch, sampling))

    def collect(self):
        super().launch(*self.launches.popleft())
        return super().collect()

    def launched(self):
        return self.fence


class Lab:
    def __init__(self, depth=1, device=40, role=UnifiedRole, **settings):
        spec = token_spec(PAGE)
        config = EngineConfig(
            page_tokens=PAGE,
            max_running=3,
            chunk_tokens=8,
            step_tokens=16,
            **{"reserve_tokens": 4, **settings},
        )
        count = len(spec.groups)
        sizes = Sizes.of(spec, [device] * count, [40] * count, LONGEST)
        plan = EnginePlan.of(config, sizes, b"model", steps_at_once=depth)
        plan = replace(plan, vocab_size=VOCAB)
        self.model, self.slept, made = Model(), [], []

        def executor(runner, token_source):
            made.append((Serial, Ahead)[depth - 1](runner, token_source))
            return made[0]

        sockets = Sockets(role=role, sleep=self.slept.append)
        memory = NoMemory(allocators(plan))
        self.engine, self.cache = build(plan, memory, lambda _: self.model, sockets, executor)
        (self.executor,) = made
        self.out = {}

    def submit(self, name, length=6, count=4, **sampling):
        tokens = np.full(length, ord(name[0]) % 16, np.int32)
        params = SamplingParams(temperature=0.0, max_tokens=count, **sampling)
        self.engine.submit(Prompt(id=RequestId(name), tokens=tokens, sampling=params))
        self.out[name] = []

    def step(self):
        before = len(self.executor.steps)
        outputs = self.engine.step()
        assert len(self.executor.steps) == before + 1, "one collect or one idle a step"
        for output in outputs:
            assert not self.finish(output.request), "it had ended"
            self.out[output.request].append(output)
        self.engine.check()
        return outputs

    def drain(self):
        while self.engine.has_work():
            self.step()

    def tokens(self, name):
        return [one.token for one in self.out[name] if one.token is not None]

    def finish(self, name):
        return self.out[name][-1].finish if self.out[name] else None

    def rows(self):
        return self.engine.stats().running

    def nothing_is_left(self):
        self.drain()
        assert self.engine.flush()
        assert all(pool.free == pool.total for pool in self.cache.tiers.pools.stats())
        assert not len(self.cache.tiers.tree.leases)


# -- who is let in -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "device", "why"),
    [
        (0, 40, "the prompt is empty"),
        (LONGEST, 40, f"the prompt has {LONGEST} tokens; at most {LONGEST - 1} are allowed"),
        (20, 4, "20 tokens of prompt and 4 to generate need"),
    ],
)
def test_what_could_never_be_served_is_refused_and_leaves_nothing(length, device, why):
    lab = Lab(device=device)
    with pytest.raises(RequestError, match=why):
        lab.submit("a", length)
    assert not lab.engine.has_work()
    lab.submit("a", 4)  # its name is free
    lab.nothing_is_left()


@pytest.mark.parametrize("tokens", [[3, VOCAB], [-1, 3], [2**31 - 1], [-(2**31)]])
def test_a_token_that_the_model_has_not_is_refused(tokens):
    """An embedding has no row for it: the forward of all others would fail."""
    lab, ids, sampling = Lab(), np.array(tokens, np.int32), SamplingParams(max_tokens=1)
    with pytest.raises(RequestError, match=rf"token ids outside \[0, {VOCAB}\)"):
        lab.engine.submit(Prompt(id=RequestId("a"), tokens=ids, sampling=sampling))
    lab.submit("a")
    lab.nothing_is_left()


class ComputedElsewhere(UnifiedRole):
    """All prompts are computed by a peer, which says that ``first`` comes after them."""

    def __init__(self, first):
        self.first, self.due = first, []

    def may_start(self, request):
        return Start.RECEIVE

    def reserved(self, request, pages):
        self.due.append(Received(request.id, FirstToken(self.first)))

    def poll(self):
        ends, self.due = self.due, []
        return ends


@pytest.mark.parametrize("first", [VOCAB, -1, 2**31, -(10**12), 10**30])
def test_a_first_token_that_the_model_has_not_fails_its_request_alone(first):
    role = ComputedElsewhere(TOKEN)
    lab = Lab(role=lambda: role)
    lab.submit("a", count=9)
    lab.step()
    role.first = first
    lab.submit("b")
    lab.drain()
    assert (lab.tokens("a"), lab.finish("a")) == ([TOKEN] * 9, FinishReason.LENGTH)
    assert (lab.tokens("b"), lab.finish("b")) == ([], FinishReason.ERROR)
    assert lab.out["b"][-1].failure is Failure.TRANSFER
    lab.nothing_is_left()


def test_a_name_is_taken_until_its_request_has_ended():
    lab = Lab()
    lab.submit("a")
    with pytest.raises(RequestError, match="request a exists already"):
        lab.submit("a")
    lab.drain()
    lab.submit("a")
    lab.nothing_is_left()


@BOTH
def test_who_asks_for_more_than_there_is_room_for_ends_where_the_model_does(depth):
    lab = Lab(depth)
    lab.submit("a", LONGEST - 2, 100)
    lab.drain()
    assert (lab.tokens("a"), lab.finish("a")) == ([TOKEN] * 2, FinishReason.LENGTH)


# -- launch and collect --------------------------------------------------------------------------


def test_an_engine_alone_collects_what_it_has_launched():
    lab = Lab()
    lab.submit("a", 6, 3)
    for count in range(1, 4):
        lab.step()
        assert lab.tokens("a") == [TOKEN] * count
    lab.drain()  # of its backup
    assert lab.executor.steps[:3] == ["collect"] * 3
    assert set(lab.executor.steps[3:]) <= {"idle"}


def test_a_device_that_runs_ahead_is_given_a_second_step_before_the_first_is_collected():
    lab = Lab(2)
    lab.submit("a", 6, 4)
    lab.submit("b", 12, 4)  # two chunks, so that there is a second step
    assert lab.step() == []
    assert len(lab.executor.launches) == 1
    lab.step()
    assert lab.executor.steps == ["idle", "collect"]
    lab.drain()
    assert lab.tokens("a") == lab.tokens("b") == [TOKEN] * 4
    lab.nothing_is_left()


@BOTH
def test_a_step_with_nothing_to_do_says_so_to_the_executor(depth):
    lab = Lab(depth)
    assert not lab.engine.has_work()
    assert lab.step() == []
    assert lab.executor.steps == ["idle"]
    assert not lab.slept, "nobody waits, so nothing is waited for"


class Later(UnifiedRole):
    """Lets nobody start before the third look."""

    looks = 0

    def may_start(self, request):
        self.looks += 1
        return Start.WAIT if self.looks < 3 else super().may_start(request)

    def poll(self):
        return [MayStart(RequestId("a"))]


def test_who_waits_for_the_role_is_waited_for_and_not_spun_on():
    lab = Lab(role=Later)
    lab.submit("a")
    lab.step()
    lab.step()
    assert lab.out["a"] == []
    assert lab.slept
    lab.drain()
    assert lab.tokens("a") == [TOKEN] * 4


def test_an_engine_that_waits_for_its_role_alone_pauses_once_until_something_comes():
    """It looks at no copy meanwhile: a peer's event may end the pause, and nothing else has to."""
    lab = Lab(role=Later)
    lab.submit("a")
    lab.step()
    assert lab.slept == [PAUSE_POLLS * POLL_S]


# -- the end between launch and collect ----------------------------------------------------------


@BOTH
def test_an_abort_before_its_turn_takes_no_row(depth):
    lab = Lab(depth)
    lab.submit("a")
    lab.engine.abort(RequestId("a"))
    lab.engine.abort(RequestId("nobody"))
    lab.step()
    assert (lab.tokens("a"), lab.finish("a")) == ([], FinishReason.ABORT)
    assert not lab.engine.has_work()


def test_the_row_of_one_that_was_aborted_stays_until_its_step_is_collected():
    lab = Lab(2)
    lab.submit("a", 12, 8)
    lab.step()
    assert lab.executor.launches
    lab.engine.abort(RequestId("a"))
    lab.engine.check()
    (lease,) = lab.cache.tiers.tree.leases
    assert lab.rows() == 0, "it runs no more"
    assert not lab.engine.flush(), "a launched step reads its pages"
    lab.step()
    assert lease not in list(lab.cache.tiers.tree.leases)
    assert (lab.tokens("a"), lab.finish("a")) == ([], FinishReason.ABORT)
    lab.nothing_is_left()


@BOTH
def test_what_fails_ends_alone_and_is_reported_once(depth):
    lab = Lab(depth)
    lab.submit("a", 6, 8)
    lab.submit("b", 6, 8)
    while not lab.tokens("a"):
        lab.step()
    lab.model.broken = {lab.engine.status(RequestId("a")).row}
    lab.drain()
    assert (lab.finish("a"), lab.out["a"][-1].failure) == (FinishReason.ERROR, Failure.NOT_FINITE)
    assert lab.tokens("b") == [TOKEN] * 8
    assert lab.engine.stats().failures[Failure.NOT_FINITE.value] == 1
    lab.nothing_is_left()


@BOTH
def test_a_stop_token_ends_it_though_another_step_is_launched(depth):
    lab = Lab(depth)
    lab.submit("a", 6, 8, stop_tokens=(TOKEN,))
    lab.submit("b", 6, 8)
    lab.drain()
    assert (lab.tokens("a"), lab.finish("a")) == ([TOKEN], FinishReason.STOP)
    assert lab.tokens("b") == [TOKEN] * 8
    lab.nothing_is_left()


@BOTH
def test_a_retraction_collects_first_and_the_request_says_the_rest(depth):
    lab = Lab(depth)
    lab.submit("a", 6, 8)
    while len(lab.tokens("a")) < 2 or len(lab.executor.launches) < depth - 1:
        lab.step()
    lab.engine.retract(RequestId("a"))
    lab.engine.check()
    assert not lab.executor.launches
    assert lab.engine.stats().retracted == 1
    lab.drain()
    assert lab.tokens("a") == [TOKEN] * 8
    assert lab.cache.tiers.pools.counters.retracted == 1
    lab.nothing_is_left()


def test_where_pages_run_short_the_youngest_leaves_and_comes_back():
    lab = Lab(device=9, reserve_tokens=1)
    lab.submit("a", 6, 14)
    lab.submit("b", 6, 14)
    lab.drain()
    assert lab.tokens("a") == lab.tokens("b") == [TOKEN] * 14
    assert lab.cache.tiers.pools.counters.retracted > 0
    lab.nothing_is_left()


@BOTH
def test_a_close_gives_back_what_a_launched_step_holds(depth):
    lab = Lab(depth)
    lab.submit("a", 12, 8)
    lab.submit("b", 6, 8)
    lab.step()
    lab.engine.close()
    lab.cache.check()
    assert not len(lab.cache.tiers.tree.leases)


def test_a_close_waits_for_what_was_launched():
    """Memory of both tiers is given back next."""
    lab, held = Lab(2), ManualFence()
    lab.submit("a", 6, 8)
    lab.step()
    lab.executor.fence = held
    closed = BackgroundSteps(lab.engine.close)
    assert not closed.done_within(0.05)
    held.open()
    assert closed.done_within(PATIENCE_S)


def test_nothing_is_flushed_under_a_request_that_runs():
    lab = Lab()
    lab.submit("a")
    lab.step()
    cached = len(lab.cache.tiers.tree)
    assert not lab.engine.flush()
    assert len(lab.cache.tiers.tree) == cached
    lab.nothing_is_left()


@BOTH
def test_where_a_request_is_is_reported_until_it_ends(depth):
    lab, name = Lab(depth), RequestId("a")
    lab.submit("a", 6, 8)
    lab.submit("b", 6, 8)

    def place():
        one = lab.engine.status(name)
        return one.phase, one.row >= 0, one.computed, one.in_flight, len(one.known)

    assert place() == (Phase.WAITING, False, 0, 0, 6)
    lab.engine.admit()
    assert place() == (Phase.PREFILLING, True, 0, 0, 6)
    while not lab.tokens("a"):
        lab.step()
    assert place() == (Phase.DECODING, True, 6, 0, 7)
    lab.step()
    before = lab.engine.status(name)
    assert before.in_flight == depth - 1
    known = len(before.known)
    assert [one.id for one in lab.engine.statuses()] == ["a", "b"]
    assert str(before) in lab.engine.description()
    lab.engine.retract(name)
    assert place()[:2] == (Phase.RETRACTED, False)
    assert lab.engine.status(name).retracted is not None
    lab.drain()
    assert len(before.known) == known < 14, "it is as it was"
    assert lab.engine.status(name) is None
    assert lab.engine.statuses() == []
    lab.nothing_is_left()


# -- what it reports -----------------------------------------------------------------------------


def test_how_old_pages_grow_is_measured_where_it_is_asked_for():
    plain, asked = Lab(), Lab(kv_cache_metrics=True)
    for lab in (plain, asked):
        for name in "ab":
            lab.submit(f"a{name}")
            lab.drain()
    assert plain.engine.stats().ages is None
    ages = asked.engine.stats().ages
    assert ages is not None
    assert sum(sum(one.counts) for one in ages.reuse_gap), "the second prompt is the first's"


@BOTH
def test_a_steps_time_is_split_by_part_and_phases_add_up(depth):
    lab = Lab(depth)
    for name in "ab":
        lab.submit(name, 6, 3)
    assert lab.engine.stats().phases["waiting"] == 2
    lab.step()
    stats = lab.engine.stats()
    assert sum(stats.phases.values()) == stats.waiting + stats.running == 2
    lab.drain()
    assert all(lab.engine.stats().step_s.values()), "a part never came"
    lab.nothing_is_left()
