"""Errors as OpenAI's clients read them: ``{"error": {message, type, param, code}}``.

Owns the mapping from what went wrong to a status and an error object. Must not know routes.
"""

from collections.abc import Mapping
from typing import Final, assert_never

from stratakv.core.errors import StrataError
from stratakv.engine.request import Failure

RETRY_AFTER_S: Final = 1
SHOWN_CHARS: Final = 1000


class ApiError(StrataError):
    """An answer that is not the one the client asked for. ``kind`` is OpenAI's ``type``."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = _shown(message)
        self.status = status
        self.kind = kind
        self.param = None if param is None else _shown(param)
        self.code = code

    @property
    def body(self) -> dict[str, object]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> Mapping[str, str]:
        """For a client that may try again: when."""
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status == 503 else {}


def _shown(text: str) -> str:
    """As JSON can say it in UTF-8, and not too much of it: a client may call a field anything."""
    if len(text) > SHOWN_CHARS:
        text = f"{text[:SHOWN_CHARS]}..."
    return text.encode(errors="backslashreplace").decode()


class ClientGoneError(StrataError):
    """The client hung up; nobody reads the answer."""


def invalid(param: str, message: str) -> ApiError:
    return ApiError(message, param=param, code="invalid_value")


def too_long(param: str, message: str) -> ApiError:
    return ApiError(message, param=param, code="context_length_exceeded")


def refused(message: str) -> ApiError:
    """The engine reports that it can never serve this request."""
    return ApiError(message, code="request_refused")


def overloaded(waiting: int, max_waiting: int) -> ApiError:
    message = f"{waiting} requests are waiting and --max-waiting is {max_waiting}; try again later"
    return ApiError(message, status=503, kind="overloaded", code="overloaded")


def crowded(most: int) -> ApiError:
    message = f"more than {most} connections are open (--limit-concurrency); try again later"
    return ApiError(message, status=503, kind="overloaded", code="overloaded")


def too_many_bodies() -> ApiError:
    message = "the bodies of requests that are being read take all the memory that there is for "
    message += "them; try again later"
    return ApiError(message, status=503, kind="overloaded", code="overloaded")


def bad_framing() -> ApiError:
    return ApiError("this is not a valid HTTP request", code="invalid_http")


def too_slow(seconds: float) -> ApiError:
    message = f"the request has not come in {seconds:g} seconds (--timeout-request)"
    return ApiError(message, status=408, code="request_timeout")


def unavailable(state: str) -> ApiError:
    message = f"the server is {state} and takes no requests"
    return ApiError(message, status=503, kind="service_unavailable", code=state)


def conflict(message: str, code: str) -> ApiError:
    """What is asked for does not go with the state the server is in; it stays as it is."""
    return ApiError(message, status=409, kind="conflict", code=code)


def nothing_attached() -> ApiError:
    return ApiError("no storage is attached", status=404, code="no_storage")


def unreachable(message: str) -> ApiError:
    """The fault of a store behind this server."""
    return ApiError(message, status=502, kind="storage_error", code="storage_unreachable")


def wrong_key(which: str) -> ApiError:
    message = f"the {which} key is missing or wrong; send it as 'Authorization: Bearer KEY'"
    code = f"invalid_{which.lower()}_key"
    return ApiError(message, status=401, kind="authentication_error", code=code)


def no_admin_key() -> ApiError:
    message = "this is for the server's operator, and it was started without a key for that; "
    message += "--admin-key KEY allows it"
    return ApiError(message, status=403, kind="permission_error", code="no_admin_key")


def shut_down() -> ApiError:
    message = "the server shut down before this request was finished"
    return ApiError(message, status=503, kind="service_unavailable", code="draining")


def engine_failed() -> ApiError:
    """Details are in the server's log, never in an answer."""
    message = "the engine failed while this request was running"
    return ApiError(message, status=500, kind="server_error", code="engine_failed")


def request_failed(failure: Failure, reason: str = "") -> ApiError:
    """This request alone; the engine goes on. ``reason``: of a failed transfer."""
    match failure:
        case Failure.INTERNAL:
            message = "this request failed inside the engine; the server's log has the details"
        case Failure.NOT_FINITE:
            message = (
                "the model computed NaN or infinity where it continues this prompt, so that no "
            )
            message += "token could be chosen: its weights or its dtype, or a damaged cached page"
        case Failure.NO_TOKEN:
            message = (
                "what this request asks of its tokens left none to go on with: its form (schema, "
            )
            message += "regex or grammar) is too complex, or every token is barred"
            code = f"request_failed_{failure.value}"
            return ApiError(message, code=code)
        case Failure.COPY:
            message = (
                "this request is longer than the device holds, and its pages could not be copied "
            )
            message += "to the host; the server's log has the details"
        case Failure.TRANSFER:
            message = (
                "the engine that computed this prompt and the one that was to continue it lost "
            )
            message += f"each other, or one of them gave it up ({reason}); try again; a "
            message += (
                "request that names its session (bootstrap_room, kv_transfer_params) needs a new "
            )
            message += "name for that"
        case _:
            assert_never(failure)
    code = f"request_failed_{failure.value}"
    return ApiError(message, status=500, kind="server_error", code=code)


def internal() -> ApiError:
    message = "the server failed to answer this request"
    return ApiError(message, status=500, kind="server_error", code="internal_error")
