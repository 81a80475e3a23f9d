"""A server that is no Redis: whatever it says is a StorageError, soon, and takes little memory."""

import itertools
import tracemalloc

import numpy as np
import pytest

from stratakv.core.errors import StorageError
from stratakv.storage.backend import Everything, ReadStatus
from stratakv.storage.redis import RedisBackend
from stratakv.storage.urls import RedisOptions
from tests.fixtures.hostile_redis import hostile_redis, unkind
from tests.fixtures.stored_pages import FORM, keys_of, pages_of, views

KEYS, PAGES = keys_of(3), pages_of(3)
LITTLE_BYTES = 8 << 20
HUGE = b"9" * 18
PLACE = b"stratakv:%s:" % FORM.spec_digest.hex().encode()


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def scanned(cursor: bytes, *names: bytes) -> bytes:
    found = b"*2\r\n" + bulk(cursor) + b"*%d\r\n" % len(names)
    return found + b"".join(map(bulk, names))


JUNK = (
    b":abc\r\n", b":\r\n", b":--1\r\n", b":" + b"9" * 4000 + b"\r\n", b"*2\r\n:1\r\n:2\r\n",
    b"+\xff\x00\r\n", b"$abc\r\n", b"$-2\r\n", b"$\r\n", b"%1\r\n", b"x" * 9000, b"_\r\n",
    b",1\r\n", b"\r\n", b"$" + b"9" * 30 + b"\r\n", b":\xd9\xa1\r\n",
)  # fmt: skip
ENDLESS = itertools.count(1)
SCANS = {
    "a number": b":1\r\n",
    "a part is a refusal": b"*2\r\n$1\r\n0\r\n-ERR no\r\n",
    "no names": b"*2\r\n$1\r\n0\r\n$1\r\nx\r\n",
    "one part": b"*1\r\n$1\r\n0\r\n",
    "three parts": b"*3\r\n$1\r\n0\r\n*0\r\n*0\r\n",
    "a huge cursor": b"*2\r\n$" + HUGE + b"\r\n",
    "no cursor": b"*2\r\n$3\r\nabc\r\n*0\r\n",
    "an absent cursor": b"*2\r\n$-1\r\n*0\r\n",
    "a huge name": b"*2\r\n$1\r\n0\r\n*1\r\n$" + HUGE + b"\r\n",
    "many names": b"*2\r\n$1\r\n0\r\n*" + HUGE + b"\r\n",
    "an absent name": b"*2\r\n$1\r\n0\r\n*1\r\n$-1\r\n",
    "somebody's name": scanned(b"0", b"somebody:else"),
    "a cursor that stays": scanned(b"7"),
    "names that stay": scanned(b"7", PLACE + b"0/x.0"),
}


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk[:8]))
@pytest.mark.parametrize("command", ["EXISTS", "GET", "SET", "UNLINK", "SCAN"])
def test_junk_is_a_failure_of_the_store(command: str, junk: bytes):
    calls = {
        "EXISTS": lambda store: store.contains(KEYS),
        "GET": lambda store: store.read(KEYS, views(np.zeros_like(PAGES))),
        "SET": lambda store: store.write(KEYS, views(PAGES)),
        "UNLINK": lambda store: store.remove(KEYS),
        "SCAN": lambda store: store.remove(Everything.EVERYTHING),
    }
    with hostile_redis() as server:
        store = RedisBackend(FORM, RedisOptions(url=server.url, timeout_s=0.2))
        server.answer = unkind(**{command: junk})
        tracemalloc.start()
        with pytest.raises(StorageError, match="redis: "):
            calls[command](store)
        assert tracemalloc.get_traced_memory()[1] < LITTLE_BYTES
        tracemalloc.stop()
        store.touch(KEYS)
        server.answer = unkind()
        assert not store.contains(KEYS).any()
        assert store.read(KEYS, views(np.zeros_like(PAGES))) == [ReadStatus.MISS] * 3
        store.close()


@pytest.mark.parametrize("scan", SCANS)
def test_a_scan_that_makes_no_sense_ends(scan: str):
    with hostile_redis(unkind(SCAN=SCANS[scan])) as server:
        store = RedisBackend(FORM, RedisOptions(url=server.url, timeout_s=0.2))
        tracemalloc.start()
        with pytest.raises(StorageError, match=r"redis: (un|an un|SCAN|the server|reading)"):
            store.remove(Everything.EVERYTHING)
        assert tracemalloc.get_traced_memory()[1] < LITTLE_BYTES
        tracemalloc.stop()
        assert server.asked[b"SCAN"] <= 2
        assert server.asked[b"UNLINK"] <= 2
        store.close()


def test_a_scan_whose_cursor_never_ends_is_given_up():
    def counting(_words: list[bytes]) -> bytes:
        return scanned(b"%d" % next(ENDLESS))

    with hostile_redis(unkind(SCAN=counting)) as server:
        store = RedisBackend(FORM, RedisOptions(url=server.url, timeout_s=0.02))
        with pytest.raises(StorageError, match="SCAN has no end; 0 objects were removed"):
            store.remove(Everything.EVERYTHING)
        store.close()


@pytest.mark.parametrize("command", ["AUTH", "SELECT"])
@pytest.mark.parametrize("junk", [*JUNK, b":1\r\n", b"$-1\r\n"], ids=lambda junk: repr(junk[:8]))
def test_a_login_that_makes_no_sense_is_no_login(command: str, junk: bytes):
    if junk.startswith(b"+"):
        pytest.skip("a simple string is a yes")
    with hostile_redis(unkind(**{command: junk})) as server:
        url = server.url.replace("redis://", "redis://u:secret@").replace("/0", "/3")
        with pytest.raises(StorageError) as caught:
            RedisBackend(FORM, RedisOptions(url=url, timeout_s=0.2))
        assert "secret" not in str(caught.value)
        assert not server.asked[b"PING"], "it was spoken to without a login"


def test_the_words_of_a_refusal_are_one_short_line():
    refusal = b"-ERR \x1b[2J\n" + "\u2028".encode() + b"y" * 3000 + b"\r\n"
    with hostile_redis() as server:
        store = RedisBackend(FORM, RedisOptions(url=server.url))
        server.answer = unkind(EXISTS=refusal)
        with pytest.raises(StorageError) as caught:
            store.contains(KEYS)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 300
        store.close()
