"""What a router asks its servers, and what its client gets where one refuses, is silent or dies."""

import asyncio
import json
from collections import Counter

import httpx
import pytest
from starlette.testclient import TestClient

from stratakv.core.clock import ManualClock
from stratakv.core.config import RouteConfig
from stratakv.serve.route import build_router
from stratakv.serve.route_servers import REST_S
from stratakv.testing.patience import PATIENCE_S

KEY = "Bearer right"
INFO = {"server": {"advertise_host": None, "bootstrap_port": 9}}
PROBES = ("/server_info", "/health", "/v1/models")


def responds(found, status=200, headers=None):
    content = httpx.ByteStream(json.dumps(found).encode())
    return httpx.Response(status, headers=headers, stream=content)


class Servers:
    """One of each role, which want ``KEY``; ``silent``: the path at which none answers."""

    def __init__(self, silent=None):
        self.silent, self.asked = silent, []

    def __call__(self, request):
        path = request.url.path
        self.asked.append((request.url.host, path))
        assert (request.extensions["timeout"]["read"] is not None) == (path in PROBES)
        if path == self.silent:
            raise httpx.ReadTimeout("")
        if path != "/health" and request.headers.get("authorization") != KEY:
            return responds({"by": request.url.host}, 401, {"WWW-Authenticate": "Bearer"})
        return responds(INFO if path == "/server_info" else {"by": request.url.host})

    def joins(self):
        return self.asked.count(("prefill", "/server_info"))


@pytest.fixture
def client():
    opened = []

    def start(servers):
        config = RouteConfig(prefill=("http://prefill",), decode=("http://decode",))
        opened.append(TestClient(build_router(config, httpx.MockTransport(servers))))
        return opened[-1].__enter__()

    yield start
    for each in opened:
        each.__exit__(None, None, None)


def post(client, key=None):
    headers = {} if key is None else {"Authorization": key}
    return client.post("/v1/completions", json={"prompt": "x"}, headers=headers)


def test_a_client_s_key_opens_the_servers_and_a_refusal_comes_as_it_is(client):
    servers = Servers()
    router = client(servers)
    for key in (None, "Bearer wrong"):
        refused = post(router, key)
        assert (refused.status_code, refused.json()) == (401, {"by": "prefill"})
        assert refused.headers["www-authenticate"] == "Bearer"
    assert servers.joins() == 2, "a refusal is not kept"
    assert post(router, KEY).json() == {"by": "decode"}
    assert post(router, "Bearer wrong").status_code == 401
    assert post(router, KEY).status_code == 200
    assert servers.joins() == 3, "what a right key has brought stays"


def test_a_server_that_is_silent_has_an_error_of_its_own(client):
    silent = post(client(Servers("/server_info")), KEY)
    error = silent.json()["error"]
    assert (silent.status_code, error["code"]) == (502, "prefill_unreachable")
    assert "http://prefill" in error["message"]
    assert "ReadTimeout" in error["message"], "an exception without words has its name"
    assert client(Servers()).get("/health").status_code == 200
    health = client(Servers("/health")).get("/health")
    why = "http://prefill is not ready: ReadTimeout('')"
    assert (health.status_code, health.json()) == (503, {"status": why})
    models = client(Servers("/v1/models")).get("/v1/models", headers={"Authorization": KEY})
    error = models.json()["error"]
    assert (models.status_code, error["code"]) == (502, "decode_unreachable")
    assert "http://decode cannot be reached: ReadTimeout" in error["message"]


# -- servers that fail ---------------------------------------------------------------------------

COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
LOST = {"error": {"code": "request_failed_transfer", "message": "lost"}}


class Fleet:
    """Two servers of each role; ``does``: what one does first, if anything. Those that decode
    answer where the prefill server is p-2."""

    def __init__(self, **does):
        self.does = does
        self.asked, self.prefilled, self.cancelled = Counter(), [], 0
        self.enough = {}

    async def __call__(self, request):
        host, path = request.url.host, request.url.path
        self.asked[host, path] += 1
        if path == COMPLETIONS and host[0] == "p":
            self.prefilled.append(host)
        if host in self.does and (found := await self.does[host](self, request, path)) is not None:
            return found
        if path == "/server_info":
            join = {"advertise_host": host, "bootstrap_port": int(host[-1])}
            return responds({"server": join})
        if path == COMPLETIONS and host[0] == "d" and names(request) != 2:
            await self.hang()
        return responds({"by": host})

    async def hang(self):
        try:
            await asyncio.wait_for(asyncio.Event().wait(), PATIENCE_S)
        finally:
            self.cancelled += 1


