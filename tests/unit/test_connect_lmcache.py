"""The L2 adapter as LMCache drives it, without LMCache: what comes back is what was stored, and
what another server must never hit."""

import sys
from threading import Event

import numpy as np
import pytest
import torch

from stratakv.core.clock import ManualClock
from stratakv.core.errors import ConfigError
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.testing.storage_faults import Faults, FaultyBackend
from tests.fixtures import fake_lmcache
from tests.fixtures.fake_lmcache import MemoryLayoutDesc, MemoryObj, ObjectKey
from tests.unit.test_connect_vllm import checkpoint

SOON = {"timeout_s": 0.05}
ENGINE = "vllm 0.32.0 --dtype float32"
KEYS = [ObjectKey(bytes([at]) * 16) for at in range(4)]
DESCS = {0: MemoryLayoutDesc([torch.Size([64])], [torch.uint8])}


@pytest.fixture
def model(tmp_path):
    return checkpoint(tmp_path / "model")


@pytest.fixture
def storage(tmp_path):
    return f"file://{tmp_path}/store?quota=16MiB"


@pytest.fixture
def adapters(monkeypatch, model, storage):
    """Makes adapters, and closes them."""
    made = []

    def make(release="0.5.6", **given):
        module = fake_lmcache.install(monkeypatch, release)
        made.append(
            module.StrataL2({"storage": storage, "model": str(model), "engine": ENGINE, **given})
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def stored(adapter, keys=KEYS, **shape):
    objects = [MemoryObj(at + 1, **shape) for at in range(len(keys))]
    task = adapter.submit_store_task(keys, objects)
    ended = {}
    wait_until(lambda: ended.update(adapter.pop_completed_store_tasks()) or ended, "a store's end")
    return ended[task]


def present(adapter, keys=KEYS, descs=DESCS):
    task = adapter.submit_lookup_and_lock_task(keys, descs)
    return answer(lambda: adapter.query_lookup_and_lock_result(task))


def loaded(adapter, keys=KEYS, **shape):
    objects = [MemoryObj(0, **shape) for _ in keys]
    task = adapter.submit_load_task(keys, objects)
    return answer(lambda: adapter.query_load_result(task)), objects


def answer(query):
    answers = []
    wait_until(lambda: answers.append(query()) or answers[-1] is not None, "an answer")
    assert query() is None
    return answers[-1].bits


def test_another_life_finds_and_loads_what_the_first_has_stored(adapters):
    first = adapters()
    assert stored(first) == 4 * 64
    assert first.stored == dict.fromkeys(KEYS, 64)
    second = adapters()
    assert present(second, [*KEYS, ObjectKey(b"x" * 16)]) == [True] * 4 + [False]
    hits, objects = loaded(second)
    assert hits == [True] * 4
    assert [int(one.raw[0]) for one in objects] == [1, 2, 3, 4]
    assert all(bool((one.raw == one.raw[0]).all()) for one in objects)
    second.submit_unlock(KEYS)


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "other"}, {"kv_rank": 1}, {"object_group_id": 1}, {"cache_salt": "a"},
        {"chunk_hash": b"y" * 16},
    ],
    ids=str,
)  # fmt: skip
def test_every_part_of_a_key_counts(adapters, change):
    adapter = adapters()
    stored(adapter, KEYS[:1])
    other = ObjectKey(**{"chunk_hash": KEYS[0].chunk_hash, **change})
    assert present(adapter, [other, KEYS[0]], {0: DESCS[0], 1: DESCS[0]}) == [False, True]
    assert loaded(adapter, [other])[0] == [False]


@pytest.mark.parametrize("shape", [{"dtype": torch.int8}, {"shape": (8, 8)}, {"shape": (32,)}])
def test_another_layout_never_hits(adapters, shape):
    adapter = adapters()
    stored(adapter)
    assert loaded(adapter, **shape)[0] == [False] * 4
    assert loaded(adapter)[0] == [True] * 4


def test_other_weights_or_another_release_never_hit(adapters, tmp_path):
    stored(adapters())
    other = checkpoint(tmp_path / "other", seed=1)
    assert present(adapters(model=str(other))) == [False] * 4
    assert present(adapters(engine=f"{ENGINE} --hf-overrides x")) == [False] * 4
    assert present(adapters("0.5.7")) == [False] * 4
    assert present(adapters()) == [True] * 4


