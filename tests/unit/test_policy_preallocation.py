"""What a decode engine takes for a prompt that another one computes: the worked lengths and budgets
of SGLang's own formulas, in pages, and a walk in which every booking must be kept.
"""

from random import Random

import pytest

from stratakv.policy.admission import Demand, PageBudget, demand
from stratakv.policy.checkpoints import last_end
from stratakv.policy.preallocation import Admitted, admitted, whole_prompts
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    handed_over,
    needed,
    peak_pages,
)
from stratakv.testing.specs import small_spec

LENGTHS = [
    # n, W, P: where its window starts, tokens and pages from there, pages of all
    (1, 128, 256, 0, 1, 1, 1),
    (128, 128, 256, 0, 128, 1, 1),
    (383, 128, 256, 0, 383, 2, 2),
    (384, 128, 256, 256, 128, 1, 2),
    (639, 128, 256, 256, 383, 2, 3),
    (640, 128, 256, 512, 128, 1, 3),
    (1000, 128, 256, 768, 232, 1, 4),
    (8192, 128, 256, 7936, 256, 1, 32),
    (8193, 128, 256, 7936, 257, 2, 33),
    (131072, 128, 256, 130816, 256, 1, 512),
    (574, 2047, 128, 0, 574, 5, 5),
    (5000, 2047, 128, 2944, 2056, 17, 40),
    (5120, 1024, 64, 4096, 1024, 16, 80),
    (131072, 4096, 64, 126976, 4096, 64, 2048),
]


@pytest.mark.parametrize(("n", "window", "page", "start", "tail", "pages", "whole"), LENGTHS)
def test_a_window_takes_its_tail_and_the_anchor_all(n, window, page, start, tail, pages, whole):
    span = needed(KeepWindow(window), n, page)
    assert (span.start * page, n - span.start * page, len(span)) == (start, tail, pages)
    assert len(needed(KeepAll(), n, page)) == whole
    assert len(needed(KeepBoundary(), n, page)) == 1


SAME_AGAIN = [
    # n, W, P: start, tokens and pages of a tail that the same prompt sent again can hit
    (1, 128, 256, 0, 1, 1),
    (128, 128, 256, 0, 128, 1),
    (383, 128, 256, 0, 383, 2),
    (384, 128, 256, 0, 384, 2),
    (639, 128, 256, 256, 383, 2),
    (640, 128, 256, 256, 384, 2),
    (1000, 128, 256, 512, 488, 2),
    (8192, 128, 256, 7680, 512, 2),
    (8193, 128, 256, 7936, 257, 2),
    (131072, 128, 256, 130560, 512, 2),
    (574, 2047, 128, 0, 574, 5),
    (5000, 2047, 128, 2944, 2056, 17),
    (5120, 1024, 64, 4032, 1088, 17),
    (131072, 4096, 64, 126912, 4160, 65),
]


@pytest.mark.parametrize(("n", "window", "page", "start", "tail", "pages"), SAME_AGAIN)
def test_a_window_below_the_last_boundary_fits_what_decoding_books(
    n, window, page, start, tail, pages
):
    """What is handed over for the same prompt to hit begins a page earlier at most."""
    rule = KeepWindow(window)
    span = handed_over(rule, n, page)
    assert (span.start * page, n - span.start * page, len(span)) == (start, tail, pages)
    assert span.start == needed(rule, last_end(n, page) * page, page).start
    assert pages <= peak_pages(rule, n, 1, page)


def test_a_window_of_no_whole_pages_is_whole_below_the_last_boundary():
    """SGLang's formula begins at 3,072 of 5,120 here, and the window at 4,992 begins at 2,945."""
    assert handed_over(KeepWindow(2047), 5120, 128).start * 128 == 2944
    assert (5120 - 1 - 2047) // 128 * 128 == 3072


