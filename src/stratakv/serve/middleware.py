"""What every request passes. Owns its id, its count, its line of the access
log and the check of its key.

Plain ASGI: no stream is buffered.
"""

import hmac
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stratakv.core.clock import Clock
from stratakv.core.logs import DETAILS, REQUEST
from stratakv.serve.errors import ApiError, no_admin_key, wrong_key

access = logging.getLogger("stratakv.access")

REQUEST_ID: Final = "x-request-id"
CLIENT: Final = "stratakv.client"
"""Of a scope: the name of the key that a request has come with, None where it has none."""
ANSWER_ID: Final = "stratakv.answer"
"""Of a scope: the name under which the engine has a request, which its lines of the log have."""
PLAIN_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
OPEN_PATHS: Final = frozenset({
    "/", "/health", "/ping", "/metrics", "/version", "/docs", "/openapi.json",
})  # fmt: skip
"""What probes and scrapers read without a key, the dashboard of the same figures, and what
describes the API."""
STORAGE_PATHS: Final = frozenset({"/cache/storage", "/cache/storage/clear"})
"""What needs the admin key, and is closed where there is none."""
ADMIN_PATHS: Final = frozenset({"/flush_cache"})
"""What needs the admin key where there is one."""


MISS_PATHS: Final = frozenset({"/cache/why_miss"})
"""What shows something of other clients' requests: needs the admin key where there is any key."""


class RequestIds:
    """Gives every response an ``X-Request-Id``, the client's own where it is printable, and calls
    ``responded(path, status)``; ``paths`` bounds what can be counted. What is logged meanwhile has
    the id, and at its end a line of the access log."""

    def __init__(
        self,
        app: ASGIApp,
        paths: Iterable[str],
        responded: Callable[[str, int], None],
        clock: Clock,
    ) -> None:
        self._app = app
        self._clock = clock
        self._paths = frozenset(paths)
        self._responded = responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        known = given if PLAIN_ID.fullmatch(given) else uuid.uuid4().hex
        path = scope["path"] if scope["path"] in self._paths else "other"
        begun_s, statuses = self._clock.now_s(), list[int]()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (REQUEST_ID.encode(), known.encode())
                message = {**message, "headers": [*message["headers"], header]}
                self._responded(path, message["status"])
                statuses.append(message["status"])
            await send(message)

        entered = REQUEST.set(known)
        try:
            await self._app(scope, receive, sending)
        finally:
            _log_access(scope, statuses, self._clock.now_s() - begun_s)
            REQUEST.reset(entered)


def _log_access(scope: Scope, statuses: Sequence[int], took_s: float) -> None:
    """What probes and scrapers ask all day is for a closer look alone. A path is shown escaped: a
    client may have put a line break into it."""
    level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO
    if not access.isEnabledFor(level):
        return
    details = {
        "method": scope["method"],
        "path": quote(scope["path"]),
        "status": statuses[0] if statuses else None,
        "seconds": round(took_s, 4),
        "address": (scope.get("client") or ("", 0))[0],
        "client": scope.get(CLIENT),
        "id": scope.get(ANSWER_ID),
    }
    access.log(
        level,
        "%s",
        " ".join(f"{name}={value}" for name, value in details.items() if value is not None),
        extra={DETAILS: details},
    )


class BearerKeys:
    """Refuses requests without their path's key, except for probes: ``admin_key`` opens
    ``STORAGE_PATHS``, which nothing else does, and where there is one ``ADMIN_PATHS`` and
    ``MISS_PATHS`` too;
    any of ``api_keys`` (by the client's name) opens the rest. None: anyone may ask, but for the
    storage. Leaves the name in the scope, as ``CLIENT``."""

    def __init__(self, app: ASGIApp, api_keys: Mapping[str, str], admin_key: str | None) -> None:
        self._app = app
        self._api_keys = api_keys
        self._admin_key = admin_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            scope[CLIENT] = self._client(given)
            error = self._refusal(scope["path"], given, scope[CLIENT])
            if error is not None:
                headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
                await JSONResponse(error.body, error.status, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _client(self, given: bytes) -> str | None:
        """Whose key it is, looked at with all keys: how long it takes gives none away."""
        fitting = [name for name, key in self._api_keys.items() if _fits(given, key)]
        return fitting[0] if fitting else None

    def _refusal(self, path: str, given: bytes, client: str | None) -> ApiError | None:
        if path in OPEN_PATHS:
            return None
        if self._admin_key is None and (
            path in STORAGE_PATHS or (path in MISS_PATHS and self._api_keys)
        ):
            return no_admin_key()
        if path in STORAGE_PATHS | ADMIN_PATHS | MISS_PATHS and self._admin_key is not None:
            return None if _fits(given, self._admin_key) else wrong_key("admin")
        if not self._api_keys or client is not None:
            return None
        return wrong_key("API")


def _fits(given: bytes, key: str) -> bool:
    return hmac.compare_digest(given, f"Bearer {key}".encode())
