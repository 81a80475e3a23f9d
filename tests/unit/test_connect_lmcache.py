"""The L2 adapter as LMCache drives it, without LMCache: what comes back is what was stored, and
what another server must never hit."""

from threading import Event

import pytest
import torch

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
            "root: allowed are storage, storage_key_file, timeout_s, engine, model",
        ),
        ({"storage": "bogus://x"}, "bogus"),
        ({"storage": "file:///x?quta=3"}, "quta"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_at_the_start(adapters, given, words):
    with pytest.raises(ConfigError, match=words):
        adapters(**given)