def test_a_description_that_no_object_has_had_is_a_hint(adapters):
    adapter = adapters()
    placeholder = {0: MemoryLayoutDesc([torch.Size([1])], [torch.uint8])}
    assert present(adapter, descs=placeholder) == [False] * 4
    stored(adapter)
    assert present(adapter, descs=placeholder) == [True] * 4
    assert present(adapter, descs={}) == [True] * 4


def test_a_store_that_is_down_or_full_costs_hits_and_nothing_else(adapters, monkeypatch, quiet):
    faulty = []

    def opened(_, form):
        faulty.append(FaultyBackend(MemoryBackend(form, 2 * sum(form.page_bytes)), Faults()))
        return faulty[-1]

    monkeypatch.setattr("stratakv.storage.ends.open_storage", opened)
    adapter = adapters(storage="memory://")
    assert stored(adapter) == -1
    assert present(adapter) == [True, True, False, False]
    for backend in faulty:
        backend.change(Faults(call_fails=1.0))
    assert loaded(adapter)[0] == [False] * 4
    assert present(adapter) == [False] * 4
    assert stored(adapter) == -1


def test_a_store_that_hangs_is_a_miss_in_time_and_touches_no_object(adapters, monkeypatch, quiet):
    go_on, memories, faulty = Event(), {}, []

    def opened(_, form):
        memory = memories.setdefault(form, MemoryBackend(form))
        faulty.append(FaultyBackend(memory, Faults(), lambda _: go_on.wait(PATIENCE_S)))
        return faulty[-1]

    monkeypatch.setattr("stratakv.storage.ends.open_storage", opened)
    stored(adapters(storage="memory://"))
    adapter = adapters(storage="memory://", **SOON)
    stored(adapter, KEYS[:1])
    faulty[-1].change(Faults(call_hangs=1.0))
    hits, objects = loaded(adapter)
    assert hits == [False] * 4
    assert present(adapter) == [False] * 4
    faulty[-1].change(Faults())
    go_on.set()
    wait_until(lambda: present(adapter) == [True] * 4, "the store's return")
    assert not any(bool(one.raw.any()) for one in objects)


@pytest.fixture
def gate(monkeypatch, quiet):
    """A store in memory, whose calls wait at the gate from ``shut`` on until it is opened."""

    class Gate:
        def __init__(self):
            self.go_on, self.reached, self.faulty, self.memories = Event(), Event(), [], {}
            self.opens, self.faults = lambda: None, Faults()

        def shut(self):
            self.faults = Faults(call_hangs=1.0)
            for one in self.faulty:
                one.change(self.faults)

        def wait(self, _):
            self.reached.set()
            self.go_on.wait(PATIENCE_S)

        def opened(self, _, form):
            self.opens()
            memory = self.memories.setdefault(form, MemoryBackend(form))
            self.faulty.append(FaultyBackend(memory, self.faults, self.wait))
            return self.faulty[-1]

    made = Gate()
    monkeypatch.setattr("stratakv.storage.ends.open_storage", made.opened)
    yield made
    made.go_on.set()


PATIENT = {"timeout_s": PATIENCE_S, "task_timeout_s": PATIENCE_S}


def begun_load(gate, adapter, objects):
    stored(adapter)
    gate.shut()
    task = adapter.submit_load_task(KEYS, objects)
    assert gate.reached.wait(PATIENCE_S)
    return task


def test_what_is_stored_is_what_the_object_was_when_it_was_given(adapters, gate):
    """LMCache may use its memory for another chunk before the store's turn comes."""
    adapter = adapters(storage="memory://", **PATIENT)
    stored(adapter, KEYS[:1])
    gate.shut()
    objects = [MemoryObj(7), MemoryObj(8)]
    tasks = [adapter.submit_store_task([KEYS[at + 1]], [objects[at]]) for at in range(2)]
    assert gate.reached.wait(PATIENCE_S)
    for one in objects:
        one.raw.fill_(99)
    gate.go_on.set()
    ended = {}
    wait_until(lambda: ended.update(adapter.pop_completed_store_tasks()) or len(ended) == 2, "both")
    assert ended.keys() == {*tasks}
    assert [int(one.raw[0]) for one in loaded(adapter, KEYS[1:3])[1]] == [7, 8]