def names(request):
    """The number of the prefill server that a request names."""
    return json.loads(request.content)["bootstrap_port"]


async def gone(_fleet, _request, _path):
    raise httpx.ConnectError("nobody listens")


async def is_silent(_fleet, _request, _path):
    """A host that is off, or too busy to take a connection."""
    raise httpx.ConnectTimeout("")


async def dies(_fleet, _request, path):
    if path in (COMPLETIONS, MODELS):
        raise httpx.ReadError("")


async def hangs(fleet, _request, path):
    """It takes requests and answers none."""
    if path in (COMPLETIONS, MODELS):
        await fleet.hang()
    if path == "/health":
        raise httpx.ReadTimeout("")


async def waits(fleet, _request, path):
    """It is alive, and has no tokens."""
    if path == COMPLETIONS:
        await fleet.hang()


async def busy(_fleet, _request, path):
    return responds({"busy": 1}, 503, {"Retry-After": "1"}) if path == COMPLETIONS else None


async def is_slow(fleet, request, path):
    """Its tokens take long, and it is alive."""
    enough = fleet.enough.setdefault(request.url.host, asyncio.Event())
    if path == COMPLETIONS:
        await asyncio.wait_for(enough.wait(), PATIENCE_S)
    elif fleet.asked[request.url.host, "/health"] == 3:
        enough.set()


@pytest.fixture
def opened():
    clients = []

    def start(fleet, **more):
        urls = [tuple(f"http://{role}{n}" for n in (1, 2)) for role in "pd"]
        config = RouteConfig(prefill=urls[0], decode=urls[1])
        app = build_router(config, httpx.MockTransport(fleet), silence_s=0.001, **more)
        clients.append(TestClient(app))
        return clients[-1].__enter__()

    yield start
    for each in clients:
        each.__exit__(None, None, None)


FAILS = pytest.mark.parametrize("fails", [gone, dies, hangs, busy])


@FAILS
def test_where_a_prefill_server_fails_the_next_one_is_asked(opened, fails):
    """Nobody waits any more for the first one, nor for who was to decode what that computed."""
    fleet = Fleet(p1=fails)
    answer = post(opened(fleet))
    assert (answer.status_code, answer.json()["by"][0]) == (200, "d")
    assert fleet.prefilled == (["p2"] if fails is gone else ["p1", "p2"])
    assert fleet.cancelled == {gone: 0, hangs: 2}.get(fails, 1)


@FAILS
def test_where_all_prefill_servers_fail_the_client_gets_the_last_reason(opened, fails):
    answer = post(opened(Fleet(p1=fails, p2=fails, d1=waits, d2=waits)))
    if fails is busy:
        assert (answer.status_code, answer.json()) == (503, {"busy": 1})
        assert answer.headers["retry-after"] == "1"
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (502, "prefill_unreachable")
    reason = {gone: "nobody listens", dies: "ReadError('')", hangs: "ReadTimeout('')"}[fails]
    assert error["message"] == f"the prefill server http://p2 cannot be reached: {reason}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_what_was_lost_before_a_token_is_tried_with_the_next_prefill_server(opened, stream, again):
    """Its transport has noticed before the router has."""

    async def loses(_fleet, request, path):
        if path != COMPLETIONS or (names(request) == 2 and not again):
            return None
        if not stream:
            return responds(LOST, 500)
        events = f"data: {json.dumps(LOST)}\n\ndata: [DONE]\n\n".encode()
        head = {"Content-Type": "text/event-stream"}
        return httpx.Response(200, headers=head, stream=httpx.ByteStream(events))

    fleet = Fleet(p1=waits, p2=waits, d1=loses, d2=loses)
    answer = post(opened(fleet))
    assert fleet.prefilled == ["p1", "p2"]
    assert fleet.cancelled >= 1
    if again:
        assert (answer.status_code, answer.json()) == (500, LOST)
    else:
        assert (answer.status_code, answer.json()["by"][0]) == (200, "d")


def test_what_a_server_refuses_no_other_is_asked(opened):
    async def refuses(_fleet, _request, path):
        return responds(LOST | {"is": "wrong"}, 400) if path == COMPLETIONS else None

    fleet = Fleet(p1=refuses)
    assert post(opened(fleet)).status_code == 400
    assert fleet.prefilled == ["p1"]


def test_a_server_that_is_slow_is_waited_for_and_one_that_hangs_is_not(opened):
    fleet = Fleet(p1=gone, p2=is_slow, d1=is_slow, d2=is_slow)
    assert post(opened(fleet)).status_code == 200
    fleet = Fleet(p1=gone, d1=hangs, d2=hangs)
    error = post(opened(fleet)).json()["error"]
    assert error["code"] == "decode_unreachable"
    asked = sum(fleet.asked[name, COMPLETIONS] for name in ("d1", "d2"))
    assert asked == 1, "the room may be the first one's"
    assert "cannot be reached: ReadTimeout" in error["message"]


