"""The S3 backend against moto's server: the suite, and what only a service can do wrong."""

import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from obstore.store import S3Store

from stratakv.core.errors import ConfigError, StorageError
from stratakv.storage.backend import Everything, ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.s3 import S3Backend
from stratakv.storage.urls import S3Options
from stratakv.testing.patience import PATIENCE_S
from stratakv.testing.storage_conformance import FORM as CONFORMANCE_FORM
from stratakv.testing.storage_conformance import StorageConformance, StorageSubject
from tests.fixtures.servers import free_port, proxy, s3_server
from tests.fixtures.stored_pages import FORM, PAGE, keys_of, pages_of, views

SECRET = "wJalrXUtnFEMIsecret"
BUCKET = "pages"


@pytest.fixture(scope="session")
def server():
    with s3_server() as running:
        request(running.port, f"/{BUCKET}", "PUT")
        yield running


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in {"ACCESS_KEY_ID": "known", "SECRET_ACCESS_KEY": SECRET}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture
def prefix(request):
    """Every test has its own part of the one bucket."""
    return f"run/{request.node.name}"


def request(port: int, path: str, method: str = "POST", data: bytes = b"") -> None:
    """Of moto's own: without credentials."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=data,
        headers={"Content-Type": "text/plain"},
        method=method,
    )
    with urllib.request.urlopen(asked, timeout=PATIENCE_S):
        pass


def bucket(port: int) -> S3Store:
    """The same bucket, past the backend."""
    return S3Store(BUCKET, endpoint=f"http://127.0.0.1:{port}", client_options={"allow_http": True})


def options(port: int, prefix: str = "stratakv", **more) -> S3Options:
    settings = {"endpoint": f"http://127.0.0.1:{port}"} | more.pop("settings", {})
    return S3Options(**({"bucket": BUCKET, "prefix": prefix, "settings": settings} | more))


def stored(port: int, prefix: str, count: int, **more):
    store = S3Backend(FORM, options(port, prefix, **more))
    keys, pages = keys_of(count), pages_of(count)
    assert store.write(keys, views(pages)) == [WriteStatus.STORED] * count
    return store, keys, pages


def path_of(prefix: str, key, spec_digest: bytes = FORM.spec_digest) -> str:
    return f"{prefix}/{spec_digest.hex()}/{key.group}/{key.page.hex()}.{key.shard}"


class TestS3(StorageConformance):
    @pytest.fixture
    def subject(self, server, prefix):
        def corrupt(key):
            name = path_of(prefix, key, CONFORMANCE_FORM.spec_digest)
            data = bytearray(bucket(server.port).get(name).bytes())
            data[-1] ^= 1
            bucket(server.port).put(name, bytes(data))

        return StorageSubject(
            open=lambda form: S3Backend(form, options(server.port, prefix)),
            corrupt=corrupt,
            shared=True,
            lasting=True,
            small=None,  # a bucket has no end
        )


def test_pages_come_back_from_under_their_documented_names(server, prefix):
    store, keys, pages = stored(server.port, prefix, 12)
    back = np.zeros_like(pages)
    assert store.read(keys, views(back)) == [ReadStatus.HIT] * 12
    assert (back == pages).all()
    data = bytes(bucket(server.port).get(path_of(prefix, keys[3])).bytes())
    assert data[128:] == pages[3].tobytes()
    assert store.write(keys, views(pages)) == [WriteStatus.PRESENT] * 12
    assert store.remove(keys[:5]) == 5
    assert store.contains(keys).tolist() == [False] * 5 + [True] * 7
    store.close()


@pytest.mark.parametrize("damage", ["head", "payload", "short", "long", "empty", "other"])
def test_a_wrong_object_is_corrupt_then_gone_then_written_anew(server, prefix, damage):
    store, keys, pages = stored(server.port, prefix, 2)
    past = bucket(server.port)
    source = keys[damage == "other"]
    data = bytearray(past.get(path_of(prefix, source)).bytes())
    if damage in {"head", "payload"}:
        data[{"head": 90, "payload": 5000}[damage]] ^= 1
    changed = {"short": data[:-1], "long": data + b"x", "empty": data[:0]}.get(damage, data)
    past.put(path_of(prefix, keys[0]), bytes(changed))
    found = store.read(keys, views(np.zeros_like(pages)))
    assert found == [ReadStatus.CORRUPT, ReadStatus.HIT]
    assert store.contains(keys).tolist() == [False, True]
    assert store.write(keys, views(pages)) == [WriteStatus.STORED, WriteStatus.PRESENT]
    store.close()


def test_an_empty_prefix_is_the_root_of_the_bucket(server):
    store, keys, _ = stored(server.port, "", 1)
    name = f"{FORM.spec_digest.hex()}/0/{keys[0].page.hex()}.0"
    assert bucket(server.port).head(name)["size"] == 128 + PAGE
    assert store.remove(keys) == 1
    store.close()


def test_another_spec_misses(server, prefix):
    store, keys, pages = stored(server.port, prefix, 2)
    form = StoreFormat(spec_digest=b"another spec 16b", page_bytes=FORM.page_bytes)
    other = S3Backend(form, options(server.port, prefix))
    assert other.read(keys, views(np.zeros_like(pages))) == [ReadStatus.MISS] * 2
    other.close()
    store.close()


def test_a_missing_bucket_is_an_error_when_it_is_opened(server):
    with pytest.raises(StorageError, match="NoSuchBucket"):
        S3Backend(FORM, options(server.port, bucket="nobody"))


def test_a_bucket_that_vanishes_is_an_error_not_a_miss(server, prefix):
    request(server.port, "/fleeting", "PUT")
    store = S3Backend(FORM, options(server.port, prefix, bucket="fleeting"))
    request(server.port, "/fleeting", "DELETE")
    pages = pages_of(2)
    with pytest.raises(StorageError, match="NoSuchBucket"):
        store.read(keys_of(2), views(pages))
    with pytest.raises(StorageError, match="NoSuchBucket"):
        store.write(keys_of(2), views(pages))
    store.close()


def test_wrong_credentials_are_an_error_without_the_secret(server):
    request(server.port, "/moto-api/reset-auth", data=b"0")
    try:
        given = options(server.port)
        with pytest.raises(StorageError, match="InvalidAccessKeyId") as caught:
            S3Backend(FORM, given)
    finally:
        request(server.port, "/moto-api/reset-auth", data=b"inf")
    assert SECRET not in f"{caught.value}{caught.value!r}{given!r}"


def test_a_setting_that_the_library_does_not_take_is_the_operators(server):
    with pytest.raises(ConfigError, match="allowed are") as caught:
        S3Backend(FORM, options(server.port, settings={"secret_key": SECRET}))
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__


class Answers(BaseHTTPRequestHandler):
    """What ``server.script`` says for a method; else that there is no such key."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, code = self.server.script.get(self.command, (404, "NoSuchKey"))
        body = f"<Error><Code>{code}</Code></Error>".encode() if code else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = answer  # noqa: N815 - their names

    def log_message(self, *_):
        pass