def test_a_load_that_lmcache_has_given_up_on_writes_nothing_more(adapters, gate):
    """It says so by its unlock, and gives the memory to another chunk."""
    adapter = adapters(storage="memory://", **PATIENT)
    objects = [MemoryObj(55) for _ in KEYS]
    task = begun_load(gate, adapter, objects)
    adapter.submit_unlock(KEYS)
    gate.go_on.set()
    assert answer(lambda: adapter.query_load_result(task)) == [False] * 4
    assert all(bool((one.raw == 55).all()) for one in objects)


def test_answers_that_lmcache_never_asks_for_are_not_kept_for_good(adapters, monkeypatch):
    """It leaves tasks of a request that it has given up on to complete on their own."""
    adapter = adapters()
    monkeypatch.setattr("stratakv.connect.lmcache_tasks.MOST_ANSWERS", 2)
    stored(adapter)
    loads = [adapter.submit_load_task(KEYS, [MemoryObj() for _ in KEYS]) for _ in range(4)]
    looks = [adapter.submit_lookup_and_lock_task(KEYS, DESCS) for _ in range(4)]
    assert answer(lambda: adapter.query_lookup_and_lock_result(looks[3])) == [True] * 4
    assert answer(lambda: adapter.query_load_result(loads[3])) == [True] * 4
    assert [adapter.query_load_result(task) is None for task in loads] == [True, True, False, True]
    kept = [adapter.query_lookup_and_lock_result(task) is not None for task in looks]
    assert kept == [False, False, True, False]
    stores = {adapter.submit_store_task(KEYS, [MemoryObj() for _ in KEYS]) for _ in range(4)}
    ended = {}
    wait_until(lambda: ended.update(adapter.pop_completed_store_tasks()) or len(ended) == 4, "all")
    assert ended.keys() == stores, "of these LMCache hears all, and has locked what they read"


def test_an_unlock_after_an_answer_ends_nobody_else_s_load(adapters, gate):
    adapter = adapters(storage="memory://", **PATIENT)
    stored(adapter)
    first = adapter.submit_load_task(KEYS, [MemoryObj() for _ in KEYS])
    wait_until(lambda: adapter.totals.get("loaded") == 4, "the first load")
    gate.shut()
    second = adapter.submit_load_task(KEYS, [MemoryObj() for _ in KEYS])
    assert gate.reached.wait(PATIENCE_S)
    assert answer(lambda: adapter.query_load_result(first)) == [True] * 4
    adapter.submit_unlock(KEYS)
    gate.go_on.set()
    assert answer(lambda: adapter.query_load_result(second)) == [True] * 4


def test_a_load_writes_nothing_after_its_time(adapters):
    adapter = adapters(task_timeout_s=1e-9)
    stored(adapter)
    hits, objects = loaded(adapter)
    assert hits == [False] * 4
    assert present(adapter) == [False] * 4
    assert not any(bool(one.raw.any()) for one in objects)
    assert adapter.totals == {"stored": 4, "late": 8}


def test_a_page_that_comes_after_its_load_s_time_is_not_written(adapters):
    tasks = sys.modules[type(adapters()).__module__ + "_tasks"]
    clock, objects, page = ManualClock(), [MemoryObj(55), MemoryObj(55)], np.ones(64, np.uint8)
    lent = tasks.LentBuffers(KEYS[:2], objects, clock, clock.now_s() + 1)
    lent.fill(0, page)
    clock.advance(1)
    lent.fill(1, page)
    assert not lent.open
    assert lent.filled == [0]
    assert [int(one.raw[0]) for one in objects] == [1, 55]


def test_a_buffer_that_was_freed_by_force_is_not_written(adapters, gate):
    adapter = adapters(storage="memory://", **PATIENT)
    objects = [MemoryObj(55) for _ in KEYS]
    task = begun_load(gate, adapter, objects)
    objects[1].valid = False
    gate.go_on.set()
    assert answer(lambda: adapter.query_load_result(task)) == [True, False, True, True]
    assert bool((objects[1].raw == 55).all())
    assert (adapter.totals["loaded"], adapter.totals["late"]) == (4, 1)


