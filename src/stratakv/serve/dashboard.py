"""The page at ``/``: what the server does, drawn from its own ``/metrics`` in the browser.

Owns the file's delivery. The page has no secret, so no key guards it; nothing is loaded from
anywhere else.
"""

from functools import cache
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; connect-src 'self'; img-src data:; "
        "script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
}


@cache
def _page() -> str:
    return files(__package__ or "stratakv.serve").joinpath("dashboard.html").read_text("utf-8")


async def dashboard(_request: Request) -> Response:
    return HTMLResponse(_page(), headers=HEADERS)
