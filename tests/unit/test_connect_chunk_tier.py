"""A tier below another engine: it never waits, and what does not come back whole is a miss."""

import pytest

from stratakv.connect.chunk_tier import ChunkTier
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.storage_faults import Faults, FaultyBackend
from tests.engine_tiers import FORM, NAMESPACE, USED, EngineRows, key_of, name_of

KEYS = [key_of(number) for number in range(6)]
NONE = [None] * 6


@pytest.fixture
def memory():
    return MemoryBackend(FORM)


def test_a_row_comes_back_into_another_row_and_nothing_beside_it_changes(memory):
    engine = EngineRows(memory)
    report = engine.store(KEYS[:2], [4, 9])
    assert (report.whole, report.loading, report.done) == (True, False, KEYS[:2])
    before = engine.rows.copy()
    assert engine.load(KEYS[:2], [30, 31]).done == KEYS[:2]
    assert (engine.rows[30, :USED] == 5).all()
    assert (engine.rows[31, :USED] == 10).all()
    before[30, :USED], before[31, :USED] = 5, 10
    assert (engine.rows == before).all()
    assert engine.tier.counts.total == {"stored": 2, "loaded": 2}


def test_a_lookup_never_waits_and_one_step_asks_once(memory):
    engine = EngineRows(memory)
    engine.store(KEYS[:3], [0, 1, 2])
    first, second = engine.lookup(KEYS)
    assert first == NONE
    assert second == [True, True, True, False, False, False]
    assert engine.tier.counts.total["asked"] == 6
    assert engine.lookup(KEYS, "another")[0] == second  # known while somebody needs it
    engine.tier.release("r")
    engine.tier.release("another")
    assert engine.lookup(KEYS, "third")[0] == NONE


def test_a_request_waits_for_a_question_and_for_a_load_and_for_no_store(memory):
    engine = EngineRows(memory)
    tier, seen = engine.tier, []
    tier.store(1, KEYS[:1], [0])
    seen.append(tier.awaited)
    engine.work()
    tier.take_reports()
    tier.lookup(KEYS[0], "r")
    tier.end_step()
    seen.append(tier.awaited)
    engine.work()
    tier.end_step()
    seen.append(tier.awaited)
    tier.load(2, KEYS[:1], [1])
    seen.append(tier.awaited)
    engine.work()
    tier.take_reports()
    seen.append(tier.awaited)
    assert seen == [False, True, False, True, False]


def test_who_has_asked_before_a_page_was_stored_gets_it_afterwards(memory):
    engine = EngineRows(memory)
    assert engine.lookup(KEYS[:2])[1] == [False, False]
    engine.store(KEYS[:1], [0])
    assert [engine.tier.lookup(key, "r") for key in KEYS[:2]] == [True, False]


def test_groups_do_not_meet(memory):
    engine = EngineRows(memory)
    engine.store([key_of(1, 0)], [3])
    assert engine.lookup([key_of(1, 1)])[1] == [False]


def test_a_page_that_is_stored_already_is_not_written_again(memory):
    engine = EngineRows(memory)
    engine.store(KEYS[:2], [0, 1])
    assert engine.store(KEYS[:3], [7, 8, 9]).whole
    assert engine.tier.counts.total == {"stored": 3, "already_stored": 2}
    engine.load(KEYS[:1], [40])
    assert engine.rows[40, 0] == 1


def test_what_is_damaged_is_a_miss_and_is_not_asked_for_again(memory):
    engine = EngineRows(memory)
    engine.store(KEYS[:3], [0, 1, 2])
    assert engine.lookup(KEYS[:3])[1] == [True] * 3
    memory.damage(name_of(KEYS[1]), 5)
    report = engine.load(KEYS[:3], [50, 51, 52])
    assert (report.whole, report.done) == (False, [KEYS[0], KEYS[2]])
    assert engine.tier.counts.total["damaged"] == 1
    assert [engine.tier.lookup(key, "r") for key in KEYS[:3]] == [True, False, True]


def test_what_went_between_question_and_read_is_a_miss(memory):
    engine = EngineRows(memory)
    engine.store(KEYS[:2], [0, 1])
    assert engine.lookup(KEYS[:2])[1] == [True, True]
    memory.remove([name_of(KEYS[0])])
    assert engine.load(KEYS[:2], [50, 51]).done == [KEYS[1]]
    assert engine.tier.counts.total["missing"] == 1
    assert engine.tier.lookup(KEYS[0], "r") is False


