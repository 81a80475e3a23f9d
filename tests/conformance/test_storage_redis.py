"""The Redis backend against a real server: the suite, and what only a server can do wrong."""

import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from stratakv.core.errors import StorageError
from stratakv.storage.backend import Everything, ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.redis import RedisBackend
from stratakv.storage.urls import RedisOptions
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.testing.storage_conformance import StorageConformance, StorageSubject
from tests.fixtures.servers import (
    REDIS_SERVERS,
    Server,
    free_port,
    installed,
    proxy,
    redis_programs,
    redis_server,
)
from tests.fixtures.stored_pages import FORM, PAGE, keys_of, pages_of, views

SECRET = "correct-horse"


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    place = tmp_path_factory.mktemp("redis")
    with redis_server("--unixsocket", str(place / "socket"), "--databases", "16") as running:
        yield running


@pytest.fixture
def url(server: Server) -> str:
    cli(server, "flushall")
    return f"redis://127.0.0.1:{server.port}/0"


def backend(url: str, **options) -> RedisBackend:
    return RedisBackend(FORM, RedisOptions(url=url, **options))


def client(server: Server) -> list[str]:
    """The command line's client, which lies beside its server."""
    return [server.words[0].replace("-server", "-cli"), "-p", str(server.port)]


def cli(server: Server, *words: str) -> str:
    done = subprocess.run([*client(server), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def stored(url: str, count: int, **options):
    store = backend(url, **options)
    keys, pages = keys_of(count), pages_of(count)
    assert store.write(keys, views(pages)) == [WriteStatus.STORED] * count
    return store, keys, pages


def reads(store, keys, into) -> bool:
    """Whether all are hits; an answer may come too late on a busy machine."""
    with suppress(StorageError):
        return store.read(keys, views(into)) == [ReadStatus.HIT] * len(keys)
    return False


class TestRedis(StorageConformance):
    @pytest.fixture
    def subject(self, url, server):
        def corrupt(key):
            name = cli(server, "keys", f"*:{key.group}:{key.page.hex()}.{key.shard}")
            flip(server, name, 128 + 2)

        return StorageSubject(
            open=lambda form: RedisBackend(form, RedisOptions(url=url, batch_bytes=100_000)),
            corrupt=corrupt,
            shared=True,
            lasting=True,
            small=None,  # its clock of uses counts whole seconds
        )


def flip(server: Server, name: str, at: int) -> None:
    """Change one byte of a stored string."""
    words = client(server)
    read = [*words, "--raw", "getrange", name, str(at), str(at)]
    old = subprocess.run(read, capture_output=True, check=True).stdout[:1]
    new = bytes([(old[0] if old else 0) ^ 4])
    write = [*words, "-x", "setrange", name, str(at)]
    subprocess.run(write, input=new, check=True, capture_output=True)


def test_pages_come_back_over_many_small_batches(url):
    store, keys, pages = stored(url, 20, batch_bytes=3 * PAGE)
    back = np.zeros_like(pages)
    assert store.read(keys, views(back)) == [ReadStatus.HIT] * 20
    assert (back == pages).all()


def test_a_unix_socket_serves_too(url, server):
    where = cli(server, "config", "get", "unixsocket").splitlines()[1]
    store, keys, pages = stored(f"unix://{where}", 3)
    back = np.zeros_like(pages)
    assert store.read(keys, views(back)) == [ReadStatus.HIT] * 3


@pytest.mark.parametrize("at", [0, 5, 40, 60, 100, 127, 128, 128 + PAGE - 1])
def test_a_flipped_byte_is_corrupt_then_gone_then_written_anew(url, server, at):
    store, keys, pages = stored(url, 2)
    name = cli(server, "keys", f"*{keys[0].page.hex()}*")
    flip(server, name, at)
    back = np.zeros_like(pages)
    assert store.read(keys, views(back)) == [ReadStatus.CORRUPT, ReadStatus.HIT]
    assert store.contains(keys).tolist() == [False, True]
    assert store.write(keys, views(pages)) == [WriteStatus.STORED, WriteStatus.PRESENT]


@pytest.mark.parametrize("size", [0, 7, 128, 127 + PAGE, 129 + PAGE])
def test_an_object_of_another_length_is_corrupt_and_its_neighbours_are_read(url, server, size):
    store, keys, pages = stored(url, 3)
    name = cli(server, "keys", f"*{keys[1].page.hex()}*")
    cli(server, "set", name, "x" * size)
    back = np.zeros_like(pages)
    found = store.read(keys, views(back))
    assert found == [ReadStatus.HIT, ReadStatus.CORRUPT, ReadStatus.HIT]
    assert (back[[0, 2]] == pages[[0, 2]]).all()


def test_what_is_no_string_under_our_name_is_corrupt_and_its_neighbours_are_read(url, server):
    store, keys, pages = stored(url, 3)
    name = cli(server, "keys", f"*{keys[1].page.hex()}*")
    cli(server, "del", name)
    cli(server, "rpush", name, "not", "ours")
    back = np.zeros_like(pages)
    found = store.read(keys, views(back))
    assert found == [ReadStatus.HIT, ReadStatus.CORRUPT, ReadStatus.HIT]
    assert (back[[0, 2]] == pages[[0, 2]]).all()
    assert store.write(keys, views(pages))[1] is WriteStatus.STORED


def test_the_object_of_another_key_under_this_name_is_corrupt(url, server):
    store, keys, pages = stored(url, 2)
    names = [cli(server, "keys", f"*{key.page.hex()}*") for key in keys]
    cli(server, "copy", names[0], names[1], "replace")
    found = store.read(keys, views(np.zeros_like(pages)))
    assert found == [ReadStatus.HIT, ReadStatus.CORRUPT]


def test_another_spec_misses(url):
    _, keys, pages = stored(url, 2)
    other = RedisBackend(
        StoreFormat(spec_digest=b"another spec 16b", page_bytes=FORM.page_bytes),
        RedisOptions(url=url),
    )
    assert other.read(keys, views(np.zeros_like(pages))) == [ReadStatus.MISS] * 2


def test_time_to_live_counts_from_the_last_use(url, server):
    store, keys, _ = stored(url, 2, ttl_s=100.0)
    names = [cli(server, "keys", f"*{key.page.hex()}*") for key in keys]
    for name in names:
        assert 90_000 < int(cli(server, "pttl", name)) <= 100_000
        cli(server, "pexpire", name, "5000")
    store.touch(keys[:1])
    assert [int(cli(server, "pttl", name)) > 90_000 for name in names] == [True, False]


def test_touch_reaches_the_server_in_the_order_given(url, server):
    store, keys, _ = stored(url, 4)
    monitor = subprocess.Popen([*client(server), "monitor"], stdout=subprocess.PIPE, text=True)
    try:
        assert monitor.stdout is not None
        assert monitor.stdout.readline().startswith("OK")
        store.touch(keys[::-1])
        seen = []
        while len(seen) < 4:
            line = monitor.stdout.readline()
            if "TOUCH" in line:
                seen.append(line)
    finally:
        monitor.kill()
        monitor.wait()
        monitor.stdout.close()
    assert all(key.page.hex() in line for key, line in zip(keys[::-1], seen, strict=True))


def test_a_full_server_refuses_and_still_reads():
    with redis_server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as small:
        store = backend(f"redis://127.0.0.1:{small.port}")
        keys, pages = keys_of(64), pages_of(64)
        wrote = store.write(keys, views(pages))
        assert set(wrote) == {WriteStatus.STORED, WriteStatus.REFUSED}
        back = np.zeros_like(pages)
        read = store.read(keys, views(back))
        for was, now in zip(wrote, read, strict=True):
            assert (was is WriteStatus.STORED) == (now is ReadStatus.HIT)
        store.remove(keys)
        assert store.write(keys[:8], views(pages[:8])) == [WriteStatus.STORED] * 8
        store.close()


def test_what_a_full_server_evicts_is_a_miss():
    with redis_server("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru") as small:
        store = backend(f"redis://127.0.0.1:{small.port}")
        keys, pages = keys_of(128), pages_of(128)
        for begin in range(0, 128, 8):
            some = slice(begin, begin + 8)
            assert store.write(keys[some], views(pages[some])) == [WriteStatus.STORED] * 8
        back = np.zeros_like(pages)
        read = store.read(keys, views(back))
        assert set(read) == {ReadStatus.HIT, ReadStatus.MISS}
        hits = [i for i, status in enumerate(read) if status is ReadStatus.HIT]
        assert (back[hits] == pages[hits]).all()
        store.close()


def test_a_replica_refuses_and_still_reads():
    with redis_server() as server:
        store, keys, pages = stored(f"redis://127.0.0.1:{server.port}", 4)
        # Its master is nobody: what it has stays, and it takes no writes.
        cli(server, "replicaof", "127.0.0.1", str(free_port()))
        fresh = keys_of(2, "fresh")
        assert store.write(fresh, views(pages[:2])) == [WriteStatus.REFUSED] * 2
        assert store.read(keys, views(np.zeros_like(pages))) == [ReadStatus.HIT] * 4
        store.close()


SHARE = """
import random, sys
from pathlib import Path
import numpy as np
from stratakv.storage.backend import ReadStatus, WriteStatus
from stratakv.storage.redis import RedisBackend
from stratakv.storage.urls import RedisOptions
from tests.fixtures.stored_pages import FORM, keys_of, pages_of, views

store = RedisBackend(FORM, RedisOptions(url=sys.argv[1], batch_bytes=200_000))
keys, pages, rng = keys_of(24), pages_of(24), random.Random(int(sys.argv[2]))
seen = {ReadStatus.HIT: 0, ReadStatus.MISS: 0}
for _ in range(150):
    some = rng.sample(range(24), 9)
    wrote = store.write([keys[i] for i in some], views(pages[some]))
    assert set(wrote) <= {WriteStatus.STORED, WriteStatus.PRESENT}, wrote
    some = rng.sample(range(24), 9)
    back = np.zeros_like(pages[some])
    for i, got, status in zip(some, back, store.read([keys[i] for i in some], views(back))):
        seen[status] += 1
        assert status is ReadStatus.MISS or (got == pages[i]).all()
    store.remove([keys[i] for i in rng.sample(range(24), 7)])
store.close()
assert min(seen.values()) > 50, seen
"""


def test_two_processes_share_a_server(url):
    words = [sys.executable, "-c", SHARE, url]
    runs = [subprocess.Popen([*words, seed], stderr=subprocess.PIPE, text=True) for seed in "12"]
    for run in runs:
        assert run.communicate(timeout=PATIENCE_S)[1] == ""
        assert run.returncode == 0


def test_everything_goes_in_many_rounds_and_a_prefix_is_no_pattern(url, server):
    form = StoreFormat(spec_digest=FORM.spec_digest, page_bytes=(1,))
    keys, pages = keys_of(9000), [memoryview(b"x")] * 9000
    odd, plain = (RedisBackend(form, RedisOptions(url=url, prefix=p)) for p in ("a[b]*?\\", "ab"))
    for store in (odd, plain):
        assert set(store.write(keys, pages)) == {WriteStatus.STORED}
    cli(server, "set", "somebody:else", "1")
    assert odd.remove(Everything.EVERYTHING) == 9000
    assert not odd.contains(keys).any()
    assert plain.contains(keys).all()
    assert plain.remove(Everything.EVERYTHING) == 9000
    assert cli(server, "keys", "*") == "somebody:else"


def test_a_server_killed_in_mid_batch_is_an_error_and_reconnected():
    with redis_server() as mortal, proxy(mortal.port) as between:
        url = f"redis://127.0.0.1:{between.port}"
        store, keys, pages = stored(url, 40, batch_bytes=4 * PAGE)
        between.chunk_bytes, dead = 2048, threading.Event()

        def dies(answered_bytes: int) -> None:
            if answered_bytes > 6 * PAGE and not dead.is_set():
                dead.set()
                mortal.kill()

        between.before_answer = dies
        back = np.zeros_like(pages)
        with pytest.raises(StorageError):
            store.read(keys, views(back))
        assert dead.wait(PATIENCE_S)
        with pytest.raises(StorageError):
            store.contains(keys)
        store.touch(keys)
        between.chunk_bytes = 65536
        mortal.start()
        assert not store.contains(keys).any()
        assert store.write(keys, views(pages)) == [WriteStatus.STORED] * 40
        assert store.read(keys, views(back)) == [ReadStatus.HIT] * 40
        store.close()


def test_an_answer_cut_in_a_page_is_an_error_and_the_next_call_is_in_step(server, url):
    with proxy(server.port) as between:
        store, keys, pages = stored(f"redis://127.0.0.1:{between.port}", 8)
        between.cut_after = 3 * PAGE
        with pytest.raises(StorageError):
            store.read(keys, views(np.zeros_like(pages)))
        between.cut_after = None
        back = np.zeros_like(pages)
        assert store.read(keys, views(back)) == [ReadStatus.HIT] * 8
        assert (back == pages).all()


@pytest.mark.parametrize("fault", ["silent", "drips"])
def test_a_slow_server_ends_within_the_time_out(server, url, fault):
    with proxy(server.port) as between:
        through = f"redis://127.0.0.1:{between.port}"
        _, keys, pages = stored(through, 8)
        store = backend(through, timeout_s=0.5)
        between.silent = fault == "silent"
        between.chunk_bytes, between.chunk_delay_s = 100, 0.05
        with pytest.raises(StorageError):
            store.read(keys, views(np.zeros_like(pages)))


def test_a_late_answer_is_not_taken_for_the_next_one(server, url):
    with proxy(server.port) as between:
        through = f"redis://127.0.0.1:{between.port}"
        _, keys, pages = stored(through, 2)
        store = backend(through, timeout_s=0.5)
        between.chunk_delay_s = 1.0
        back = np.zeros_like(pages)
        with pytest.raises(StorageError):
            store.read(keys[:1], views(back[:1]))
        between.chunk_delay_s = 0.0
        wait_until(lambda: reads(store, keys[1:], back[1:]), "an answer in time")
        assert (back[1] == pages[1]).all()
        store.close()


def test_an_idle_connection_that_the_server_dropped_is_not_an_error(url, server):
    store, keys, _ = stored(url, 2)
    cli(server, "client", "kill", "type", "normal", "skipme", "yes")
    assert store.contains(keys).all()


def test_a_wrong_password_is_an_error_without_the_password():
    with redis_server("--requirepass", "other") as guarded:
        url = f"redis://:{SECRET}@127.0.0.1:{guarded.port}/0"
        options = RedisOptions(url=url)
        with pytest.raises(StorageError) as caught:
            RedisBackend(FORM, options)
        assert SECRET not in f"{caught.value}{caught.value!r}{options!r}"
        with pytest.raises(StorageError, match=r"no connection|refused"):
            backend(f"redis://127.0.0.1:{guarded.port}/0")
        store = backend(f"redis://:other@127.0.0.1:{guarded.port}/0")
        assert not store.contains(keys_of(1)).any()
        assert "other" not in repr(store)


def test_tls_serves_and_a_stranger_is_not_trusted(tmp_path, monkeypatch):
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    words = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    )
    subprocess.run(
        [installed("openssl", "openssl"), *words.split(), "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    port = str(free_port())
    files = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    with redis_server("--tls-port", port, "--tls-auth-clients", "no", *files):
        url = f"rediss://127.0.0.1:{port}/0"
        with pytest.raises(StorageError, match="certificate"):
            backend(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        store, keys, pages = stored(url, 8)
        back = np.zeros_like(pages)
        assert store.read(keys, views(back)) == [ReadStatus.HIT] * 8
        assert (back == pages).all()
        assert store.contains(keys).all()
        store.close()


def test_no_server_is_an_error_at_once():
    with redis_server() as gone:
        port = gone.port
    with pytest.raises(StorageError):
        backend(f"redis://127.0.0.1:{port}/0")


def test_whichever_of_redis_and_valkey_is_here_serves(summary):
    programs = redis_programs()
    for program in programs:
        with redis_server(program=program) as server:
            store, keys, pages = stored(f"redis://127.0.0.1:{server.port}", 20, ttl_s=100.0)
            store.touch(keys)
            back = np.zeros_like(pages)
            assert store.read(keys, views(back)) == [ReadStatus.HIT] * 20
            assert (back == pages).all()
            assert store.remove(keys[:3]) == 3
            assert store.remove(Everything.EVERYTHING) == 17
            store.close()
    here = [Path(program).name for program in programs]
    absent = [f"no {name} here" for name in REDIS_SERVERS if name not in here]
    summary("the Redis store was tested against " + "; ".join([" and ".join(here), *absent]))