def test_lmcache_s_own_threads_never_wait_while_a_store_is_opened(adapters, gate):
    adapter = adapters(storage="memory://", **SOON)
    gate.opens = lambda: gate.wait(None)
    first = adapter.submit_store_task(KEYS[:1], [MemoryObj(1)])
    assert gate.reached.wait(PATIENCE_S)
    assert present(adapter) == [False] * 4  # a miss, in time
    ended = {}
    wait_until(lambda: ended.update(adapter.pop_completed_store_tasks()) or ended, "a store's end")
    assert ended == {first: -1}
    assert adapter.totals["late"] == 4
    assert not adapter.report_status()["is_healthy"]


def test_a_store_that_cannot_be_opened_is_counted_and_left_alone(adapters, gate):
    tried = []

    def fails():
        tried.append(1)
        raise OSError("down")

    gate.opens = fails
    adapter = adapters(storage="memory://")
    assert [stored(adapter) for _ in range(3)] == [-1] * 3
    assert len(tried) == 1
    assert adapter.totals == {"unwritten": 12}
    assert not adapter.report_status()["is_healthy"]


def test_too_much_that_waits_to_be_written_is_dropped_and_counted(adapters, gate, monkeypatch):
    adapter = adapters(storage="memory://", **PATIENT)
    monkeypatch.setattr("stratakv.connect.lmcache_tasks.QUEUED_BYTES", 4 * 64)
    stored(adapter, KEYS[:1])
    gate.shut()
    adapter.submit_store_task(KEYS[1:], [MemoryObj(1, (128,)) for _ in KEYS[1:]])  # alone it may
    second = adapter.submit_store_task(KEYS[:1], [MemoryObj(1)])
    assert adapter.pop_completed_store_tasks() == {second: -1}
    assert adapter.totals["dropped"] == 1
    assert adapter.report_status()["queued_bytes"] == 3 * 128
    gate.go_on.set()
    wait_until(lambda: adapter.report_status()["queued_bytes"] == 0, "the writes")


def test_chunk_hashes_that_two_chunks_may_share_never_hit(adapters, quiet):
    adapter = adapters()
    short = [ObjectKey(b"x" * 8)]
    assert stored(adapter, short) == -1
    assert present(adapter, short) == [False]
    assert loaded(adapter, short)[0] == [False]
    assert adapter.totals == {"refused": 1}


def test_closing_gives_up_what_is_queued_behind_a_store_that_hangs(adapters, gate, monkeypatch):
    adapter = adapters(storage="memory://", **SOON)
    monkeypatch.setattr("stratakv.connect.lmcache_tasks.CLOSE_S", 0.05)
    stored(adapter)
    gate.shut()
    tasks = [adapter.submit_store_task(KEYS[:1], [MemoryObj(at)]) for at in range(50)]
    adapter.close()
    assert adapter.pop_completed_store_tasks() == dict.fromkeys(tasks, -1)


def test_what_breaks_here_is_an_answer_all_the_same(adapters, quiet):
    adapter = adapters()
    task = adapter.submit_load_task(KEYS, [None] * 4)
    assert answer(lambda: adapter.query_load_result(task)) == [False] * 4


def test_each_kind_of_task_has_a_notifier_of_its_own(adapters):
    adapter = adapters()
    ends = {
        adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }  # fmt: skip
    assert len(ends) == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": None}, "adapter_params model None: allowed is the directory"),
        ({"engine": None}, "adapter_params engine None: allowed is a text"),
        ({"engine": " "}, "adapter_params engine  : allowed is a text"),
        ({"model": "org/name"}, "MODEL org/name: allowed"),
        ({"timeout_s": -1}, "timeout_s -1: allowed is a number above 0"),
        (
            {"root": "/x"},
            "root: allowed are storage, storage_key_file, timeout_s, engine, model, task_timeout_s",
        ),
        ({"task_timeout_s": True}, "task_timeout_s True: allowed is a number above 0"),
        ({"storage_key_file": "/nowhere"}, "/nowhere"),
        ({"storage": "bogus://x"}, "bogus"),
        ({"storage": "file:///x?quta=3"}, "quta"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_at_the_start(adapters, given, words):
    with pytest.raises(ConfigError, match=words):
        adapters(**given)