def test_a_store_that_is_down_costs_hits_and_nothing_else(memory, quiet):
    backend = FaultyBackend(memory, Faults())
    engine = EngineRows(backend)
    engine.store(KEYS[:2], [0, 1])
    backend.change(Faults(call_fails=1.0))
    assert engine.lookup(KEYS)[1] == [False] * 6
    assert engine.tier.off
    assert not engine.store(KEYS[2:4], [2, 3]).whole
    assert not engine.load(KEYS[:2], [50, 51]).whole
    assert (engine.rows[50] == 51).all()
    assert engine.tier.counts.total["unread"] == 2
    assert engine.tier.counts.total["unwritten"] == 2
    backend.change(Faults())
    engine.clock.advance(3600)
    engine.tier.release("r")
    assert engine.lookup(KEYS[:3])[1] == [True, True, False]
    assert not engine.tier.off


def test_a_store_that_is_full_refuses_and_is_counted():
    engine = EngineRows(MemoryBackend(FORM, quota_bytes=2 * USED))
    report = engine.store(KEYS[:4], [0, 1, 2, 3])
    assert (report.whole, report.done) == (False, KEYS[:2])
    assert engine.tier.counts.total == {"stored": 2, "refused": 2}


def test_a_store_that_says_it_has_what_it_has_not_is_asked_once(memory):
    engine = EngineRows(FaultyBackend(memory, Faults(contains_lies=1.0)))
    assert engine.lookup(KEYS[:2])[1] == [True, True]
    assert engine.load(KEYS[:2], [50, 51]).done == []
    assert [engine.tier.lookup(key, "r") for key in KEYS[:2]] == [False, False]


def test_a_slow_store_is_a_miss_after_a_while(memory):
    engine = EngineRows(memory, patience_s=2.0)
    engine.store(KEYS[:2], [0, 1])
    engine.tier.lookup(KEYS[0], "r")
    engine.tier.end_step()
    engine.clock.advance(1.0)
    engine.tier.end_step()
    assert engine.tier.lookup(KEYS[0], "r") is None
    engine.clock.advance(1.0)
    engine.tier.end_step()
    assert engine.tier.lookup(KEYS[0], "r") is False
    engine.work()  # the answer comes after all, and a decision stands
    engine.tier.end_step()
    assert engine.tier.lookup(KEYS[0], "r") is False
    assert engine.tier.counts.total["late"] == 1


class StuckStore:
    """A store whose next call hangs while ``meanwhile`` happens, and goes on as if nothing were."""

    def __init__(self, memory):
        self.meanwhile = []
        self.backend = FaultyBackend(memory, Faults(call_hangs=1.0), self.hang)

    def hang(self, _):
        if self.meanwhile:
            self.meanwhile.pop()()


def test_a_load_that_has_not_begun_in_time_is_a_miss_and_never_begins(memory):
    engine = EngineRows(memory, patience_s=2.0)
    engine.store(KEYS[:2], [0, 1])
    engine.tier.load(7, KEYS[:2], [50, 51])
    engine.clock.advance(2.0)
    engine.tier.end_step()
    (report,) = engine.tier.take_reports()
    assert (report.job, report.whole, report.done, report.took_s) == (7, False, [], 2.0)
    assert not engine.tier.busy
    assert engine.tier.counts.total == {"stored": 2, "late": 2}
    engine.work()
    engine.tier.end_step()
    assert engine.tier.take_reports() == []
    assert (engine.rows[50] == 51).all()
    assert engine.tier.counts.total == {"stored": 2, "late": 2}
    assert engine.load(KEYS[:2], [50, 51]).whole


def test_a_read_that_hangs_is_a_miss_in_time_and_touches_no_row_when_it_ends(memory):
    store = StuckStore(memory)
    engine = EngineRows(store.backend, patience_s=2.0)
    engine.store(KEYS[:2], [0, 1])
    assert engine.lookup(KEYS[:2])[1] == [True, True]
    reports = []

    def late():
        engine.clock.advance(2.0)
        engine.tier.end_step()
        reports.extend(engine.tier.take_reports())
        engine.rows[50] = 99  # the engine has given the row to somebody else
        assert engine.tier.off
        assert [engine.tier.lookup(key, "r") for key in KEYS[:2]] == [False, False]

    store.meanwhile = [late]
    engine.tier.load(7, KEYS[:2], [50, 51])
    engine.work()
    assert [(report.job, report.whole, report.done) for report in reports] == [(7, False, [])]
    assert (engine.rows[50] == 99).all()
    assert (engine.rows[51] == 52).all()
    assert engine.tier.take_reports() == []
    assert engine.tier.counts.total["late"] == 2
    assert not engine.tier.off
    engine.tier.release("r")
    assert engine.load(KEYS[:2], [50, 51]).whole
    assert engine.lookup(KEYS[:2])[1] == [True, True]