@pytest.mark.parametrize("page", [1, 3, 4, 64, 256])
def test_a_tail_is_aligned_and_holds_its_window_and_one_page_more_at_most(page):
    for window in (1, 2, 5, 128, 200):
        for n in [*range(1, 40), *range(250, 260), 1000]:
            span = needed(KeepWindow(window), n, page)
            tail = n - span.start * page
            assert tail == n - max(0, n - window) // page * page
            assert min(n, window) <= tail < window + page
            assert len(span) <= -(-window // page) + 1
            assert peak_pages(KeepWindow(window), 10_000, 1, page) == -(-window // page) + 1


# -- budgets -------------------------------------------------------------------------------------

V4 = small_spec([KeepWindow(128)], page_tokens=256)
POOL = (262_144 // 256, 26_112 // 256)
RESERVED = 512


def decoding(spec: CacheSpec, tokens: int, most: int, received: int = 0) -> Demand:
    """Of a request that may come to ``most`` tokens and books a few beyond ``tokens``."""
    return demand(spec, most, min(most, tokens + RESERVED), 1, 0, received)


def worked() -> tuple[PageBudget, list[int], list[int]]:
    """The budget of four that decode and two that receive, and of their pages, by group, what is
    free and what they hold."""
    budget, held = PageBudget(V4, POOL), [0, 0]
    running = [(8000, 200, 2048), (8000, 700, 2048), (4000, 50, 1024), (16000, 1500, 4096)]
    requests = [(prompt + generated, prompt + most, 0) for prompt, generated, most in running]
    requests += [(8000, 10_048, 8000)] * 2
    for tokens, most, received in requests:
        budget.book(decoding(V4, tokens, most, received))
        for group in V4.groups:
            pages = len(needed(group.retention, tokens, 256))
            budget.grown(group.id, pages)
            held[group.id] += pages
    free = [total - used for total, used in zip(POOL, held, strict=True)]
    return budget, free, held


def test_the_worked_budget():
    """SGLang: 203,776 tokens of the anchor, which are 796 pages. Of its window 22,706, 88 pages and
    a half, for it books 846 tokens of output for one request in a pool of windows; here each of the
    six may take its second page, and 90 are left."""
    budget, free, held = worked()
    assert [pages * 256 for pages in held] == [55_296, 2_560]
    assert [pages * 256 for pages in free] == [206_848, 23_552]
    anchor, window = budget.room(free)
    assert anchor * 256 == 203_776
    assert window == POOL[1] - 6 * 2 == 92 - sum((0, 1, 1, 0, 0, 0))


@pytest.mark.parametrize(
    ("n", "anchor", "window"), [(8192, 8_704, 256), (8193, 8_960, 512), (200_000, 200_704, 512)]
)
def test_the_worked_candidates(n, anchor, window):
    """The longest was never admitted where it took its whole prompt of a pool of windows."""
    budget, free, _ = worked()
    wanted = decoding(V4, n, n + 2048, n)
    assert wanted.growth[0] * 256 == anchor
    assert len(needed(KeepWindow(128), n, 256)) * 256 == window
    assert wanted.peak[1] == 2
    assert budget.fits(wanted, free)
    whole = whole_prompts(V4)
    fits = PageBudget(whole, POOL).fits(decoding(whole, n, n + 2048), POOL)
    assert fits == (n < 26_112)


def test_the_worked_resume():
    """574 tokens are 5 pages of either pool: of 18 pages three resume, and the fourth waits, though
    4 x 574 tokens would fit 18 x 128."""
    spec = small_spec([KeepWindow(2047)], page_tokens=128)
    budget = PageBudget(spec, (18, 18))
    wanted = demand(spec, 640, 574, 1, 0)
    assert (wanted.growth, wanted.peak) == ((5, 5), (5, 5))
    resumed, free = 0, 18
    while budget.fits(wanted, (free, free)):
        budget.book(wanted)
        for group in spec.groups:
            budget.grown(group.id, 5)
        resumed, free = resumed + 1, free - 5
    assert (resumed, free) == (3, 3)


def test_at_a_page_boundary_each_may_take_one_page_more_than_its_window():
    """At 8,192 tokens a window of 128 lies in one page; a token later it lies in two."""
    budget, wanted = PageBudget(V4, (1000, 7)), decoding(V4, 8192, 9000)
    held = 0
    while budget.fits(wanted, (1000, 7 - held)):
        budget.book(wanted)
        budget.grown(1, 1)
        held += 1
    assert held == 3, "each of them gets its second page"


def test_what_cannot_be_taken_back_leaves_room_for_the_longest():
    spec = small_spec([], page_tokens=4)
    budget = PageBudget(spec, (20,))
    long = demand(spec, 60, 8, 1, 0)
    assert long.rest == (15,)
    budget.book(long)  # 2 of its 15 pages
    prompt = demand(spec, 24, 20, 1, 0, 20)
    assert (prompt.fixed, prompt.rest) == ((5,), (1,))
    assert budget.fits(prompt, (18,)), "20 - 5 are enough for the longest"
    budget.book(prompt)
    assert not budget.fits(demand(spec, 8, 4, 1, 0, 4), (18,)), "one page less is not"
    assert budget.fits(demand(spec, 8, 4, 1, 0), (18,)), "what decodes can be retracted"
    now = budget.decodes(prompt, (6,))
    assert (now.fixed, now.rest) == ((0,), (6,))
    assert budget.fits(demand(spec, 24, 20, 1, 0, 20), (18,))
    budget.settle(long, (2,))
    assert budget.fits(demand(spec, 52, 52, 1, 0, 52), (20,))
    assert not budget.fits(demand(spec, 60, 60, 1, 0, 60), (20,)), "5 pages are booked"


def test_one_that_receives_may_itself_be_the_longest():
    spec = small_spec([], page_tokens=4)
    budget = PageBudget(spec, (20,))
    budget.book(demand(spec, 60, 8, 1, 0, 8))
    assert budget.fits(demand(spec, 20, 20, 1, 0, 20), (20,))
    assert not budget.fits(demand(spec, 24, 24, 1, 0, 24), (20,))
    budget = PageBudget(spec, (20,))
    budget.book(demand(spec, 40, 40, 1, 0, 40))
    assert budget.fits(demand(spec, 40, 4, 1, 0, 4), (20,))
    assert not budget.fits(demand(spec, 44, 4, 1, 0, 4), (20,)), "10 are taken, it may take 11"


def test_output_far_beyond_the_demand_is_not_kept_free_for_one():
    spec = small_spec([], page_tokens=4)
    assert demand(spec, 100_000, 8, 1, 0).rest == ((8 + 4096) // 4,)


def test_who_was_retracted_and_waits_comes_before_those_behind():
    budget = PageBudget(V4, (10, 6))
    first, other = decoding(V4, 1024, 1600, 1024), decoding(V4, 256, 300, 256)
    assert (first.growth[0], first.peak[1]) == (6, 2)
    assert (other.growth[0], other.peak[1]) == (2, 2)
    assert budget.room((10, 6), [first]) == (4, 4)
    assert budget.fits(other, (8, 6), [first])
    assert not budget.fits(other, (7, 6), [first])
    assert not budget.fits(other, (10, 6), [first, first, first]), "3 x 2 of 6 windows"


# -- what a pool admits --------------------------------------------------------------------------

PROMPTS = (1024, 8192, 32_768, 131_072)


def test_a_pool_of_windows_bounds_no_prompt():
    """A window of 128 takes two pages of 256 whatever the prompt; whole prompts take 4 to 512."""
    found = admitted(V4, (4096, 512), PROMPTS, 0)
    assert found == [
        Admitted(prompt=1024, per_group=256, whole_prompt=128),
        Admitted(prompt=8192, per_group=128, whole_prompt=16),
        Admitted(prompt=32_768, per_group=32, whole_prompt=4),
        Admitted(prompt=131_072, per_group=8, whole_prompt=1),
    ]


def test_a_model_without_windows_admits_as_many_either_way():
    spec = small_spec([KeepBoundary()], page_tokens=256)
    for one in admitted(spec, (4096, 512), PROMPTS, RESERVED):
        assert one.per_group == one.whole_prompt > 0


def test_pages_of_one_token():
    found = admitted(small_spec([KeepWindow(8)], page_tokens=1), (1000, 45), (20, 100), 1)
    assert [one.per_group for one in found] == [5, 5]
    assert [one.whole_prompt for one in found] == [2, 0]


# -- a walk --------------------------------------------------------------------------------------


class Run:
    """A request on the device: pages that it holds, by group, as its rules and its length say."""

    def __init__(self, serial: int, tokens: int, most: int) -> None:
        self.serial, self.tokens, self.most = serial, tokens, most
        self.receives = self.past = False
        self.wanted: Demand
        self.left: list[int] = []

    def held(self, spec: CacheSpec) -> list[int]:
        """What it stands on at the last page boundary, up to its newest token."""
        page, found = spec.page_tokens, []
        for group in spec.groups:
            boundary = self.tokens // page * page
            first = needed(group.retention, boundary, page).start
            if group.stateful:
                found.append(1)
            elif self.receives:
                found.append(len(needed(group.retention, self.tokens, page)))
            else:
                found.append(-(-self.tokens // page) - min(first, boundary // page))
        return found


class Decode:
    """Plain counts in place of pools; nothing is cached, so what nobody holds is free."""

    def __init__(self, spec: CacheSpec, totals: list[int], reserve: int) -> None:
        self.spec, self.totals, self.reserve = spec, totals, reserve
        self.budget = PageBudget(spec, totals)
        self.runs: list[Run] = []
        self.away: list[Run] = []  # retracted, by serial; the first ``waiting`` wait for prefill
        self.retracted = 0

    def free(self) -> list[int]:
        free = list(self.totals)
        for run in self.runs:
            for group, pages in enumerate(run.held(self.spec)):
                free[group] -= pages
        return free

    def wanted(self, run: Run, received: int) -> Demand:
        booked = min(run.most, run.tokens + self.reserve)
        return demand(self.spec, run.most, booked, 1, 0, received)

    def admit(self, run: Run, *, receives: bool, ahead: list[Run]) -> bool:
        wanted = self.wanted(run, run.tokens if receives else 0)
        first = [self.wanted(other, other.tokens) for other in ahead]
        if not self.budget.fits(wanted, self.free(), first):
            return False
        self.budget.book(wanted)
        run.wanted, run.receives, run.left = wanted, receives, list(wanted.growth)
        run.past = False
        self.runs.append(run)
        self.take(run, run.held(self.spec))
        room = self.budget.room(self.free())
        for group in self.spec.groups:  # those ahead have theirs still
            claims = [one.growth if group.keeps_all else one.peak for one in first]
            assert room[group.id] >= sum(claim[group.id] for claim in claims)
        return True

    def take(self, run: Run, pages: list[int]) -> None:
        for group, count in enumerate(pages):
            used = min(run.left[group], count)
            run.left[group] -= used
            self.budget.grown(group, used)

    def end(self, run: Run) -> None:
        self.runs.remove(run)
        self.budget.settle(run.wanted, run.left)

    def received(self, run: Run) -> None:
        run.receives = False
        run.wanted = self.budget.decodes(run.wanted, run.wanted.peak)

    def generate(self, run: Run) -> None:
        """One more token. As long as nobody runs past what it has booked its page is there; where
        somebody does, the youngest leave."""
        page = self.spec.page_tokens
        fresh = run.tokens % page == 0
        short = [g.id for g in self.spec.groups if g.keeps_all] if fresh else []
        for group in short:
            while not self.free()[group]:
                past = any(one.past for one in self.runs)
                assert past or not run.left[group], "a page that was booked is not there"
                others = [one for one in self.runs if not one.receives]
                youngest = max(others, key=lambda one: one.serial)
                assert len(others) > 1, "one that runs alone can go on"
                self.retract(youngest)
                if youngest is run:
                    return
        run.tokens += 1
        if fresh:
            run.past |= any(not run.left[group] for group in short)
            self.take(run, [int(not group.stateful) for group in self.spec.groups])
        for group, (pages, peak) in enumerate(
            zip(run.held(self.spec), run.wanted.peak, strict=True)
        ):
            assert pages <= peak, f"group {group} holds more than was booked"

    def retract(self, run: Run) -> None:
        self.end(run)
        self.retracted += 1
        self.away = sorted([*self.away, run], key=lambda one: one.serial)

    def check(self) -> None:
        for group in self.spec.groups:
            assert self.free()[group.id] >= 0, f"group {group.name} is over-booked"
            if not group.keeps_all:
                peaks = sum(run.wanted.peak[group.id] for run in self.runs)
                assert peaks <= self.totals[group.id]


RULES = {
    "all": [],
    "window": [KeepWindow(7)],
    "aligned": [KeepWindow(8)],
    "chunk": [KeepChunk(11)],
    "state": [KeepBoundary()],
    "v4": [KeepWindow(4), KeepLive()],
}


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_no_booked_request_ever_lacks_a_page(rules, page):
    spec, retracted, most = small_spec(rules, page_tokens=page), 0, 40
    for seed in range(12):
        rng = Random(seed)
        peaks = demand(spec, most, most, 1, 0).peak
        pool = [n * rng.randrange(1, 5) for n in peaks]
        it = Decode(spec, pool, reserve=rng.choice((0, 1, 6)))
        for serial in range(120):
            tokens = rng.randrange(1, most)
            new = Run(serial, tokens, rng.randrange(tokens + 1, most + 1))
            sent_back = [run for run in it.away if run.serial % 3 == 0]
            ahead: list[Run] = []
            for run in list(it.away):
                if run in sent_back and rng.random() < 0.6:
                    ahead.append(run)  # prefill has not answered
                    continue
                if not it.admit(run, receives=run in sent_back, ahead=ahead):
                    break
                it.away.remove(run)
            else:
                it.admit(new, receives=True, ahead=ahead)
            it.check()
            for run in list(it.runs):
                if run not in it.runs:
                    continue  # retracted for another one
                if run.receives and rng.random() < 0.3:
                    it.received(run)
                elif not run.receives and rng.random() < 0.7:
                    if run.tokens == run.most or rng.random() < 0.02:
                        it.end(run)
                    else:
                        it.generate(run)
                it.check()
        retracted += it.retracted
        for run in list(it.runs):
            it.end(run)
        assert it.budget.room(pool) == tuple(pool)
    assert retracted
