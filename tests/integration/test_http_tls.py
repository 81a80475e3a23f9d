"""TLS and CORS by flags, over real sockets, with clients that check what they are shown."""

import socket
import ssl

import httpx
import pytest

from stratakv.core.config import ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.serve.service import WebOptions
from stratakv.serve.tls import tls_files
from stratakv.serve.tokenizer import Tokenizer
from stratakv.testing.patience import PATIENCE_S
from tests.certificates import Authority
from tests.serving import EchoEngine, make_service, running, train_tokenizer

PAGE = "https://app.example"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def pair(authority):
    return authority.issue("server")


def serving(tokenizer, web, **options):
    engine = EchoEngine()
    return running(make_service(tokenizer, engine, web=web, **options), engine)


def encrypted(pair, clients=None):
    files = tls_files(
        ServerConfig(
            ssl_certfile=str(pair.certificate), ssl_keyfile=str(pair.key), ssl_ca_certs=clients
        )
    )
    return WebOptions(tls=files)


def client(authority, live, pair=None):
    trust = ssl.create_default_context(cafile=str(authority.certificate))
    if pair is not None:
        trust.load_cert_chain(pair.certificate, pair.key)
    url = live.url.replace("http://", "https://")
    return httpx.Client(base_url=url, verify=trust, timeout=PATIENCE_S)


def test_everything_is_answered_over_tls_and_nothing_without(tokenizer, authority, pair):
    with serving(tokenizer, encrypted(pair)) as live, client(authority, live) as http:
        # Somebody who opens a connection and says nothing holds up nobody.
        address = ("127.0.0.1", int(live.url.rpartition(":")[2]))
        with socket.create_connection(address):
            assert http.get("/health").json() == {"status": "ready"}
        assert "stratakv_http_responses_total" in http.get("/metrics").text
        body = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
        assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert list(answer.iter_lines())[-2] == "data: [DONE]"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{live.url}/health", timeout=PATIENCE_S)


def test_a_client_that_does_not_know_the_authority_leaves(tokenizer, pair, tmp_path):
    stranger = Authority(tmp_path, "stranger")
    unverified = pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED")
    with (
        serving(tokenizer, encrypted(pair)) as live,
        client(stranger, live) as http,
        unverified,
    ):
        http.get("/health")


def test_clients_need_a_certificate_where_they_are_asked_for_one(
    tokenizer, authority, pair, tmp_path
):
    theirs = authority.issue("client")
    others = Authority(tmp_path, "stranger").issue("client")
    web = encrypted(pair, str(authority.certificate))
    with serving(tokenizer, web) as live:
        with client(authority, live, theirs) as http:
            assert http.get("/health").status_code == 200
        for shown in (None, others):
            with client(authority, live, shown) as http, pytest.raises(httpx.TransportError):
                http.get("/health")


def test_files_that_are_none_are_refused_by_their_flag(authority, pair, tmp_path):
    other, locked = authority.issue("other"), authority.issue("locked", b"secret")
    empty = tmp_path / "empty.pem"
    empty.touch()
    for files, why in (
        ((tmp_path / "no.pem", pair.key, None), "--ssl-certfile .*no.pem .*No such file"),
        ((pair.certificate, other.key, None), "--ssl-keyfile .*other.key: key values mismatch"),
        ((locked.certificate, locked.key, None), "locked.key: .*; allowed .* no password"),
        ((empty, None, None), "--ssl-certfile .*empty.pem: "),
        ((pair.certificate, pair.key, empty), "--ssl-ca-certs .*empty.pem: .*; allowed is a PEM"),
    ):
        certificate, key, clients = (None if path is None else str(path) for path in files)
        server = ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=clients)
        with pytest.raises(ConfigError, match=why):
            tls_files(server)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"ssl_keyfile": "a"}, "--ssl-keyfile: allowed with --ssl-certfile"),
        ({"ssl_ca_certs": "a"}, "--ssl-ca-certs: allowed with --ssl-certfile"),
        ({"ssl_certfile": ""}, "--ssl-certfile '': allowed is a PEM file"),
        ({"ssl_certfile": "a", "role": "decode"}, "--ssl-certfile: peers .*; allowed is --role un"),
        ({"allowed_origins": ("app.example",)}, "--allowed-origins app.example: allowed are"),
        ({"allowed_origins": ("https://a/b",)}, "--allowed-origins https://a/b: allowed are"),
    ],
)
def test_settings_that_do_nothing_or_say_nothing_are_refused(settings, why):
    with pytest.raises(ConfigError, match=why):
        ServerConfig(**settings)


def test_a_page_of_an_allowed_origin_may_ask_also_before_it_shows_its_key(tokenizer):
    web = WebOptions(origins=(PAGE,))
    with (
        serving(tokenizer, web, api_key="secret") as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http,
    ):
        ask = {
            "Origin": PAGE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        first = http.options("/v1/chat/completions", headers=ask)
        assert first.status_code == 200
        assert first.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in first.headers["access-control-allow-headers"]
        for path, headers in (
            ("/v1/models", {"Authorization": "Bearer secret"}),
            ("/v1/models", {}),  # an error can be read too
            ("/metrics", {}),
        ):
            answer = http.get(path, headers={"Origin": PAGE, **headers})
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert answer.headers["access-control-expose-headers"] == "x-request-id"
        other = http.get("/health", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = http.options("/v1/models", headers={**ask, "Origin": "https://evil.example"})
        assert refused.status_code == 400


def test_no_page_may_ask_where_none_is_allowed(tokenizer):
    with serving(tokenizer, WebOptions()) as live:
        answer = httpx.get(f"{live.url}/health", headers={"Origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers
