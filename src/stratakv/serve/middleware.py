"""What every request passes. Owns its id, its count and the check of its key.

Plain ASGI: no stream is buffered.
"""

import hmac
import re
import uuid
from collections.abc import Callable, Iterable
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stratakv.serve.errors import ApiError

REQUEST_ID: Final = "x-request-id"
PLAIN_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
OPEN_PATHS: Final = frozenset({"/health", "/metrics", "/version"})
"""What probes and scrapers read without a key."""


class RequestIds:
    """Gives every response an ``X-Request-Id``, the client's own where it is printable, and tells
    ``responded(path, status)``; ``paths`` bounds what can be told."""

    def __init__(
        self, app: ASGIApp, paths: Iterable[str], responded: Callable[[str, int], None]
    ) -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._responded = responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        known = given if PLAIN_ID.fullmatch(given) else uuid.uuid4().hex
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (REQUEST_ID.encode(), known.encode())
                message = {**message, "headers": [*message["headers"], header]}
                self._responded(path, message["status"])
            await send(message)

        await self._app(scope, receive, sending)


class BearerKey:
    """Refuses requests without the key, except for probes."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._wanted):
                error = ApiError(
                    "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                    status=401,
                    kind="authentication_error",
                    code="invalid_api_key",
                )
                headers = {"WWW-Authenticate": "Bearer"}
                await JSONResponse(error.body, error.status, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)
