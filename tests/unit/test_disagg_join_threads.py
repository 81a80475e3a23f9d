"""Calls of prefill servers run on threads: how many, and whom their lack or their wait hurts."""

import socket
import subprocess
import sys
from contextlib import ExitStack
from threading import Thread

import pytest

from stratakv.disagg.http_join import CallLimits, HttpCarry
from stratakv.disagg.joining import JoinRefused
from stratakv.disagg.transport import PeerId
from stratakv.testing.patience import PATIENCE_S
from tests.join_hosts import listens, refuses


@pytest.fixture
def none_left(monkeypatch):
    """Names of threads that the system has none left for."""
    start, names = Thread.start, []

    def started(thread):
        if any(name in (thread.name, type(thread).__name__) for name in names):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Thread, "start", started)
    return names


@pytest.mark.parametrize("lacking", ["stratakv-join", "stratakv-resolve", "Timer"])
def test_where_the_system_has_no_thread_left_that_is_a_refusal_and_the_next_call_succeeds(
    none_left, lacking, monkeypatch
):
    """Whoever asks takes the answer in a step of its engine."""
    usual = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *args, **more: usual(
            "127.0.0.1" if not more.get("flags") else host, *args, **more
        ),
    )
    with ExitStack() as undo:
        peers = [PeerId(f"prefill:{refuses(undo).rpartition(':')[2]}") for _ in range(2)]
        carry = HttpCarry(PeerId("decode"), None, CallLimits(at_once=1))
        none_left.append(lacking)
        answer = carry(peers[0], ()).result(PATIENCE_S)
        assert isinstance(answer, JoinRefused)
        assert answer.reason.endswith(": can't start new thread")
        none_left.clear()
        assert carry(peers[1], ()).result(PATIENCE_S) == JoinRefused("no")


def test_who_fails_otherwise_is_a_refusal_too(monkeypatch, caplog):
    def broken(*_args, **_more):
        raise MemoryError

    monkeypatch.setattr(socket, "create_connection", broken)
    answer = HttpCarry(PeerId("decode"), None)(PeerId("127.0.0.1:1"), ()).result(PATIENCE_S)
    assert answer.reason.endswith("this server failed; its log has the details")
    assert "MemoryError" in caplog.text


def test_one_call_more_than_may_be_under_way_is_refused():
    with ExitStack() as undo:
        carry = HttpCarry(PeerId("decode"), None, CallLimits(at_once=2))
        stuck = [carry(listens(undo)[1], ()) for _ in range(2)]
        answer = carry(refuses(undo), ()).result(PATIENCE_S)
        assert answer.reason.endswith("cannot be asked: 2 others are being asked")
        assert not any(each.done() for each in stuck)


ASKS = """
import sys
from stratakv.disagg.http_join import CallLimits, HttpCarry
from stratakv.disagg.transport import PeerId
carry = HttpCarry(PeerId("decode"), None, CallLimits(deadline_s=float(sys.argv[2])))
carry(PeerId(sys.argv[1]), ())
sys.stdin.read()
"""


def test_the_end_of_a_process_waits_for_no_call():
    with ExitStack() as undo:
        found, peer = listens(undo)
        line = [sys.executable, "-c", ASKS, peer, str(4 * PATIENCE_S)]
        process = undo.enter_context(subprocess.Popen(line, stdin=subprocess.PIPE))
        undo.callback(process.kill)
        found.settimeout(PATIENCE_S)
        caller = undo.enter_context(found.accept()[0])
        assert caller.recv(1 << 16), "it waits for an answer now"
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
