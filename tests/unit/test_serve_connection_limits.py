"""Which connection has to go, and what a process's open files leave room for."""

import asyncio
import logging
import resource

import pytest

from stratakv.core.config import ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.disagg.peer_limits import MOST_PEERS
from stratakv.serve import connection_limits as crowds
from stratakv.serve.connection_limits import (
    LIMITS,
    SPARE,
    ConnectionLimits,
    Crowd,
    connection_limits,
)
from stratakv.serve.connections import ClientConnection, _Phase
from stratakv.serve.log_throttle import PERIOD_S, Seldom
from stratakv.serve.server import Server
from stratakv.serve.tokenizer import Tokenizer
from tests.serving import EchoEngine, make_service, train_tokenizer


class One:
    left = False

    def leave(self):
        self.left = True


def enter(crowd, count):
    found = [One() for _ in range(count)]
    assert all(crowd.enter(one) for one in found)
    return found


def test_who_was_idle_for_longest_makes_room():
    crowd = Crowd(ConnectionLimits(most=3))
    first, second, third = enter(crowd, 3)
    crowd.busy(first)
    crowd.idle(first)  # since now
    enter(crowd, 1)
    assert [one.left for one in (first, second, third)] == [False, True, False]
    assert not crowd.crowded


def test_nobody_leaves_whose_answer_is_being_made_and_spare_places_are_bounded():
    crowd = Crowd(ConnectionLimits(most=2))
    busy = enter(crowd, 2)
    for one in busy:
        crowd.busy(one)
    spare = []
    for _ in range(SPARE):
        spare += enter(crowd, 1)
        assert crowd.crowded
        crowd.busy(spare[-1])
    assert not crowd.enter(One())
    crowd.exit(spare[0])
    assert crowd.enter(One())
    assert not any(one.left for one in (*busy, *spare))


def test_who_has_left_is_not_idle_again():
    crowd = Crowd(ConnectionLimits(most=1))
    (gone,) = enter(crowd, 1)
    crowd.exit(gone)
    crowd.idle(gone)
    enter(crowd, 2)
    assert not gone.left


def test_no_more_connections_than_open_files_leave_room_for(monkeypatch):
    monkeypatch.setattr(crowds, "raise_file_limit", lambda: 1024)
    limits = connection_limits(ServerConfig(timeout_keep_alive=3, timeout_request=2))
    assert 0 < limits.most < 1024 - crowds.RESERVED_FILES
    assert (limits.keep_alive_s, limits.request_s) == (3, 2)
    assert connection_limits(ServerConfig(limit_concurrency=100)).most == 100
    with pytest.raises(ConfigError, match=r"--limit-concurrency 1000: .* 1024 files"):
        connection_limits(ServerConfig(limit_concurrency=1000))
    monkeypatch.setattr(crowds, "raise_file_limit", lambda: 200)
    with pytest.raises(ConfigError, match="--limit-concurrency: "):
        connection_limits(ServerConfig())
    monkeypatch.setattr(crowds, "raise_file_limit", lambda: 1 << 16)
    assert connection_limits(ServerConfig()).most == crowds.MOST_CONNECTIONS


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_links_to_other_servers_have_open_files_of_their_own(monkeypatch, role):
    monkeypatch.setattr(crowds, "raise_file_limit", lambda: 8192)
    alone = connection_limits(ServerConfig()).most
    joined = connection_limits(ServerConfig(role=role)).most
    assert alone - joined == 8192 // 4, "where that is less than all peers may take"
    monkeypatch.setattr(crowds, "MOST_CONNECTIONS", 1 << 20)
    monkeypatch.setattr(crowds, "raise_file_limit", lambda: 1 << 16)
    alone = connection_limits(ServerConfig()).most
    joined = connection_limits(ServerConfig(role=role)).most
    assert alone - joined == MOST_PEERS * crowds.PEER_FILES


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (1024, 4096, 4096),
        (1024, resource.RLIM_INFINITY, crowds.MOST_FILES),
        (1024, 1 << 30, crowds.MOST_FILES),
        (1 << 20, 1 << 20, 1 << 20),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, crowds.MOST_FILES),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_the_hard_one_and_never_lowered(
    monkeypatch, soft, hard, then
):
    calls = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: calls.append(limits))
    assert crowds.raise_file_limit() == then
    assert calls == ([(then, hard)] if soft < then and soft != resource.RLIM_INFINITY else [])


# -- who does not read -----------------------------------------------------------------------------


class Transport(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.aborted = asyncio.Event()
        self.wrote = asyncio.Event()

    def is_closing(self):
        return self.aborted.is_set()

    def write(self, data):
        self.wrote.set()

    def resume_reading(self):
        pass

    def abort(self):
        self.aborted.set()


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    tokenizer = Tokenizer(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    return make_service(tokenizer, EchoEngine())


def connected(service, limits):
    server = Server(service, drain_s=0, limits=limits)
    server.config.load()
    found = ClientConnection(
        Crowd(limits), config=server.config, server_state=server.server_state, app_state={}
    )
    transport = Transport()
    found.connection_made(transport)
    return found, transport


def test_an_answer_that_nobody_reads_is_not_kept_for_ever(service):
    async def stalled(limits, *, read):
        connection, transport = connected(service, limits)
        connection.pause_writing()
        if read:
            connection.resume_writing()
            assert connection._stall is None
        else:
            await transport.aborted.wait()
        connection.connection_lost(OSError())

    asyncio.run(stalled(ConnectionLimits(keep_alive_s=0.01, request_s=0.01), read=False))
    asyncio.run(stalled(LIMITS, read=True))


def test_a_body_that_ends_after_its_answer_ends_the_request(service):
    """The connection's clock is then that of an idle one, not of a request that still comes."""

    async def early():
        connection, transport = connected(service, LIMITS)
        connection.data_received(b"POST /nothing HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{")
        while not connection.cycle.response_complete:
            await transport.wrote.wait()
            transport.wrote.clear()
        assert connection._phase is _Phase.COMING
        connection.data_received(b"}")
        assert connection._phase is _Phase.WAITING
        assert connection._end.when() > connection.loop.time() + LIMITS.request_s
        connection.connection_lost(OSError())

    asyncio.run(early())


# -- the log ---------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.at_s = 0.0

    def now_s(self):
        return self.at_s


def test_what_is_logged_again_and_again_is_logged_seldom_and_counted(caplog):
    caplog.set_level(logging.INFO)
    clock, logger = Clock(), logging.getLogger("stratakv.test")
    seldom = Seldom(clock)
    logger.addFilter(seldom)
    try:
        for _ in range(1000):
            logger.warning("%s clients", 3)
        logger.info("fine")
        logger.info("fine")
        logger.warning("something else")
        clock.at_s = PERIOD_S
        logger.warning("%s clients", 4)
        logger.warning("%s clients", 5)
    finally:
        logger.removeFilter(seldom)
    assert caplog.messages == [
        "3 clients", "fine", "fine", "something else",
        "4 clients (and 999 times more since it was last logged)",
    ]  # fmt: skip


def test_another_error_is_another_line(caplog):
    logger = logging.getLogger("stratakv.test")
    seldom = Seldom(Clock())
    logger.addFilter(seldom)
    try:
        for error in (ValueError(1), ValueError(2), OSError(3)):
            logger.error("failed", exc_info=error)
    finally:
        logger.removeFilter(seldom)
    assert [record.exc_info[0] for record in caplog.records] == [ValueError, OSError]