def test_one_that_decodes_and_hangs_in_the_middle_ends_its_stream(opened):
    class Parts(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield b'data: {"choices": []}\n\n'
            await asyncio.wait_for(asyncio.Event().wait(), PATIENCE_S)

    async def stops(_fleet, _request, path):
        if path == "/health":
            raise httpx.ReadTimeout("")
        head = {"Content-Type": "text/event-stream"}
        return httpx.Response(200, headers=head, stream=Parts())

    answer = post(opened(Fleet(p1=gone, d1=stops, d2=stops)))
    first, error, done = answer.text.split("\n\n")[:3]
    assert (answer.status_code, first, done) == (200, 'data: {"choices": []}', "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "decode_unreachable"


def test_one_that_has_failed_is_asked_last_for_a_while(opened):
    clock, fleet = ManualClock(), Fleet(p1=gone)
    router = opened(fleet, clock=clock)
    for _ in range(4):
        assert post(router).status_code == 200
    assert fleet.asked["p1", COMPLETIONS] == 0
    assert fleet.asked["p1", "/server_info"] == 1
    clock.advance(REST_S)
    for _ in range(2):
        assert post(router).status_code == 200
    assert fleet.asked["p1", "/server_info"] == 2, "it may be there again"


async def loses_p1(_fleet, request, path):
    """Decode, which has lost one prefill server."""
    return responds(LOST, 500) if path == COMPLETIONS and names(request) != 2 else None


@pytest.mark.parametrize(
    "does", [{"p1": busy}, {"p1": waits, "d1": loses_p1, "d2": loses_p1}], ids=["5xx", "lost"]
)
def test_so_is_one_that_answers_with_a_5xx_or_that_decode_has_lost(opened, does):
    clock, fleet = ManualClock(), Fleet(**does)
    router = opened(fleet, clock=clock)
    for _ in range(4):
        assert post(router).status_code == 200
    assert fleet.prefilled == ["p1", "p2", "p2", "p2", "p2"]
    clock.advance(REST_S)
    for _ in range(2):
        assert post(router).status_code == 200
    assert fleet.prefilled.count("p1") == 2


def test_a_prefill_server_that_is_back_at_another_port_is_asked_where_it_is_joined(opened):
    """Nothing was under way when it restarted, so only decode finds out."""
    port = 2

    async def moves(_fleet, _request, path):
        if path == "/server_info":
            return responds({"server": {"advertise_host": "p", "bootstrap_port": port}})
        return None

    async def joins(_fleet, request, path):
        if path != COMPLETIONS:
            return None
        return responds({"by": "d"}) if names(request) == port else responds(LOST, 500)

    router = opened(Fleet(p1=moves, p2=moves, d1=joins, d2=joins))
    found = [post(router).status_code for _ in range(2)]
    port = 9
    assert [*found, *(post(router).status_code for _ in range(3))] == [200, 200, 500, 200, 200]


def test_an_error_has_what_a_prefill_server_answers_to_who_asks_where_it_is_joined(opened):
    async def away(_fleet, _request, path):
        return responds({"why": "maintenance"}, 503) if path == "/server_info" else None

    answer = post(opened(Fleet(p1=away, p2=away)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "no_prefill")
    expected = 'http://p2/server_info answers 503: {"why": "maintenance"}'
    assert answer.json()["error"]["message"] == expected


@pytest.mark.parametrize("fails", [gone, is_silent])
def test_where_nobody_takes_the_connection_another_one_decodes(opened, fails):
    """Nothing was asked of it, so nothing can be done twice."""
    router = opened(Fleet(p1=gone, d1=fails))
    for _ in range(3):
        answer = post(router)
        assert (answer.status_code, answer.json()["by"]) == (200, "d2")


def test_a_client_s_own_hand_off_is_refused_by_its_name(opened):
    fleet = Fleet()
    body = {"prompt": "x", "kv_transfer_params": {"do_remote_decode": True}}
    answer = opened(fleet).post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")
    assert "stratakv route" in answer.json()["error"]["message"]
    assert not fleet.asked


def test_the_next_server_is_asked_for_its_models_where_one_cannot_be_reached(opened):
    for fails in (gone, dies, hangs):
        router = opened(Fleet(d1=fails))
        assert [router.get("/v1/models").json() for _ in range(3)] == [{"by": "d2"}] * 3
