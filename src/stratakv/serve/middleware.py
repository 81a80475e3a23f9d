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

from stratakv.serve.errors import ApiError, no_admin_key, wrong_key

REQUEST_ID: Final = "x-request-id"
PLAIN_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
OPEN_PATHS: Final = frozenset({"/health", "/metrics", "/version"})
"""What probes and scrapers read without a key."""
STORAGE_PATHS: Final = frozenset({"/cache/storage", "/cache/storage/clear"})
"""What needs the admin key, and is closed where there is none."""
ADMIN_PATHS: Final = frozenset({"/flush_cache"})
"""What needs the admin key where there is one."""


class RequestIds:
    """Gives every response an ``X-Request-Id``, the client's own where it is printable, and tells
    ``responded(path, status)``; ``paths`` bounds what can be counted."""

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


class BearerKeys:
    """Refuses requests without their path's key, except for probes: ``admin_key`` opens
    ``STORAGE_PATHS``, which nothing else does, and where there is one ``ADMIN_PATHS`` too;
    ``api_key`` opens the rest. None: anyone may ask, but for the storage."""

    def __init__(self, app: ASGIApp, api_key: str | None, admin_key: str | None) -> None:
        self._app = app
        self._api_key = api_key
        self._admin_key = admin_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            error = self._refusal(scope["path"], given)
            if error is not None:
                headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
                await JSONResponse(error.body, error.status, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, path: str, given: bytes) -> ApiError | None:
        if path in OPEN_PATHS:
            return None
        if path in STORAGE_PATHS and self._admin_key is None:
            return no_admin_key()
        if path in STORAGE_PATHS | ADMIN_PATHS and self._admin_key is not None:
            return None if _fits(given, self._admin_key) else wrong_key("admin")
        if self._api_key is None or _fits(given, self._api_key):
            return None
        return wrong_key("API")


def _fits(given: bytes, key: str) -> bool:
    return hmac.compare_digest(given, f"Bearer {key}".encode())
