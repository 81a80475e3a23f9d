"""Storage administration over HTTP: keys, status codes, what is shown. The engine is scripted, the
store is real."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from stratakv.core.clock import MonotonicClock
from stratakv.core.errors import StorageError
from stratakv.serve.admin import OpenStore
from stratakv.serve.server import Server, serve_forever
from stratakv.serve.tokenizer import Tokenizer
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.storage.registry import open_storage
from stratakv.storage.urls import hidden, parse_storage_url
from stratakv.testing.patience import PATIENCE_S, wait_until
from stratakv.testing.storage_faults import Faults, FaultyBackend
from tests.fixtures.servers import free_port
from tests.scraped import scraped
from tests.serving import (
    STORE_FORM,
    EchoEngine,
    LiveServer,
    error_of,
    make_service,
    running,
    train_tokenizer,
)

KEY = {"Authorization": "Bearer admin"}
STORAGE = "/cache/storage"
MEMORY = {"url": "memory://"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def opener(faults, sleep, url):
    backend = FaultyBackend(open_storage(parse_storage_url(url), STORE_FORM), faults, sleep)
    worker = IoWorker(Backends(backend, backend), STORE_FORM, IoLimits(), MonotonicClock())
    return OpenStore(worker=worker, shown=hidden(url), figures=dict)


@contextmanager
def serving(tokenizer, *, held=None, admin_key="admin", **settings):
    """``held``: its store answers nothing before this is set."""
    faults = Faults(delay_s=PATIENCE_S if held else 0.0)
    sleep = held.wait if held else time.sleep
    engine = EchoEngine(opener=lambda url: opener(faults, sleep, url))
    service = make_service(
        tokenizer,
        engine,
        admin_key=admin_key,
        check=parse_storage_url,
        **settings,
    )
    with (
        running(service, engine) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http,
    ):
        yield live, http


@pytest.fixture
def http(tokenizer):
    with serving(tokenizer) as (_, found):
        found.headers.update(KEY)
        yield found


def test_attach_inspect_clear_detach(http):
    assert http.get(STORAGE).json() == {"attached": False}
    assert http.put(STORAGE, json=MEMORY).json() == {"attached": True, "url": "memory://"}
    found = http.get(STORAGE).json()
    assert (found["attached"], found["url"], found["writing_off"]) == (True, "memory://", True)
    assert found["pages"] == {"written": 5, "dropped": 1}
    assert found["queue"]["queued"]["store"] == 0
    cleared = http.post(f"{STORAGE}/clear")
    assert (cleared.status_code, cleared.json()["clearing"]) == (202, True)
    gone = http.delete(STORAGE)
    assert gone.json() == {"attached": False, "url": "memory://", "dropped_pages": 0}
    assert http.get(STORAGE).json() == {"attached": False}


def test_a_state_that_does_not_fit(http):
    assert error_of(http.delete(STORAGE), 404)["code"] == "no_storage"
    assert error_of(http.post(f"{STORAGE}/clear"), 404)["code"] == "no_storage"
    assert http.put(STORAGE, json=MEMORY).status_code == 200
    assert error_of(http.put(STORAGE, json=MEMORY), 409)["code"] == "storage_attached"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b"", None, "invalid_json"),
        (b"{}", "url", "missing_required_parameter"),
        (b'{"url": 3}', "url", "invalid_type"),
        (b'{"url": "memory://", "quota": 3}', "quota", "unknown_parameter"),
        (b'{"url": "nfs://u:secret@host/x"}', "url", "invalid_value"),
        (b'{"url": "memory://?quota=0"}', "url", "invalid_value"),
    ],
)
def test_a_bad_attach(http, body, param, code):
    error = error_of(http.put(STORAGE, content=body), 400)
    assert (error["param"], error["code"]) == (param, code)
    assert "secret" not in error["message"]
    assert http.get(STORAGE).json() == {"attached": False}


@pytest.mark.parametrize(
    ("query", "param"),
    [("wait_s=-1", "wait_s"), ("wait_s=nan", "wait_s"), ("wait_s=x", "wait_s"),
     ("wait_s=1e9", "wait_s"), ("force=maybe", "force"), ("forse=true", "forse")],
)  # fmt: skip
def test_a_bad_detach(http, query, param):
    http.put(STORAGE, json=MEMORY)
    assert error_of(http.delete(f"{STORAGE}?{query}"), 400)["param"] == param
    assert http.get(STORAGE).json()["attached"]


def test_a_store_that_does_not_answer_is_a_bad_gateway(http):
    url = f"redis://user:secret@127.0.0.1:{free_port()}/0"
    error = error_of(http.put(STORAGE, json={"url": url}), 502)
    assert error["code"] == "storage_unreachable"
    assert "secret" not in error["message"]
    assert http.get(STORAGE).json() == {"attached": False}


def test_paths_and_methods(http):
    wrong = http.post(STORAGE)
    assert error_of(wrong, 405)["code"] == "method_not_allowed"
    assert set(wrong.headers["allow"].split(", ")) == {"GET", "HEAD", "PUT", "DELETE"}
    assert http.get(f"{STORAGE}/clear").status_code == 405


# -- keys ------------------------------------------------------------------------------------------

EVERY_CALL = (("GET", STORAGE), ("PUT", STORAGE), ("DELETE", STORAGE), ("POST", f"{STORAGE}/clear"))


@pytest.mark.parametrize("api_key", [None, "api"])
def test_without_an_admin_key_the_storage_is_closed(tokenizer, api_key):
    with serving(tokenizer, admin_key=None, api_key=api_key) as (live, http):
        for headers in ({}, {"Authorization": "Bearer api"}, {"Authorization": "Bearer None"}):
            for method, path in EVERY_CALL:
                error = error_of(http.request(method, path, json=MEMORY, headers=headers), 403)
                assert "--admin-key" in error["message"]
        assert live.engine.storage.worker is None
        # What could be done before there were admin keys can still be done.
        allowed = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        assert http.post("/flush_cache", headers=allowed).status_code == 200


@pytest.mark.parametrize("api_key", [None, "api"])
def test_the_admin_key_and_no_other_opens_the_storage_and_the_flush(tokenizer, api_key):
    with serving(tokenizer, api_key=api_key) as (_, http):
        for headers in ({}, {"Authorization": "Bearer api"}, {"Authorization": "admin"}):
            for method, path in (*EVERY_CALL, ("POST", "/flush_cache")):
                wrong = http.request(method, path, json=MEMORY, headers=headers)
                assert error_of(wrong, 401)["code"] == "invalid_admin_key"
                assert wrong.headers["www-authenticate"] == "Bearer"
        assert http.post("/flush_cache", headers=KEY).status_code == 200
        assert http.put(STORAGE, json=MEMORY, headers=KEY).status_code == 200
        assert http.get("/v1/models", headers=KEY).status_code == (401 if api_key else 200)


# -- somebody else's directory ---------------------------------------------------------------------


def test_a_directory_of_somebody_elses_is_refused_while_others_are_answered(tokenizer, tmp_path):
    (tmp_path / "ledger").write_text("rent 900\n")
    (tmp_path / "000000000001.seg").write_text("a text\n")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    with serving(tokenizer) as (live, http), ThreadPoolExecutor(1) as pool:
        live.engine.gate.clear()
        other = pool.submit(http.post, "/v1/completions", json={"prompt": "hello", "max_tokens": 2})
        wait_until(lambda: live.service.driver.open_requests == 1)
        # Its step is held, and with it whoever asks the engine; opening a store is beside it.
        error = error_of(
            http.put(STORAGE, json={"url": f"file://{tmp_path}?quota=1GiB"}, headers=KEY), 400
        )
        assert (error["param"], error["code"]) == ("url", "invalid_value")
        assert error["message"] == (
            f"--storage file://{tmp_path}: it holds no store, and 'ledger' in it is not ours; "
            "allowed is a directory that does not exist yet, an empty one, or a store of StrataKV"
        )
        assert http.get("/health").status_code == 200
        assert not other.done()
        live.engine.gate.set()
        assert other.result(PATIENCE_S).status_code == 200
        assert http.get(STORAGE, headers=KEY).json() == {"attached": False}
    assert before == {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()
    }


# -- work under way --------------------------------------------------------------------------------


def store(live, count):
    live.service.driver.ask(lambda: live.engine.storage.store(*range(count))).result(PATIENCE_S)


def test_a_slow_store_is_detached_in_time_or_not_at_all(tokenizer):
    held = threading.Event()
    with serving(tokenizer, held=held) as (live, http):
        http.headers.update(KEY)
        http.put(STORAGE, json=MEMORY)
        store(live, 3)
        error = error_of(http.delete(f"{STORAGE}?wait_s=0"), 409)
        assert "3 pages are still to be written" in error["message"]
        assert http.get(STORAGE).json()["attached"]
        held.set()
        assert http.delete(f"{STORAGE}?wait_s={PATIENCE_S:g}").json()["dropped_pages"] == 0


def test_others_are_answered_while_a_detach_waits(tokenizer):
    held = threading.Event()
    with (
        serving(tokenizer, held=held) as (live, http),
        ThreadPoolExecutor(1) as pool,
    ):
        http.put(STORAGE, json=MEMORY, headers=KEY)
        store(live, 2)
        detach = pool.submit(http.delete, f"{STORAGE}?wait_s={PATIENCE_S:g}", headers=KEY)
        wait_until(lambda: live.engine.storage.detaching)
        answer = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
        assert answer.status_code == 200
        assert error_of(http.put(STORAGE, json=MEMORY, headers=KEY), 409)["code"] == "busy"
        assert not detach.done()
        held.set()
        assert detach.result(PATIENCE_S).json()["attached"] is False


def test_draining_refuses_changes(tokenizer):
    with serving(tokenizer) as (live, http):
        http.headers.update(KEY)
        http.put(STORAGE, json=MEMORY)
        live.service.driver.drain()
        for method, path in EVERY_CALL[1:]:
            assert error_of(http.request(method, path, json=MEMORY), 503)["code"] == "draining"
        assert http.get(STORAGE).json()["attached"]


def test_metrics_know_of_storage_while_it_is_attached(tokenizer):
    with serving(tokenizer) as (_, http):
        assert "stratakv_storage" not in http.get("/metrics").text
        http.put(STORAGE, json=MEMORY, headers=KEY)
        text = http.get("/metrics").text
        found = scraped(text)
        assert found["stratakv_storage_lost_tokens_total", "deadline"] == 32
        assert found["stratakv_storage_off", "writing"] == 1
        assert 'path="/cache/storage",status="200"' in text


def test_the_servers_end_writes_what_is_queued(tokenizer, monkeypatch):
    backends = []

    def keeping(url):
        backends.append(open_storage(parse_storage_url(url), STORE_FORM))
        slow = FaultyBackend(backends[0], Faults(delay_s=0.1))
        limits = IoLimits(batch_pages=1)
        worker = IoWorker(Backends(slow, slow), STORE_FORM, limits, MonotonicClock())
        return OpenStore(worker=worker, shown=url, figures=dict)

    engine = EchoEngine(opener=keeping)
    service = make_service(tokenizer, engine, check=parse_storage_url)
    written = []

    def run(_server, listeners):
        listeners[0].close()
        service.storage.attach("memory://")
        store(LiveServer(service, engine, None, None, ""), 5)
        monkeypatch.setattr(
            backends[0], "close", lambda: written.append(len(backends[0].snapshot()))
        )

    monkeypatch.setattr(Server, "run", run)
    assert serve_forever(service, host="127.0.0.1", port=0, drain_s=PATIENCE_S) == 0
    assert written == [5]
    assert engine.storage.worker is None  # it was detached in good order


def test_a_store_that_fails_to_close_is_detached_all_the_same(tokenizer, monkeypatch):
    def close(_backend):
        raise StorageError("the disk is gone")

    monkeypatch.setattr(FaultyBackend, "close", close)
    with serving(tokenizer) as (_, http):
        http.headers.update(KEY)
        http.put(STORAGE, json=MEMORY)
        assert http.delete(STORAGE).status_code == 200
        assert http.put(STORAGE, json=MEMORY).status_code == 200
