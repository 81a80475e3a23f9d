"""What the two roles send each other, beside the bytes of pages: small, in order, over the
transport's notifications.

Owns the messages and their format; one that is longer than a notification comes in several. Comes
from another machine: nothing of it is believed before it was read here.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, assert_never

from stratakv.cache.footprint import TransferPages
from stratakv.cache.records import TierTokens
from stratakv.core.errors import TransportError
from stratakv.core.ids import GroupId
from stratakv.disagg.page_places import pages_of
from stratakv.disagg.peer_limits import REASON_CHARS, short
from stratakv.disagg.recompute import Recompute
from stratakv.disagg.transport import NOTIFICATION_BYTES
from stratakv.engine.request import LARGEST, TokenLogprob
from stratakv.engine.roles import FirstToken

PROTOCOL: Final = 8
"""Of these messages; two sides must have the same."""
MESSAGE_BYTES: Final = 16 << 20
"""The longest message that is read."""
_MORE, _LAST = b"+", b"."


@dataclass(frozen=True, slots=True)
class Attempt:
    """One session, as decode has begun it. The same session again, after an abort, is another
    ``generation``, and so is any other one of that side."""

    session: str
    generation: int

    def __str__(self) -> str:
        return f"{self.session}/{self.generation}"


@dataclass(frozen=True, slots=True, eq=False)
class Reserve:
    """Decode: write these ``pages``, of a prompt with this identity, hexadecimal. What it has
    itself is not among them. ``again``: what is to be computed, where no client brings it."""

    attempt: Attempt
    prompt: str
    pages: TransferPages
    again: Recompute | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """Prefill, behind all the bytes: they are there. ``cached``: tokens of the prompt that prefill
    had on its device, its host and in storage."""

    attempt: Attempt
    first: FirstToken
    cached: TierTokens


@dataclass(frozen=True, slots=True)
class PartWritten:
    """Prefill, behind a part of the bytes: more is to come, and has its time from now on."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Abort:
    """Decode has given it up. ``reserved``: a ``Reserve`` of it has gone before; then prefill
    answers, with ``Arrival`` or ``Ended``, when it writes no more."""

    attempt: Attempt
    reserved: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Prefill does not write for it, and will not."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Prefill needs the place of this link for another peer. Decode alone knows whether a session
    is about to begin, so it ends the link, when none is open."""


Message: TypeAlias = Reserve | PartWritten | Arrival | Abort | Ended | Leave


def encode(message: Message) -> bytes:
    fields: dict[str, Any] = {"word": type(message).__name__}
    if not isinstance(message, Leave):
        fields["session"] = message.attempt.session
        fields["generation"] = message.attempt.generation
    match message:
        case Leave():
            pass
        case Reserve():
            groups = [
                (each.group, each.first, each.pages.tolist(), each.tier)
                for each in message.pages.groups
            ]
            fields |= {"prompt": message.prompt, "tokens": message.pages.tokens, "groups": groups}
            fields |= {"again": None if message.again is None else message.again.fields()}
        case Arrival():
            logprob, cached = message.first.logprob, message.cached
            fields |= {
                "token": message.first.token,
                "logprob": None if logprob is None else (logprob.chosen, logprob.top),
                "cached": (cached.device, cached.host, cached.storage),
            }
        case PartWritten():
            pass
        case Abort():
            fields |= {"reserved": message.reserved, "reason": message.reason}
        case Ended():
            fields |= {"reason": message.reason}
        case _:
            assert_never(message)
    return json.dumps(fields).encode()


def decode(data: bytes) -> Message:
    """TransportError where it is none."""
    try:
        return _read(json.loads(data))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise TransportError(f"the peer's message cannot be read: {error!r}") from error


def _read(fields: Any) -> Message:  # noqa: ANN401 - from a peer
    if fields["word"] == "Leave":
        return Leave()
    attempt = Attempt(short(fields["session"]), _generation(fields["generation"]))
    match fields["word"]:
        case "Reserve":
            groups = tuple(
                pages_of(GroupId(int(group)), int(first), list(map(int, pages)), int(tier))
                for group, first, pages, tier in fields["groups"]
            )
            tokens = int(fields["tokens"])
            if tokens < 1:
                raise ValueError(f"a prompt of {tokens} tokens")
            pages = TransferPages(tokens, groups)
            again = None if fields["again"] is None else Recompute.read(fields["again"])
            return Reserve(attempt, short(fields["prompt"]), pages, again)
        case "PartWritten":
            return PartWritten(attempt)
        case "Arrival":
            device, host, storage = map(_column, fields["cached"])
            first = FirstToken(_column(fields["token"]), _logprob(fields["logprob"]))
            return Arrival(attempt, first, TierTokens(device, host, storage))
        case "Abort":
            return Abort(attempt, bool(fields["reserved"]), _reason(fields["reason"]))
        case "Ended":
            return Ended(attempt, _reason(fields["reason"]))
        case word:
            raise ValueError(f"the word {word!r} is none")


def _generation(found: Any) -> int:  # noqa: ANN401 - from a peer
    if not 0 <= (number := int(found)) < 1 << 63:
        raise ValueError("a generation that nobody counts to")
    return number


def _reason(found: Any) -> str:  # noqa: ANN401 - from a peer
    return str(found)[:REASON_CHARS]


def _column(found: Any) -> int:  # noqa: ANN401 - from a peer
    """A number that a column of a batch holds. Whether the model has such a token, it knows."""
    if not 0 <= (number := int(found)) <= LARGEST:
        raise ValueError(f"{number} is no token, and no number of tokens")
    return number


def _logprob(found: Any) -> TokenLogprob | None:  # noqa: ANN401 - from a peer
    if found is None:
        return None
    chosen, top = found
    return TokenLogprob(
        chosen=_share(chosen), top=tuple((_column(token), _share(value)) for token, value in top)
    )


def _share(found: Any) -> float:  # noqa: ANN401 - from a peer
    if not (value := float(found)) < 1:  # a rounded 0 may be above it
        raise ValueError(f"the logarithm of a probability is {value}")
    return value


def parts(message: bytes) -> Iterator[bytes]:
    """Notifications that bring ``message``."""
    size = NOTIFICATION_BYTES - 1
    for at in range(0, len(message), size):
        last = at + size >= len(message)
        yield (_LAST if last else _MORE) + message[at : at + size]


class Joiner:
    """Messages of one peer, out of its notifications."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, part: bytes) -> Message | None:
        """What ``part`` completes. TransportError where that is no message, or too long."""
        self._data += part[1:]
        if len(self._data) > MESSAGE_BYTES:
            raise TransportError(f"the peer's message has over {MESSAGE_BYTES >> 20} MiB")
        if part[:1] != _LAST:
            return None
        data, self._data = bytes(self._data), bytearray()
        return decode(data)