def test_of_a_load_that_hangs_what_has_come_by_then_is_used(memory):
    store = StuckStore(memory)
    engine = EngineRows(store.backend, patience_s=2.0, batch_pages=1)
    engine.store(KEYS[:2], [0, 1])

    def late():
        engine.clock.advance(2.0)
        engine.tier.end_step()

    store.meanwhile = [late, lambda: None]
    report = engine.load(KEYS[:2], [50, 51])
    assert (report.whole, report.done) == (False, KEYS[:1])
    assert (engine.rows[50, :USED] == 1).all()
    assert engine.tier.counts.total == {"stored": 2, "loaded": 1, "late": 1}


def test_a_store_that_hangs_is_asked_nothing_until_it_has_come_back(memory):
    store = StuckStore(memory)
    engine = EngineRows(store.backend, patience_s=2.0)
    engine.store(KEYS[:3], [0, 1, 2])

    def late():
        engine.clock.advance(2.0)
        engine.tier.end_step()
        engine.tier.lookup(KEYS[2], "s")
        engine.tier.end_step()
        assert engine.tier.lookup(KEYS[2], "s") is False
        engine.tier.load(8, KEYS[2:3], [52])
        (report,) = engine.tier.take_reports()
        assert (report.job, report.done) == (8, [])

    store.meanwhile = [late]
    engine.tier.lookup(KEYS[0], "r")
    engine.tier.end_step()
    engine.work()
    assert engine.tier.lookup(KEYS[0], "r") is False
    assert engine.tier.counts.total == {"stored": 3, "asked": 1, "late": 3}
    engine.tier.end_step()
    assert engine.lookup(KEYS[2:3], "t")[1] == [False]  # decided while somebody asks
    engine.tier.release("s")
    engine.tier.release("t")
    assert engine.lookup(KEYS[2:3], "u")[1] == [True]


def test_a_write_that_hangs_gives_rows_back_in_time_and_writes_what_was_lent(memory):
    store = StuckStore(memory)
    engine = EngineRows(store.backend, patience_s=2.0)
    reports = []

    def late():
        for _ in range(2):
            engine.tier.end_step()
            engine.clock.advance(2.0)
        engine.tier.end_step()
        reports.extend(engine.tier.take_reports())
        engine.rows[0] = 99  # the engine has given the row to somebody else
        engine.tier.store(3, KEYS[4:5], [4])
        reports.extend(engine.tier.take_reports())

    store.meanwhile = [late]
    engine.tier.store(1, KEYS[:2], [0, 1])
    engine.tier.store(2, KEYS[2:4], [2, 3])
    engine.work()
    assert [(report.job, report.whole) for report in reports] == [
        (1, False),
        (2, False),
        (3, False),
    ]
    engine.tier.end_step()
    assert engine.tier.counts.total == {"unwritten": 5}
    assert engine.load(KEYS[:2], [50, 51]).done == KEYS[:2]
    assert (engine.rows[50, :USED] == 1).all()
    assert engine.store(KEYS[4:5], [4]).whole
    assert engine.load(KEYS[2:4], [52, 53]).done == []


def test_a_long_queue_of_stores_is_not_one_that_hangs(memory):
    engine = EngineRows(memory, patience_s=2.0, batch_pages=1)
    for job in range(6):
        engine.tier.store(job, KEYS[job : job + 1], [job])
    for _ in range(6):
        engine.hands[0].lane.once()
        engine.tier.end_step()
        engine.clock.advance(1.5)
    assert engine.tier.counts.total == {"stored": 6}