@pytest.fixture
def scripted():
    """A service of our own, and a store on it: it says what moto never does."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as service:
        service.daemon_threads, service.script = True, {}
        threading.Thread(target=service.serve_forever, args=(0.01,), daemon=True).start()
        store = S3Backend(FORM, options(service.server_port, retries=0))
        yield service.script, store
        store.close()
        service.shutdown()


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "QuotaExceeded"), (507, "XMinioStorageFull"), (507, ""), (400, "QuotaExceeded")],
)
def test_a_service_without_room_refuses(scripted, status, code):
    script, store = scripted
    script["PUT"] = (status, code)
    assert store.write(keys_of(3), views(pages_of(3))) == [WriteStatus.REFUSED] * 3
    assert not store.contains(keys_of(3)).any()


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "SlowDown"), (403, "AccessDenied"), (500, "InternalError"), (404, "NoSuchBucket")],
)
def test_a_write_that_is_not_let_through_is_an_error_with_its_code(scripted, status, code):
    script, store = scripted
    script["PUT"] = (status, code)
    with pytest.raises(StorageError, match=f"PUT failed: {code}$"):
        store.write(keys_of(3), views(pages_of(3)))


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "SlowDown"), (403, "AccessDenied"), (500, "InternalError"), (404, "NoSuchBucket")],
)
def test_a_read_that_is_not_let_through_is_an_error_not_a_miss(scripted, status, code):
    script, store = scripted
    script["GET"] = (status, code)
    with pytest.raises(StorageError, match=f"GET failed: {code}$"):
        store.read(keys_of(3), views(pages_of(3)))
    with pytest.raises(StorageError, match=f"LIST failed: {code}$"):
        store.remove(Everything.EVERYTHING)


@pytest.mark.parametrize("status", [403, 500, 503])
def test_a_question_that_is_not_let_through_is_an_error_not_a_no(scripted, status):
    script, store = scripted
    script["HEAD"] = (status, "")
    with pytest.raises(StorageError, match="HEAD failed"):
        store.contains(keys_of(3))
    store.touch(keys_of(3))


def test_everything_goes_in_many_requests(server, prefix, monkeypatch):
    monkeypatch.setattr("stratakv.storage.s3.DELETED_AT_ONCE", 40)
    form = StoreFormat(spec_digest=FORM.spec_digest, page_bytes=(1,))
    stores = [S3Backend(form, options(server.port, f"{prefix}{more}")) for more in ("", "2")]
    keys, pages = keys_of(130), [memoryview(b"x")] * 130
    stores[0].write(keys, pages)
    stores[1].write(keys[:3], pages[:3])
    assert stores[0].remove(Everything.EVERYTHING) == 130
    assert stores[0].remove(Everything.EVERYTHING) == 0
    assert stores[1].contains(keys[:3]).all()
    for store in stores:
        store.close()


def test_a_service_that_dies_is_an_error_within_its_time_and_comes_back(server, prefix):
    with proxy(server.port) as between:
        store, keys, pages = stored(between.port, prefix, 12, timeout_s=3.0, retries=1)
        between.cut_after = 3 * PAGE
        with pytest.raises(StorageError):
            store.read(keys, views(np.zeros_like(pages)))
        with pytest.raises(StorageError):
            store.write(keys_of(4, "new"), views(pages[:4]))
        between.cut_after = None
        assert store.read(keys, views(np.zeros_like(pages))) == [ReadStatus.HIT] * 12
        store.close()


def test_a_service_that_is_silent_ends_within_the_time_out(server, prefix):
    with proxy(server.port) as between:
        store, keys, pages = stored(between.port, prefix, 6, timeout_s=0.7, retries=1)
        between.silent = True
        with pytest.raises(StorageError):
            store.read(keys, views(np.zeros_like(pages)))
        store.close()


def test_no_more_requests_than_allowed_are_under_way(server, prefix):
    with proxy(server.port) as between:
        between.chunk_delay_s = 0.02
        store, keys, pages = stored(between.port, prefix, 24, concurrency=3)
        assert store.read(keys, views(np.zeros_like(pages))) == [ReadStatus.HIT] * 24
        # A connection that ends may still be counted when the next one begins.
        assert between.most_open <= 6
        store.close()


def test_no_service_is_an_error():
    with pytest.raises(StorageError):
        S3Backend(FORM, options(free_port(), retries=0))
