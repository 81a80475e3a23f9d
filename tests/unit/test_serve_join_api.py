"""What tells a server that decodes that an answer is one of a prefill server's."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from stratakv.disagg.http_join import JOIN_MARK, JOIN_PATH
from stratakv.serve.join_api import MarksJoins
from stratakv.serve.middleware import BearerKeys


async def joins(_request):
    return PlainTextResponse("joined")


@pytest.mark.parametrize(
    ("path", "key", "routes", "status", "marked"),
    [
        (JOIN_PATH, "k", [Route(JOIN_PATH, joins, methods=["POST"])], 200, True),
        (JOIN_PATH, "other", [], 401, True),
        (JOIN_PATH, "k", [], 404, True),
        ("/v1/models", "k", [], 404, False),
    ],
)
def test_all_that_is_answered_where_peers_join_has_the_mark(path, key, routes, status, marked):
    app = MarksJoins(BearerKeys(Starlette(routes=routes), {"all": "k"}, None))

    async def asked():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as http:
            return await http.post(path, headers={"Authorization": f"Bearer {key}"})

    answer = asyncio.run(asked())
    assert answer.status_code == status
    assert (JOIN_MARK in answer.headers) == marked