def test_what_the_queue_does_not_take_is_reported_and_not_asked_for_again(memory):
    engine = EngineRows(memory, queue_pages=2)
    engine.tier.store(1, KEYS[:2], [0, 1])
    engine.tier.store(2, KEYS[2:4], [2, 3])
    (report,) = engine.tier.take_reports()
    assert (report.job, report.whole, report.done) == (2, False, [])
    assert engine.tier.counts.total == {"dropped": 2}
    engine.work()
    engine.tier.take_reports()
    assert engine.lookup(KEYS[:2])[1] == [True, True]
    engine.tier.load(3, KEYS[:2], [50, 51])
    engine.tier.load(4, KEYS[:2], [52, 53])
    assert [report.job for report in engine.tier.take_reports()] == [4]
    assert [engine.tier.lookup(key, "r") for key in KEYS[:2]] == [False, False]


def test_a_question_that_the_queue_does_not_take_is_a_miss(memory):
    engine = EngineRows(memory, queue_pages=2)
    engine.store(KEYS[:2], [0, 1])
    for request, keys in (("a", KEYS[:2]), ("b", KEYS[2:4])):
        for key in keys:
            engine.tier.lookup(key, request)
        engine.tier.end_step()
    assert engine.tier.lookup(KEYS[2], "b") is False
    assert engine.tier.lookup(KEYS[0], "a") is None


def test_a_loaded_page_is_used_and_outlives_others():
    engine = EngineRows(MemoryBackend(FORM, quota_bytes=3 * USED))
    engine.store(KEYS[:3], [0, 1, 2])
    engine.load(KEYS[2:3], [50])  # the deepest, which would leave first
    engine.work()
    engine.store(KEYS[3:4], [3])
    assert engine.lookup(KEYS[:4])[1] == [True, False, True, True]


def test_a_drain_begins_nothing_more_and_leaves_no_row_in_use(memory):
    engine = EngineRows(memory)
    engine.tier.store(1, KEYS[:2], [0, 1])
    engine.tier.store(2, KEYS[2:4], [2, 3])
    engine.tier.drain()
    reports = engine.tier.take_reports()
    assert [(report.job, report.whole) for report in reports] == [(1, False), (2, False)]
    assert not engine.tier.busy
    assert memory.snapshot() == {}


def test_after_a_new_name_nothing_stored_before_is_used(memory):
    engine = EngineRows(memory)
    engine.store(KEYS[:2], [0, 1])
    assert engine.lookup(KEYS[:2])[1] == [True, True]
    renewed = NAMESPACE.renewed()
    engine.tier.rename(lambda key: name_of(key, renewed))
    assert [engine.tier.lookup(key, "r") for key in KEYS[:2]] == [False, False]
    engine.tier.release("r")
    assert engine.lookup(KEYS[:2], "s")[1] == [False, False]
    assert engine.store(KEYS[:1], [5]).whole
    engine.load(KEYS[:1], [60])
    assert engine.rows[60, 0] == 6


def test_an_end_writes_what_is_queued_and_lets_go_of_the_rows(memory):
    engine = EngineRows(memory)
    engine.tier.store(1, KEYS[:2], [0, 1])
    stored = []
    memory.close = lambda: stored.append(set(memory.snapshot()))
    engine.tier.close()
    assert stored == [{name_of(KEYS[0]), name_of(KEYS[1])}]
    engine.memory.append(0)  # BufferError while anybody looks at it


def test_a_drain_over_a_store_that_hangs_ends_and_leaves_no_row_in_use(memory):
    engine = EngineRows(memory, patience_s=2.0)
    engine.hands[0].stuck = True
    engine.tier.store(1, KEYS[:2], [0, 1])
    engine.tier.load(2, KEYS[2:4], [2, 3])
    engine.tier.drain()
    assert sorted((report.job, report.whole) for report in engine.tier.take_reports()) == [
        (1, False), (2, False),
    ]  # fmt: skip
    assert not engine.tier.busy


def test_an_end_over_a_store_that_hangs_lets_go_of_the_rows_all_the_same(memory, quiet):
    engine = EngineRows(memory)
    engine.hands[0].stuck = True
    engine.tier.store(1, KEYS[:2], [0, 1])
    engine.tier.close()
    engine.memory.append(0)  # BufferError while anybody looks at it
    engine.hands[0].work()
    assert memory.snapshot() == {}


def test_the_verbs_are_those_of_a_tier():
    assert {name for name in vars(ChunkTier) if not name.startswith("_")} == {
        "lookup", "end_step", "store", "load", "take_reports", "busy", "touch", "release", "drain",
        "rename", "close", "off", "awaited",
    }  # fmt: skip
