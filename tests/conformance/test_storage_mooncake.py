"""The Mooncake backend against the wheel's own master: the suite, and what only a store can do."""

import os
import signal
import sys
from contextlib import suppress

import numpy as np
import pytest

from stratakv.core.errors import StorageError
from stratakv.storage.backend import ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.mooncake import MooncakeBackend, region_of
from stratakv.storage.urls import MooncakeOptions
from stratakv.testing.patience import wait_until
from stratakv.testing.storage_conformance import FORM as CONFORMANCE_FORM
from stratakv.testing.storage_conformance import StorageConformance, StorageSubject
from tests.fixtures.servers import free_port, mooncake_master
from tests.fixtures.stored_pages import FORM, PAGE, keys_of, pages_of, views

SEGMENT_BYTES = 64 << 20

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 14) or sys.platform != "linux",
    reason="the wheel is for Linux and Python 3.11 to 3.13",
)


@pytest.fixture(scope="session")
def master():
    with mooncake_master() as running:
        yield running


@pytest.fixture(scope="module")
def memory(master):
    """One client that lends the store its memory."""
    # Only now: the fixture of the master has installed what this import needs.
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415

    client = MooncakeDistributedStore()
    address = f"127.0.0.1:{master.port}"
    local = ("127.0.0.1", "P2PHANDSHAKE", SEGMENT_BYTES, 1 << 20, "tcp", "", address)
    assert client.setup(*local) == 0
    yield client
    client.close()


@pytest.fixture(scope="module")
def opened(master, memory):
    """To close a client takes a second: the tests share one."""
    backend = MooncakeBackend(FORM, options(master.port))
    yield backend
    backend.close()


@pytest.fixture
def store(opened, memory):
    memory.remove_all(True)
    return opened


def options(port: int, **more) -> MooncakeOptions:
    return MooncakeOptions(master=("127.0.0.1", port), buffer_bytes=1 << 20, **more)


def name_of(key, spec_digest: bytes = FORM.spec_digest) -> str:
    return f"stratakv/{spec_digest.hex()}/{key.group}/{key.page.hex()}.{key.shard}"


def fill(store, count: int):
    keys, pages = keys_of(count), pages_of(count)
    assert store.write(keys, views(pages)) == [WriteStatus.STORED] * count
    return keys, pages


class TestMooncake(StorageConformance):
    @pytest.fixture
    def subject(self, master, memory):
        def corrupt(key):
            name = name_of(key, CONFORMANCE_FORM.spec_digest)
            data = bytearray(memory.get(name))
            data[-1] ^= 1
            assert memory.remove(name, True) == 0
            assert memory.put(name, bytes(data)) == 0

        memory.remove_all(True)
        return StorageSubject(
            open=lambda form: MooncakeBackend(form, options(master.port)),
            corrupt=corrupt,
            shared=True,
            lasting=True,
            small=None,  # the master evicts by leases of seconds
        )


def test_pages_come_back_into_the_arena(store):
    keys, pages = fill(store, 300)
    back = np.zeros_like(pages)
    assert store.read(keys, views(back)) == [ReadStatus.HIT] * 300
    assert (back == pages).all()
    assert store.write(keys, views(pages)) == [WriteStatus.PRESENT] * 300
    assert store.remove(keys[:7]) == 7
    assert store.read(keys[:8], views(back[:8])) == [ReadStatus.MISS] * 7 + [ReadStatus.HIT]


def test_separate_buffers_are_let_go_of(store):
    keys, pages = fill(store, 150)
    back = [bytearray(PAGE) for _ in keys]
    assert store.read(keys, [memoryview(each) for each in back]) == [ReadStatus.HIT] * 150
    assert all(each == page.tobytes() for each, page in zip(back, pages, strict=True))
    fresh = np.zeros_like(pages)
    assert store.read(keys, views(fresh)) == [ReadStatus.HIT] * 150
    assert (fresh == pages).all()
    for each in back[:80]:
        each.append(0)  # a bytearray that is still held cannot grow


def test_pages_of_one_arena_are_one_region():
    arena = np.zeros(1 << 20, np.uint8)
    pages = arena.reshape(16, 256, 256)
    found = {region_of(page.reshape(-1).data)[:2] for page in pages[3:9]}
    assert found == {(arena.ctypes.data, arena.nbytes)}


@pytest.mark.parametrize("damage", ["head", "payload", "short", "long", "other"])
def test_a_wrong_object_is_corrupt_then_gone_then_written_anew(store, memory, damage):
    keys, pages = fill(store, 3)
    data = bytearray(memory.get(name_of(keys[1 if damage == "other" else 0])))
    if damage in {"head", "payload"}:
        data[{"head": 90, "payload": 5000}[damage]] ^= 1
    changed = {"short": data[:-9], "long": data + b"x"}.get(damage, data)
    assert memory.remove(name_of(keys[0]), True) == 0
    assert memory.put(name_of(keys[0]), bytes(changed)) == 0
    back = np.zeros_like(pages)
    assert store.read(keys, views(back)) == [ReadStatus.CORRUPT, ReadStatus.HIT, ReadStatus.HIT]
    assert store.contains(keys).tolist() == [False, True, True]
    wrote = store.write(keys, views(pages))
    assert wrote == [WriteStatus.STORED, WriteStatus.PRESENT, WriteStatus.PRESENT]


