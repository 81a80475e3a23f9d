"""What a client reads of a prefill server that cannot be joined, and who waits for whom."""

import json
import socket
from contextlib import ExitStack, suppress
from threading import Event, Thread
from threading import enumerate as enumerate_threads

import pytest

from stratakv.disagg.http_join import CallLimits, HttpCarry
from stratakv.disagg.joining import JoinRefused, decode_call
from stratakv.disagg.peer_limits import MOST_PEERS, REASON_CHARS
from stratakv.disagg.resolver import Resolver
from stratakv.disagg.transport import PeerId
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.join_hosts import MARK, answer_of, listens, refuses

DEADLINE = 0.3


def test_an_error_without_words_has_its_name(monkeypatch):
    def silent(*_args, **_more):
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    carry = HttpCarry(PeerId("decode"), None)
    answer = carry(PeerId("127.0.0.1:1"), ()).result(PATIENCE_S)
    reason = "the prefill server 127.0.0.1:1 cannot be reached: TimeoutError()"
    assert answer == JoinRefused(reason)


@pytest.mark.parametrize("name", ["a b:80", "a:b", "a\n:80", "[::1:80", "\u00e9" * 80 + ":80"])
def test_a_name_that_no_host_has_is_an_answer_too(name):
    """Whoever asks takes the answer in a step of its engine: nothing may be raised there."""
    carry = HttpCarry(PeerId("decode"), None)
    answer = carry(PeerId(name), ()).result(PATIENCE_S)
    assert isinstance(answer, JoinRefused)


def refusal_of(undo, raw):
    """The refusal of whoever names a server that answers with these bytes."""
    found, peer = listens(undo)

    def serve():
        with suppress(OSError), found.accept()[0] as caller:
            came = b""
            while b"}" not in came:
                came += caller.recv(1 << 16)
            caller.sendall(raw)

    Thread(target=serve, daemon=True).start()
    carry = HttpCarry(PeerId("decode"), None)
    answer = carry(peer, ()).result(PATIENCE_S)
    assert isinstance(answer, JoinRefused)
    return answer.reason.replace(peer, "PEER")


OURS = {"message": "no such key", "type": "invalid_request_error", "param": None, "code": "x"}
SECRET = b"s3cret"


@pytest.mark.parametrize(
    "body",
    [
        b"<html>s3cret</html>",
        b'"s3cret"',
        b'{"s3cret": 1}',
        b'{"error": "s3cret"}',
        b'{"error": {"message": "s3cret"}}',
        b'{"error": {"message": "s3cret", "type": "t", "param": null, "code": null}}',
        b'{"refused": "s3cret"}',
        b'{"again": "s3cret"}',
        b'{"introductions": ["s3cret"]}',
        b'{"introductions": "s3cret"}',
        b'{"introductions": {"s3cret": 1}}',
        b"\xff s3cret",
        b"[" * 100_000 + b"s3cret",
    ],
    ids=range(13),
)
@pytest.mark.parametrize("status", [200, 201, 302, 404, 500])
def test_a_client_reads_nothing_of_what_some_other_service_says(status, body, caplog):
    """It names the host, which it may not reach itself."""
    caplog.set_level("INFO")
    with ExitStack() as undo:
        reason = refusal_of(undo, answer_of(status, body))
    ours = "what no server of ours does" if status == 200 else str(status)
    assert reason == f"the prefill server PEER answers {ours}"
    assert caplog.records, "an operator does"


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-s3cret\r\n",
        b"HTTP/s3cret 200 OK\r\n\r\n",
        b"HTTP/1.1 s3cret OK\r\n\r\n",
        b"HTTP/1.1 404 s3cret\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 404 X\r\nTransfer-Encoding: chunked\r\n\r\ns3cret\r\n",
        b"HTTP/1.1 404 X\r\nContent-Length: 99\r\n\r\ns3cret",
        b"HTTP/1.1 404 X\r\nContent-Length: s3cret\r\n\r\n",
        b"HTTP/1.1 404 X\r\nContent-Length: -1\r\n\r\ns3cret",
        b"HTTP/1.1 404 X\r\n" + b"s3cret: s3cret\r\n" * 200 + b"\r\n",
        b"",
    ],
    ids=range(10),
)
def test_nor_what_is_no_http(raw):
    with ExitStack() as undo:
        assert SECRET.decode() not in refusal_of(undo, raw)


def test_a_client_reads_an_error_of_a_server_of_ours():
    with ExitStack() as undo:
        body = json.dumps({"error": OURS}).encode()
        reason = refusal_of(undo, answer_of(401, body, MARK))
        assert reason == "the prefill server PEER answers 401: no such key"
        long = json.dumps({"error": OURS | {"message": "x" * 5000, "param": "y"}}).encode()
        assert refusal_of(undo, answer_of(400, long, MARK)) == (
            f"the prefill server PEER answers 400: {'x' * REASON_CHARS}"
        )
        refusal = json.dumps({"refused": "x" * 5000}).encode()
        assert refusal_of(undo, answer_of(200, refusal, MARK)) == "x" * REASON_CHARS
        for body in (b"[" * 100_000, b"[]", b'{"error": 1}', b"<html>"):
            reason = refusal_of(undo, answer_of(500, body, MARK))
            assert reason == "the prefill server PEER answers 500"
            reason = refusal_of(undo, answer_of(200, body, MARK))
            assert reason == "the prefill server PEER answers what no server of ours does"


