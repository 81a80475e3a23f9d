"""Whoever can write to a store and has no key cannot have a page used, in any store."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest

from stratakv.core.clock import ManualClock
from stratakv.storage.backend import ObjectKey, ReadStatus, StorageBackend, WriteStatus
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.store import FileStore
from stratakv.storage.memory import MemoryBackend
from stratakv.storage.redis import RedisBackend
from stratakv.storage.s3 import S3Backend
from stratakv.storage.sealed import SealedBackend, sealed_form
from stratakv.storage.store_key import SEAL_BYTES, StoreKey
from stratakv.storage.urls import RedisOptions, S3Options
from stratakv.testing.storage_conformance import (
    FORM,
    Arena,
    StorageConformance,
    StorageSubject,
    fetch,
    keys_of,
    page_of,
    store,
)
from tests.fixtures.servers import redis_server, s3_server
from tests.storage_files import Place, flip_payload

HIT, MISS, CORRUPT = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.CORRUPT
KEY, OTHER = StoreKey(b"a" * 32), StoreKey(b"b" * 32)
INNER = sealed_form(FORM, KEY)
KEYS = keys_of("sealed", 4)
Open = Callable[[StoreKey | None], StorageBackend]


def behind(key: StoreKey | None, opening: Callable[..., StorageBackend]) -> StorageBackend:
    if key is None:
        return opening(FORM)
    inner = sealed_form(FORM, key)
    return SealedBackend(opening(inner), inner, key)


@pytest.fixture(scope="module")
def redis():
    with redis_server() as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture(params=["file", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., StorageBackend]:
    """One place, opened for any format."""
    if request.param == "file":
        keeping, clock = StoreLimits(quota_bytes=64 << 20), ManualClock(1000)
        return lambda form: FileStore(tmp_path / "store", form, keeping, clock)
    url = request.getfixturevalue("redis")
    prefix = tmp_path.name
    return lambda form: RedisBackend(form, RedisOptions(url=url, prefix=prefix))


class TestSealedFiles(StorageConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> StorageSubject:
        place = Place(tmp_path / "store")

        def opened(form):
            inner = sealed_form(form, KEY)
            return SealedBackend(place.open(inner), inner, KEY)

        return StorageSubject(
            open=opened,
            corrupt=lambda key: flip_payload(place.path, key, 5),
            shared=True,
            lasting=True,
            small=None,
        )


class TestSealedMemory(StorageConformance):
    @pytest.fixture
    def subject(self) -> StorageSubject:
        def opened(form):
            inner = sealed_form(form, KEY)
            return SealedBackend(MemoryBackend(inner), inner, KEY)

        return StorageSubject(open=opened, corrupt=None, shared=False, lasting=False, small=None)


def forger(place: Callable[..., StorageBackend]) -> StorageBackend:
    """Who can write to the store, and knows all about it but the key."""
    return place(INNER)


def poison(key: ObjectKey) -> memoryview:
    """The right page but for a byte, with a seal of somebody's own."""
    page = bytearray(page_of(key))
    page[0] ^= 1
    seal = OTHER.seal(INNER.spec_digest, key, memoryview(page))
    return memoryview(bytes(page) + seal)


def test_a_forged_page_is_never_a_hit_and_is_counted_and_replaced(place, caplog):
    with closing(forger(place)) as them:
        assert them.write(KEYS, [poison(key) for key in KEYS]) == [WriteStatus.STORED] * 4
    with closing(behind(KEY, place)) as ours:
        assert ours.contains(KEYS).all()
        assert fetch(ours, KEYS) == [CORRUPT] * 4
        assert fetch(ours, KEYS) == [MISS] * 4
        assert ours.forged == 4
        assert store(ours, KEYS) == [WriteStatus.STORED] * 4
        assert fetch(ours, KEYS) == [HIT] * 4
    assert sum("not sealed with this server's key" in line for line in caplog.messages) == 1