def test_another_spec_misses(store, master):
    keys, pages = fill(store, 2)
    form = StoreFormat(spec_digest=b"another spec 16b", page_bytes=FORM.page_bytes)
    other = MooncakeBackend(form, options(master.port))
    assert other.read(keys, views(np.zeros_like(pages))) == [ReadStatus.MISS] * 2
    other.close()


def test_a_full_store_refuses_and_still_reads(store):
    count = SEGMENT_BYTES // PAGE + 100
    keys = keys_of(count)
    pages = pages_of(64)
    wrote = store.write(keys, [pages[i % 64].data for i in range(count)])
    assert set(wrote) == {WriteStatus.STORED, WriteStatus.REFUSED}
    hits = 0
    for begin in range(0, count, 64):
        back = np.zeros_like(pages)
        some = keys[begin : begin + 64]
        for i, status in enumerate(store.read(some, views(back[: len(some)]))):
            assert status in {ReadStatus.HIT, ReadStatus.MISS}
            if status is ReadStatus.HIT:
                hits += 1
                assert (back[i] == pages[i]).all()
    assert 0 < hits <= wrote.count(WriteStatus.STORED)


def test_a_master_that_dies_is_an_error_and_is_found_again():
    with mooncake_master() as mortal:
        store = MooncakeBackend(FORM, options(mortal.port, segment_bytes=SEGMENT_BYTES))
        keys, pages = fill(store, 4)
        mortal.kill()
        with pytest.raises(StorageError):
            store.contains(keys)
        store.touch(keys)
        mortal.start()

        def is_back() -> bool:
            with suppress(StorageError):
                return store.write(keys, views(pages)) == [WriteStatus.STORED] * 4
            return False

        wait_until(is_back, "the client's return")
        assert store.read(keys, views(np.zeros_like(pages))) == [ReadStatus.HIT] * 4
        store.close()


def test_a_master_that_is_silent_ends_within_the_time_out_and_is_used_again():
    with mooncake_master() as mute:
        given = options(mute.port, segment_bytes=SEGMENT_BYTES, timeout_s=0.5)
        store = MooncakeBackend(FORM, given)
        keys, pages = fill(store, 4)
        assert mute.process is not None
        mute.freeze()
        with pytest.raises(StorageError):
            store.contains(keys)
        for call in (store.write, store.read):
            with pytest.raises(StorageError):
                call(keys, views(pages))
        store.touch(keys)
        mute.process.send_signal(signal.SIGCONT)
        back = np.zeros_like(pages)
        assert store.read(keys, views(back)) == [ReadStatus.HIT] * 4
        assert (back == pages).all()
        store.close()


def test_an_operators_own_limit_stands_and_ours_is_not_left_behind(master, monkeypatch):
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "7000")
    monkeypatch.delenv("MC_RPC_CONNECT_TIMEOUT_MS", raising=False)
    MooncakeBackend(FORM, options(master.port)).close()
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "7000"
    assert "MC_RPC_CONNECT_TIMEOUT_MS" not in os.environ


class Refusing:
    """A client whose every answer is ``code``; for ``batch_is_exist`` "no"."""

    def __init__(self, code: int) -> None:
        self.code = code

    def answer(self, names, *_):
        return [self.code] * len(names)

    batch_remove = batch_get_into_multi_buffers = batch_put_from_multi_buffers = answer

    def batch_is_exist(self, names):
        return [0] * len(names)

    def register_buffer(self, *_):
        return 0

    unregister_buffer = register_buffer

    def get_size(self, _):
        return -1

    def close(self):
        return 0


@pytest.mark.parametrize("code", [-900, -901])
def test_a_master_that_does_not_answer_fails_the_whole_call(code):
    store = MooncakeBackend(FORM, options(1), lambda _: Refusing(code))
    keys, pages = keys_of(2), pages_of(2)
    for call in (
        lambda: store.read(keys, views(pages)),
        lambda: store.write(keys, views(pages)),
        lambda: store.remove(keys),
    ):
        with pytest.raises(StorageError, match=str(code)):
            call()


def test_a_transfer_that_fails_is_a_failure_of_its_object():
    store = MooncakeBackend(FORM, options(1), lambda _: Refusing(-800))
    keys, pages = keys_of(2), pages_of(2)
    assert store.read(keys, views(pages)) == [ReadStatus.FAILED] * 2
    assert store.write(keys, views(pages)) == [WriteStatus.FAILED] * 2


def test_no_master_is_an_error_at_once():
    with pytest.raises(StorageError, match="no master"):
        MooncakeBackend(FORM, options(free_port()))


def test_after_close_every_call_is_an_error(master):
    store = MooncakeBackend(FORM, options(master.port))
    store.close()
    store.close()
    with pytest.raises(StorageError):
        store.contains(keys_of(1))
