"""Reads request bodies. Owns their bound; must not know what is in them."""

from starlette.requests import Request

from stratakv.serve import fields
from stratakv.serve.errors import ApiError
from stratakv.serve.fields import JsonObject


async def json_object(request: Request, most_bytes: int) -> JsonObject:
    """The JSON body, which is read at once: ``most_bytes`` are few."""
    return fields.parse_object(await whole(request, most_bytes))


async def whole(request: Request, most_bytes: int) -> bytes:
    """The body. One that is too large is read a little further and thrown away, so that a
    client gets to read the answer instead of a broken pipe."""
    body = bytearray()
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= most_bytes:
            body += chunk
        elif size > 4 * most_bytes:
            break
    if size > most_bytes:
        message = f"the request body has more than {most_bytes} bytes"
        raise ApiError(message, status=413, code="body_too_large")
    return bytes(body)
