"""Host pages that a spilled request needs while others keep them: it waits for storage, and those
that only wait let go."""

from threading import Event

import pytest

from stratakv.core.ids import RequestId
from stratakv.policy import admission
from stratakv.testing.patience import PATIENCE_S
from tests.engines import all_free, drain, greedy, run, tokens_of
from tests.offloading import ANSWER, PROMPTS, SMALL, by_name, rows_of, submit
from tests.storage_cases import PATIENT, Shelf, attach_backend, format_of

HOST = 14
"""Pages that the longest request of these fills."""


class HeldShelf(Shelf):
    """Reads wait while it is not ``open``."""

    def __init__(self, form, quota_bytes):
        super().__init__(form, quota_bytes)
        self.open, self.asked = Event(), Event()
        self.open.set()

    def read(self, keys, into):
        self.asked.set()
        assert self.open.wait(PATIENCE_S), "it was never opened again"
        return super().read(keys, into)


def stored(prompt, kind=Shelf):
    """A store that has the pages of ``prompt``."""
    shelf = kind(format_of(SMALL.spec(24)), 1 << 30)
    with SMALL.engine(24, **PATIENT) as parts:
        attach_backend(parts, shelf)
        run(parts, greedy("first", prompt, ANSWER))
        parts.cache.progress.settle()
    return shelf


@pytest.mark.parametrize("steps", range(4))
def test_what_a_prefetch_keeps_on_the_host_stops_nobody(steps):
    some = rows_of((PROMPTS[1][:80], PROMPTS[0]))
    with SMALL.engine(24, host=13, **PATIENT) as parts:
        attach_backend(parts, stored(some[1]))
        outputs = []
        parts.engine.submit(greedy("0", some[0], ANSWER))
        for _ in range(steps):
            outputs += parts.engine.step()
        parts.engine.submit(greedy("1", some[1], ANSWER))
        outputs += drain(parts)
        assert list(map(tokens_of, by_name(outputs, 2))) == SMALL.right(*some)
        parts.cache.progress.settle()


@pytest.mark.parametrize("aborted", [False, True])
def test_who_runs_alone_waits_for_the_host_pages_that_a_busy_store_fills(aborted):
    """Also for ever; then it can be aborted, and the next one goes on when the store returns."""
    some = rows_of((PROMPTS[1][:80], PROMPTS[0]))
    with SMALL.engine(24, host=13, **PATIENT) as parts:
        shelf = stored(some[1], HeldShelf)
        shelf.asked.clear()
        shelf.open.clear()
        attach_backend(parts, shelf)
        submit(parts, some)
        outputs = []
        for _ in range(60):
            outputs += parts.engine.step()
            parts.engine.check()
        assert shelf.asked.is_set()
        assert all(one.finish is None for one in outputs), "nobody had to wait"
        if aborted:
            parts.engine.abort(RequestId("0"))
            parts.engine.step()
        shelf.open.set()
        outputs += drain(parts)
        found = by_name(outputs, 2)
        assert tokens_of(found[1]) == SMALL.right(some[1])[0]
        if not aborted:
            assert tokens_of(found[0]) == SMALL.right(some[0])[0]
        parts.cache.progress.settle()
        assert parts.cache.progress.flush()
        assert all_free(parts)


def test_prefetches_of_those_behind_do_not_keep_the_next_one_out():
    some = rows_of((PROMPTS[2][:60], PROMPTS[1][:80], PROMPTS[0]))
    with SMALL.engine(24, host=HOST, max_running=1, **PATIENT) as parts:
        attach_backend(parts, stored(some[2]))
        asked = [greedy(str(at), prompt, ANSWER) for at, prompt in enumerate(some)]
        found = run(parts, *asked)
        assert [tokens_of(found[one.id]) for one in asked] == SMALL.right(*some)
        parts.cache.progress.settle()


def test_who_runs_alone_is_spilled_also_where_its_copies_were_not_made_in_time(monkeypatch):
    """Admitted to the device, it outgrows it with an answer beyond what is guarded; until then a
    prefetch of the next one keeps the host full."""
    monkeypatch.setattr(admission, "GUARDED_TOKENS", 0)
    some = rows_of((PROMPTS[1][:60], [*PROMPTS[0], *PROMPTS[2]][:120]))
    settings = {"max_running": 1, "reserve_tokens": 8, "max_model_len": 150}
    with SMALL.engine(24, selected=12, host=18, **settings, **PATIENT) as parts:
        attach_backend(parts, stored(some[1]))
        parts.engine.submit(greedy("0", some[0], 80))
        parts.engine.submit(greedy("1", some[1], ANSWER))
        found = by_name(drain(parts), 2)
        assert tokens_of(found[0]) == SMALL.right(some[0], answer=80)[0]
        assert tokens_of(found[1]) == SMALL.right(some[1])[0]
        counters = parts.cache.tiers.pools.counters.snapshot()
        assert counters["spilled"]
        assert counters["dropped_backup_pages"], "its copies were made in time"
        parts.cache.progress.settle()


def test_who_fills_the_host_by_itself_comes_back_from_a_retraction():
    """Its full pages and the one that is filling take all of the host, where it needs one more
    when it goes on: it is computed again."""
    (some,) = rows_of([[*PROMPTS[0], *PROMPTS[2], *PROMPTS[1]][:140]])
    with SMALL.engine(24, host=20) as parts:
        parts.engine.submit(greedy("0", some, ANSWER))
        outputs = []
        while len(outputs) < 16:
            outputs += parts.engine.step()
        parts.engine.retract(RequestId("0"))
        counters = parts.cache.tiers.pools.counters.snapshot()
        assert not counters["retracted_unsaved"], "the host had no room for it"
        outputs += drain(parts)
        assert tokens_of(outputs) == SMALL.right(some)[0]
        parts.cache.progress.settle()
        assert parts.cache.tiers.pools.counters.snapshot()["retracted_unsaved"]
