"""The access log: a line a request, with its id, its client and what became of it."""

import asyncio
import logging

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from stratakv.core.clock import MonotonicClock
from stratakv.core.logs import DETAILS, REQUEST
from stratakv.serve.middleware import ANSWER_ID, BearerKeys, RequestIds

log = logging.getLogger("stratakv.serve.sample")


class Lines(logging.Handler):
    """Keeps what was logged, with the request of its moment."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.kept = []

    def emit(self, record):
        self.kept.append((record.name, record.levelno, REQUEST.get(), vars(record).get(DETAILS)))


@pytest.fixture
def lines():
    logger, handler = logging.getLogger("stratakv"), Lines()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler.kept
    logger.removeHandler(handler)
    logger.setLevel(before)


def asked(*calls):
    """Answers to calls (path, headers) that are made at once."""
    together = asyncio.Barrier(len(calls))

    async def work(request):
        await together.wait()
        request.scope[ANSWER_ID] = f"cmpl-{request.headers['x-request-id']}"
        log.info("working")
        return PlainTextResponse("done")

    async def health(_request):
        return PlainTextResponse("ready")

    async def run():
        app = Starlette(routes=[Route("/work", work), Route("/health", health)])
        guarded = BearerKeys(app, {"alice": "k1", "bob": "k2"}, None)
        counted = RequestIds(guarded, ["/work"], lambda *_: None, MonotonicClock())
        transport = httpx.ASGITransport(counted)
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as http:
            return await asyncio.gather(*(http.get(path, headers=more) for path, more in calls))

    return asyncio.run(run())


def test_each_line_of_a_request_has_its_id_and_the_last_what_became_of_it(lines):
    calls = [
        ("/work", {"x-request-id": f"r-{name}", "authorization": f"Bearer {key}"})
        for name, key in (("a", "k1"), ("b", "k2"))
    ]
    assert [answer.text for answer in asked(*calls)] == ["done", "done"]
    working = [line for line in lines if line[0] == "stratakv.serve.sample"]
    assert {line[2] for line in working} == {"r-a", "r-b"}
    access = {line[2]: line for line in lines if line[0] == "stratakv.access"}
    assert access.keys() == {"r-a", "r-b"}
    for name, client in (("r-a", "alice"), ("r-b", "bob")):
        _, level, _, details = access[name]
        assert level == logging.INFO
        assert details.pop("seconds") >= 0
        assert details == {
            "method": "GET", "path": "/work", "status": 200, "address": "127.0.0.1",
            "client": client, "id": f"cmpl-{name}",
        }  # fmt: skip
    assert REQUEST.get() == ""


def test_a_probe_is_logged_for_a_closer_look_alone(lines):
    asked(("/health", {}))
    assert [(name, level) for name, level, *_ in lines] == [("stratakv.access", logging.DEBUG)]


def test_a_refusal_is_logged_and_a_path_breaks_no_line(lines):
    asked(("/a%0Ab", {}))
    ((_, level, _, details),) = lines
    assert (level, details["status"], details["path"]) == (logging.INFO, 401, "/a%0Ab")