# -- names ---------------------------------------------------------------------------------------


@pytest.fixture
def names(monkeypatch):
    """Name servers that do not answer before a test lets them; addresses need none."""
    usual, may = socket.getaddrinfo, Event()

    def looked_up(host, port, *args, **more):
        if host.isalpha() and not more.get("flags"):
            assert may.wait(PATIENCE_S)
            host = "127.0.0.1"
        return usual(host, port, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    yield may
    may.set()
    wait_until(lambda: not resolving(), "the end of their threads")


def resolving():
    return sum(thread.name == "stratakv-resolve" for thread in enumerate_threads())


def test_the_deadline_holds_while_a_name_is_looked_up_and_one_name_has_one_thread(names):
    limits = CallLimits(deadline_s=DEADLINE)
    with ExitStack() as undo:
        carry = HttpCarry(PeerId("decode"), None, limits)
        for port in range(1, 6):
            answer = carry(PeerId(f"prefill:{port}"), ()).result(PATIENCE_S)
            assert "it has not answered within 0.3 s" in answer.reason
        assert resolving() == 1
        carry = HttpCarry(PeerId("decode"), None)
        assert carry(refuses(undo), ()).result(PATIENCE_S) == JoinRefused("no"), "an address"
        port = refuses(undo).rpartition(":")[2]
        waits = carry(PeerId(f"prefill:{port}"), ())
        names.set()
        assert waits.result(PATIENCE_S) == JoinRefused("no")


def test_so_many_names_are_looked_up_at_a_time(names):
    resolver = Resolver(2)
    assert resolver.addresses("a", 0.0) is None
    assert resolver.addresses("b", 0.0) is None
    with pytest.raises(OSError, match="2 hosts are being looked up already"):
        resolver.addresses("c", 0.0)
    assert resolver.addresses("a", 0.0) is None
    assert resolver.addresses("::1", 0.0) == ["::1"]
    assert resolving() == 2
    names.set()
    wait_until(lambda: not resolving(), "an answer")
    assert resolver.addresses("c", PATIENCE_S) == ["127.0.0.1"]


def test_a_server_of_two_addresses_knows_us_by_two_names():
    """Else the second joining would end the link of the first, and the other way round."""
    asked = []
    with ExitStack() as undo:
        carry = HttpCarry(PeerId("decode"), None)
        for _ in range(2):
            port = refuses(undo, asked=asked).rpartition(":")[2]
            for host in ("127.0.0.1", "localhost", "127.0.0.1"):
                assert carry(PeerId(f"{host}:{port}"), ()).result(PATIENCE_S) == JoinRefused("no")
    names = [decode_call(one.partition(b"\r\n\r\n")[2])[0] for one in asked]
    assert names[0] == names[2] != names[1]
    assert names[3] == names[5] != names[4]
    assert len(set(names)) == 4
    assert all(name.startswith("decode by ") for name in names)


def test_hosts_that_never_answer_hold_up_nobody_else():
    with ExitStack() as undo:
        carry = HttpCarry(PeerId("decode"), None)
        stuck = [carry(listens(undo)[1], ()) for _ in range(8)]
        assert carry(refuses(undo), ()).result(PATIENCE_S) == JoinRefused("no")
        assert not any(each.done() for each in stuck)


def test_as_many_hosts_as_may_be_joined_are_called_at_once():
    """A client can name dead ones; a new server is not behind them."""
    with ExitStack() as undo:
        carry = HttpCarry(PeerId("decode"), None)
        _, silent = listens(undo)
        stuck = [carry(silent, ()) for _ in range(MOST_PEERS - 1)]
        assert carry(refuses(undo), ()).result(PATIENCE_S) == JoinRefused("no")
        assert not any(each.done() for each in stuck)


def test_hosts_that_have_answered_and_hang_now_hold_up_nobody_else():
    with ExitStack() as undo:
        carry = HttpCarry(PeerId("decode"), None)
        good = refuses(undo)
        once = [refuses(undo, answers=1) for _ in range(9)]
        for peer in (good, *once):
            assert carry(peer, ()).result(PATIENCE_S) == JoinRefused("no")
        stuck = [carry(peer, ()) for peer in once]
        assert carry(good, ()).result(PATIENCE_S) == JoinRefused("no")
        assert not any(each.done() for each in stuck)


def test_an_answer_has_the_whole_call_s_time_and_not_that_of_connecting():
    limits = CallLimits(deadline_s=PATIENCE_S, connect_s=DEADLINE)
    with ExitStack() as undo:
        carry = HttpCarry(PeerId("decode"), None, limits)
        slow = refuses(undo, after_s=2 * DEADLINE)
        assert carry(slow, ()).result(PATIENCE_S) == JoinRefused("no")


def test_one_deadline_holds_for_a_whole_call_however_its_answer_trickles():
    limits, over = CallLimits(deadline_s=DEADLINE), Event()
    with ExitStack() as undo:
        undo.callback(over.set)
        found, peer = listens(undo)

        def trickle():
            with found.accept()[0] as caller, suppress(OSError):
                caller.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while not over.wait(DEADLINE / 10):
                    caller.sendall(b"x")

        Thread(target=trickle, daemon=True).start()
        carry = HttpCarry(PeerId("decode"), None, limits)
        answer = carry(peer, ()).result(PATIENCE_S)
    late = f"the prefill server {peer} cannot be reached: it has not answered within {DEADLINE:g} s"
    assert answer == JoinRefused(late)
