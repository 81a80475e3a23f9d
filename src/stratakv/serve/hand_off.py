"""What a request's body says of its hand-off between servers, and what each role makes of it.

Owns the fields of the released routers: ``bootstrap_*`` as sglang-router sends them to both sides
at once, ``kv_transfer_params`` as vllm-router sends them to one side after the other. Must not know
peers or sessions.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Final, Protocol, TypeAlias, cast

from stratakv.core.choices import BOOTSTRAP_PORT
from stratakv.engine.request import TransferSession
from stratakv.serve import fields
from stratakv.serve.errors import ApiError, invalid
from stratakv.serve.fields import JsonObject
from stratakv.serve.prefill_hosts import PrefillHosts, host_name

FIELDS: Final = frozenset({
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params",
})  # fmt: skip
SALT_HEADER: Final = "x-request-id-cache-salt"
"""Where a tenant's salt survives sglang-router: it forwards headers that begin like this."""
_PARAMS: Final = frozenset({
    "do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids", "remote_host",
    "remote_port", "remote_request_id", "tp_size",
})  # fmt: skip
_LARGEST_ROOM: Final = (1 << 64) - 1
_MAX_NAME_CHARS: Final = 512


@dataclass(frozen=True, slots=True)
class Rooms:
    """Both sides have this body. Lists where the router has made one of each for several
    requests."""

    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    rooms: tuple[int, ...]

    def sessions(self, count: int) -> tuple[TransferSession, ...]:
        """Of ``count`` requests, the same on both sides. ApiError (400) for lists that were made
        for another number of them."""
        for name, given in (
            ("bootstrap_host", self.hosts),
            ("bootstrap_port", self.ports),
            ("bootstrap_room", self.rooms),
        ):
            if count % len(given):
                message = f"{name!r} has {len(given)} items for {count} requests; allowed are one, "
                raise invalid(name, message + "or one for each prompt")
        return tuple(map(self._session, range(count)))

    def _session(self, at: int) -> TransferSession:
        host, port = self.hosts[at % len(self.hosts)], self.ports[at % len(self.ports)]
        room = self.rooms[at % len(self.rooms)]
        return TransferSession(f"{room}-{at}", place(host, port))


@dataclass(frozen=True, slots=True)
class RemoteDecode:
    """To the side that computes the prompt, which names the session."""


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """To the side that decodes, which goes on with ``name``."""

    name: str
    prefill: str


HandOffRequest: TypeAlias = Rooms | RemoteDecode | RemotePrefill


@dataclass(frozen=True, slots=True)
class HandOffPlan:
    """``sessions``: of each request to the engine. ``params``: what the client is answered with at
    once, for the other side; None: it is answered with tokens."""

    sessions: tuple[TransferSession | None, ...]
    params: Mapping[str, object] | None = None


class HandOffRules(Protocol):
    """What a server of one role does with what a body asks for."""

    def plan(self, asked: HandOffRequest | None, count: int) -> HandOffPlan:
        """For ``count`` requests to the engine. ApiError (400) where it is none of this role's."""
        ...


@dataclass(frozen=True, slots=True)
class UnifiedRules:
    def plan(self, asked: HandOffRequest | None, count: int) -> HandOffPlan:
        if asked is not None:
            message = (
                "this server computes prompts and decodes (--role unified): it hands none over"
            )
            raise invalid(_field(asked), message)
        return HandOffPlan((None,) * count)


@dataclass(frozen=True, slots=True)
class PrefillRules:
    """``host`` and ``port``: where servers that decode join this one."""

    host: str
    port: int

    def plan(self, asked: HandOffRequest | None, count: int) -> HandOffPlan:
        match asked:
            case None:
                message = "this server only computes prompts for others (--role prefill): it needs "
                message += "'bootstrap_room' or 'kv_transfer_params', as a router sends them"
                raise ApiError(message, param="bootstrap_room", code="no_session")
            case Rooms():
                sessions = asked.sessions(count)
                return HandOffPlan(tuple(TransferSession(one.name) for one in sessions))
            case RemoteDecode():
                name = uuid.uuid4().hex
                params = {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "remote_host": self.host,
                    "remote_port": self.port,
                    "remote_request_id": name,
                }
                sessions = tuple(TransferSession(f"{name}-{at}") for at in range(count))
                return HandOffPlan(sessions, params)
            case RemotePrefill():
                message = "this server computes prompts (--role prefill); it decodes none"
                raise invalid("kv_transfer_params", message)


