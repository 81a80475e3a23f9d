"""The HTTP face of storage administration: ``/cache/storage``.

Owns its routes, their parameters and the shape of its answers. Must not block the event loop: what
does, goes to a thread, and goes on to its end there even if the client leaves.
"""

import asyncio
import math
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stratakv.serve import bodies, fields
from stratakv.serve.errors import ApiError, invalid
from stratakv.serve.service import Service

WAIT_S: Final = 30.0
MOST_WAIT_S: Final = 3600.0
MAX_URL_CHARS: Final = 4096
MOST_BODY_BYTES: Final = 1 << 15
YES_NO: Final = {"true": True, "1": True, "false": False, "0": False}


class AdminApi:
    def __init__(self, service: Service) -> None:
        self._admin = service.storage
        self._most_bytes = min(service.limits.body_bytes, MOST_BODY_BYTES)

    def routes(self) -> list[Route]:
        return [
            Route("/cache/storage", self.storage, methods=["GET", "PUT", "DELETE"]),
            Route("/cache/storage/clear", self.clear, methods=["POST"]),
        ]

    async def storage(self, request: Request) -> Response:
        match request.method:
            case "PUT":
                return await self._attach(request)
            case "DELETE":
                return await self._detach(request)
            case _:
                return JSONResponse(await asyncio.to_thread(self._admin.inspect))

    async def clear(self, _request: Request) -> Response:
        """202: it is queued behind what is queued."""
        shown = await asyncio.to_thread(self._admin.clear)
        return JSONResponse({"clearing": True, "url": shown}, 202)

    async def _attach(self, request: Request) -> Response:
        data = await bodies.json_object(request, self._most_bytes)
        for name in data.keys() - {"url"}:
            message = f"unrecognized request argument: '{name}'"
            raise ApiError(message, param=name, code="unknown_parameter")
        url = fields.text(data, "url", None, max_chars=MAX_URL_CHARS)
        if url is None:
            raise ApiError("'url' is required", param="url", code="missing_required_parameter")
        shown = await asyncio.to_thread(self._admin.attach, url)
        return JSONResponse({"attached": True, "url": shown})

    async def _detach(self, request: Request) -> Response:
        found = dict(request.query_params)
        for name in found.keys() - {"wait_s", "force"}:
            message = f"unrecognized query parameter: '{name}'"
            raise ApiError(message, param=name, code="unknown_parameter")
        wait_s = _seconds("wait_s", found.get("wait_s"))
        force = YES_NO.get(found.get("force", "false").lower())
        if force is None:
            raise invalid("force", "invalid 'force': expected true or false")
        done = await asyncio.to_thread(self._admin.detach, wait_s, force=force)
        return JSONResponse({
            "attached": False, "url": done.shown, "dropped_pages": done.dropped_pages,
        })  # fmt: skip


def _seconds(name: str, text: str | None) -> float:
    try:
        seconds = WAIT_S if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MOST_WAIT_S:
        raise invalid(name, f"invalid '{name}': expected 0 to {MOST_WAIT_S:g} seconds")
    return seconds
