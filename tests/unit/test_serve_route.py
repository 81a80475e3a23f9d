"""What a router asks its servers, and what its client gets where one refuses or is silent."""

import json

import httpx
import pytest
from starlette.testclient import TestClient

from stratakv.core.config import RouteConfig
from stratakv.serve.route import build_router

KEY = "Bearer right"
INFO = {"server": {"advertise_host": None, "bootstrap_port": 9}}
PROBES = ("/server_info", "/health")


def says(found, status=200, headers=None):
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
            return says({"by": request.url.host}, 401, {"WWW-Authenticate": "Bearer"})
        return says(INFO if path == "/server_info" else {"by": request.url.host})

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
    assert (health.status_code, health.json()) == (503, {"status": "http://prefill is not ready"})