@dataclass(frozen=True, slots=True)
class DecodeRules:
    """What comes without a session is computed here, as by a server that does both. ``hosts``:
    where prefill servers may be."""

    hosts: PrefillHosts = field(default_factory=PrefillHosts)

    def plan(self, asked: HandOffRequest | None, count: int) -> HandOffPlan:
        match asked:
            case None:
                return HandOffPlan((None,) * count)
            case Rooms():
                for host in asked.hosts:
                    self.hosts.check("bootstrap_host", place(host, 0))
                return HandOffPlan(asked.sessions(count))
            case RemotePrefill():
                self.hosts.check("remote_host", asked.prefill)
                return HandOffPlan(
                    tuple(
                        TransferSession(f"{asked.name}-{at}", asked.prefill) for at in range(count)
                    )
                )
            case RemoteDecode():
                message = "this server decodes (--role decode); it computes no prompts for others"
                raise invalid("kv_transfer_params", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffOptions:
    """Of one server. ``unsalted_rooms``: whether a body with a room, from which a router may have
    dropped the tenant's salt, may come without any."""

    rules: HandOffRules = field(default_factory=UnifiedRules)
    unsalted_rooms: bool = False


def asked_for(data: JsonObject) -> HandOffRequest | None:
    """ApiError (400) for what cannot be understood."""
    params = fields.child(data, "kv_transfer_params")
    if data.get("bootstrap_room") is not None:
        if params:
            raise invalid(
                "bootstrap_room", "'bootstrap_room' and 'kv_transfer_params': one of them"
            )
        return _rooms(data)
    if params:
        return _params(params)
    for name in ("bootstrap_host", "bootstrap_port"):
        if data.get(name) is not None:
            message = f"'{name}' without 'bootstrap_room', which names the session: it is missing"
            raise ApiError(message, param="bootstrap_room", code="no_session")
    return None


def salt_of(header: str | None, salt: str | None) -> str | None:
    """A tenant's salt, from the header or the body; None where neither has one."""
    if header is None:
        return salt
    if len(header) > _MAX_NAME_CHARS:
        raise invalid(SALT_HEADER, f"'{SALT_HEADER}' has more than {_MAX_NAME_CHARS} characters")
    if salt is not None and salt != header:
        raise invalid("cache_salt", f"'cache_salt' and the header {SALT_HEADER} differ")
    return header


def check_salt(offs: HandOffOptions, asked: HandOffRequest | None, salt: str | None) -> None:
    """ApiError (400) where a router may have dropped what keeps tenants apart."""
    if isinstance(asked, Rooms) and salt is None and not offs.unsalted_rooms:
        message = "a request with 'bootstrap_room' needs its tenant's salt: some routers drop "
        message += f"'cache_salt', so send it as the header {SALT_HEADER} (empty: none); a server "
        message += "with --unsalted-rooms share does not ask"
        raise ApiError(message, param="cache_salt", code="no_salt")


def place(host: str, port: int) -> str:
    """One text for all spellings of a host: each text is another peer, whose link ends the last."""
    host = host_name(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _field(asked: HandOffRequest) -> str:
    return "bootstrap_room" if isinstance(asked, Rooms) else "kv_transfer_params"


def _rooms(data: JsonObject) -> Rooms:
    rooms = tuple(map(_room, _listed(data, "bootstrap_room")))  # what the others are about
    hosts = tuple(_host("bootstrap_host", one) for one in _listed(data, "bootstrap_host"))
    ports = tuple(_port("bootstrap_port", one) for one in _listed(data, "bootstrap_port"))
    return Rooms(hosts, ports, rooms)


def _room(value: object) -> int:
    """Nobody's room is anybody's: two requests would meet in it."""
    if value is None:
        raise invalid("bootstrap_room", "'bootstrap_room' must be an integer in each place")
    return fields.integer({"bootstrap_room": value}, "bootstrap_room", 0, low=0, high=_LARGEST_ROOM)


def _listed(data: JsonObject, name: str) -> list[object]:
    value = data.get(name)
    if isinstance(value, (list, fields.IntegerArray)):
        found = list(fields.array(name, cast("object", value)))
        if not found:
            raise invalid(name, f"'{name}' is empty")
        return found
    return [value]


def _host(name: str, value: object) -> str:
    found = fields.text({name: value}, name, None, max_chars=_MAX_NAME_CHARS)
    if not found or not found.isprintable() or any(c in found for c in "/@?# "):
        raise invalid(name, f"'{name}' must be the host of a prefill server")
    if ":" in found:
        try:
            IPv6Address(found)
        except ValueError:
            message = f"'{name}' must be a host without its port; only an IPv6 address has ':'"
            raise invalid(name, message) from None
    return found


def _port(name: str, value: object) -> int:
    return fields.integer({name: value}, name, BOOTSTRAP_PORT, low=1, high=65535)


def _params(params: JsonObject) -> HandOffRequest | None:
    where = "kv_transfer_params"
    for name in params.keys() - _PARAMS:
        message = f"unrecognized field: '{where}.{name}'"
        raise ApiError(message, param=f"{where}.{name}", code="unknown_parameter")
    decode = fields.boolean(params, "do_remote_decode", default=False)
    prefill = fields.boolean(params, "do_remote_prefill", default=False)
    if decode and prefill:
        raise invalid(where, "'do_remote_decode' and 'do_remote_prefill': one of them")
    if decode:
        return RemoteDecode()
    if not prefill:
        return None
    name = fields.text(params, "remote_request_id", None, max_chars=_MAX_NAME_CHARS)
    if not name:
        raise invalid(where, f"'{where}.remote_request_id' names the session; it is missing")
    host = _host("remote_host", params.get("remote_host"))
    return RemotePrefill(name, place(host, _port("remote_port", params.get("remote_port"))))