def test_a_sealed_page_cannot_be_moved_under_another_key(place):
    one, two = KEYS[0], KEYS[1]
    wanted = [two, one._replace(shard=1), *keys_of("sealed", 1, group=1)]
    with closing(behind(KEY, place)) as ours:
        store(ours, [one])
    with closing(forger(place)) as them:
        room = memoryview(bytearray(INNER.page_bytes[0]))
        assert them.read([one], [room]) == [HIT]
        sizes = [FORM.page_bytes[key.group] for key in wanted]
        them.write(wanted, [memoryview(bytes(room[:n]) + room[-SEAL_BYTES:]) for n in sizes])
    with closing(behind(KEY, place)) as ours:
        assert fetch(ours, [one, *wanted]) == [HIT, CORRUPT, CORRUPT, CORRUPT]


@pytest.mark.parametrize("at", [0, 5000, 12_287, 12_288, 12_288 + SEAL_BYTES - 1])
def test_no_byte_of_a_page_or_its_seal_can_be_changed(place, at: int):
    with closing(behind(KEY, place)) as ours:
        store(ours, KEYS)
    with closing(forger(place)) as them:
        room = memoryview(bytearray(INNER.page_bytes[0]))
        them.read(KEYS[:1], [room])
        room[at] ^= 1
        them.remove(KEYS[:1])
        assert them.write(KEYS[:1], [room]) == [WriteStatus.STORED]
    with closing(behind(KEY, place)) as ours:
        assert fetch(ours, KEYS) == [CORRUPT, HIT, HIT, HIT]


@pytest.mark.parametrize(("first", "then"), [(None, KEY), (KEY, None), (KEY, OTHER)])
def test_pages_of_another_key_or_of_none_are_misses_and_stay(place, first, then):
    with closing(behind(first, place)) as theirs:
        store(theirs, KEYS)
    with closing(behind(then, place)) as ours:
        assert not ours.contains(KEYS).any()
        assert fetch(ours, KEYS) == [MISS] * 4
        assert store(ours, KEYS) == [WriteStatus.STORED] * 4
        assert fetch(ours, KEYS) == [HIT] * 4
    with closing(behind(first, place)) as theirs:
        assert fetch(theirs, KEYS) == [HIT] * 4


def test_a_batch_passes_through_memory_of_its_own_and_changes_no_page():
    ours = SealedBackend(MemoryBackend(INNER), INNER, KEY)
    arena = Arena(KEYS).fill()
    before = [bytes(page) for page in arena.pages]
    ours.write(KEYS, arena.pages)
    assert [bytes(page) for page in arena.pages] == before
    ours.inner.damage(KEYS[0], 7)
    into = np.zeros((2, FORM.page_bytes[0]), np.uint8)
    assert ours.read(KEYS[:2], [row.data for row in into]) == [CORRUPT, HIT]
    assert not into[0].any(), "a page that was not believed was handed out"
    assert ours.forged == 0, "what is damaged was not forged"
    ours.close()


def test_an_object_of_s3_is_sealed_like_any_other(s3_place):
    with closing(behind(KEY, s3_place)) as ours:
        store(ours, KEYS)
        assert fetch(ours, KEYS) == [HIT] * 4
    with closing(s3_place(INNER)) as them:
        them.remove(KEYS[:1])
        them.write(KEYS[:1], [poison(KEYS[0])])
    with closing(behind(KEY, s3_place)) as ours:
        assert fetch(ours, KEYS) == [CORRUPT, HIT, HIT, HIT]


@pytest.fixture
def s3_place(monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    with s3_server() as server:
        url = f"http://127.0.0.1:{server.port}"
        httpx.put(f"{url}/bucket").raise_for_status()
        settings = {"endpoint": url, "region": "us-east-1"}
        yield lambda form: S3Backend(form, S3Options(bucket="bucket", settings=settings))
