"""Checks of settings that go together: a server's role, its KV events, its engine's, addresses.

Owns their refusals; the record is ``config``'s.
"""

from ipaddress import IPv6Address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stratakv.core.choices import (
    BOOTSTRAP_PORT,
    ROLES,
    TRANSFER_TIMEOUT_S,
    TRANSPORTS,
    UNSALTED_ROOMS,
    check_choice,
    check_count,
    check_port,
    check_seconds,
    check_text,
    given,
)
from stratakv.core.errors import ConfigError

if TYPE_CHECKING:
    from stratakv.core.config import EngineConfig, ServerConfig


def check_role(config: "ServerConfig") -> None:
    check_choice("--role", config.role, ROLES)
    check_choice("--transport", config.transport_name, TRANSPORTS)
    check_choice("--unsalted-rooms", config.unsalted_rooms, UNSALTED_ROOMS)
    check_seconds("--transfer-timeout", config.transfer_timeout, 1)
    for flag, used, roles in (
        ("--transport", config.transport is not None, ROLES[1:]),
        ("--bootstrap-port", config.bootstrap_port is not None, ROLES[1:2]),
        ("--advertise-host", config.advertise_host is not None, ROLES[1:]),
        ("--transfer-timeout", config.transfer_timeout != TRANSFER_TIMEOUT_S, ROLES[1:]),
        ("--peer-tp", config.peer_tp is not None, ROLES[1:]),
        ("--unsalted-rooms", config.unsalted_rooms != "refuse", ROLES[1:]),
        ("--prefill-hosts", bool(config.prefill_hosts), ROLES[2:]),
    ):
        if used and config.role not in roles:
            raise ConfigError(f"{flag}: allowed with --role {' and '.join(roles)}")
    check_count("--peer-tp", config.peer_tp)
    for host in config.prefill_hosts:
        if not _is_host(host):
            raise ConfigError(
                f"--prefill-hosts {host}: allowed is a host name or an address, without a port"
            )
    if config.bootstrap_port is not None:
        check_port("--bootstrap-port", config.bootstrap_port)
    port = BOOTSTRAP_PORT if config.bootstrap_port is None else config.bootstrap_port
    if config.role == "prefill" and port and port == config.port:
        raise ConfigError(f"--bootstrap-port {port}: allowed is another port than --port's")
    if config.role != "unified" and config.reached_at in {"0.0.0.0", "::", ""}:
        flag = "--host" if config.advertise_host is None else "--advertise-host"
        raise ConfigError(
            f"{flag} {config.reached_at}: peers cannot reach that; allowed with --role "
            f"{config.role} is an address of this machine, or --advertise-host with one"
        )


def check_graphs(config: "EngineConfig") -> None:
    check_count("--cuda-graph-max-bs", config.cuda_graph_max_bs)
    for flag, used in (
        ("--cuda-graph-max-bs", config.cuda_graph_max_bs is not None),
        ("--disable-cuda-graph", config.disable_cuda_graph),
    ):
        if used and config.device != "cuda":
            raise ConfigError(f"{flag}: allowed with --device cuda")
        if used and config.tp > 1:
            raise ConfigError(f"{flag}: allowed with --tp 1; steps of --tp {config.tp} run eagerly")
    most = config.cuda_graph_max_bs
    if most is not None and config.disable_cuda_graph:
        raise ConfigError("--cuda-graph-max-bs: allowed without --disable-cuda-graph")
    if most is not None and most > config.max_running:
        raise ConfigError(
            f"--cuda-graph-max-bs {most}: allowed is --max-running {config.max_running} at most"
        )


def _is_host(host: str) -> bool:
    if ":" not in host:
        return host.isprintable() and bool(host) and not set(host) & set("/@?#[], ")
    try:
        IPv6Address(host)
    except ValueError:
        return False
    return True


def check_kv_events(config: "ServerConfig") -> None:
    for flag, endpoint in (
        ("--kv-events", config.kv_events),
        ("--kv-events-replay", config.kv_events_replay),
    ):
        if endpoint is not None and not _is_endpoint(endpoint):
            raise ConfigError(
                f"{flag} {endpoint}: allowed are tcp://*:PORT, tcp://HOST:PORT and ipc://PATH"
            )
    for flag, used in (
        ("--kv-events-replay", config.kv_events_replay is not None),
        ("--kv-events-topic", config.kv_events_topic is not None),
    ):
        if used and config.kv_events is None:
            raise ConfigError(f"{flag}: allowed with --kv-events")


def check_tls(config: "ServerConfig") -> None:
    for flag, path, allowed in (
        ("--ssl-certfile", config.ssl_certfile, "a PEM file with the server's certificate"),
        ("--ssl-keyfile", config.ssl_keyfile, "a PEM file with its key"),
        ("--ssl-ca-certs", config.ssl_ca_certs, "a PEM file with certificates of authorities"),
    ):
        check_text(flag, path, allowed)
        if path is not None and config.ssl_certfile is None:
            raise ConfigError(f"{flag}: allowed with --ssl-certfile")
    if config.ssl_certfile is not None and config.role != "unified":
        raise ConfigError(
            f"--ssl-certfile: peers and routers reach --role {config.role} over plain HTTP; "
            "allowed is --role unified"
        )


def check_origins(config: "ServerConfig") -> None:
    for origin in config.allowed_origins:
        if origin != "*" and not is_server(origin):
            raise ConfigError(
                f"{given('--allowed-origins', origin)}: allowed are *, and origins as "
                "https://app.example or http://localhost:3000"
            )


def check_traces(config: "ServerConfig") -> None:
    url = config.otlp_traces_endpoint
    if url is None:
        return
    try:
        parts = urlsplit(url)
        fits = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or not url.isprintable():
        raise ConfigError(
            f"{given('--otlp-traces-endpoint', url)}: allowed is the URL of a collector's OTLP "
            "over HTTP, as http://localhost:4318/v1/traces"
        )


def check_together(engine: "EngineConfig", server: "ServerConfig") -> None:
    """ConfigError where an engine's settings do not go with its server's."""
    if engine.device_buffer_size is not None and server.role == "prefill":
        raise ConfigError(
            "--device-buffer-size: with --role prefill no request has a buffer; allowed with the "
            "others"
        )
    if engine.approximate_pages is not None and server.role != "unified":
        raise ConfigError(
            f"--approximate-pages: --role {server.role} hands over no bounds of pages; allowed is "
            "--role unified"
        )
    if engine.device != "cpu" and server.role != "unified":
        raise ConfigError(
            f"--device {engine.device}: --role {server.role} sends pages that the CPU can address; "
            "allowed with --role unified, or --device cpu"
        )
    if server.peer_tp is not None and server.peer_tp % engine.tp:
        raise ConfigError(
            f"--peer-tp {server.peer_tp}: allowed are multiples of --tp {engine.tp}; where the "
            "other servers have fewer ranks, they name this one's"
        )
    if server.kv_events is not None and engine.cache == "off":
        raise ConfigError("--kv-events: with --cache off nothing is cached; allowed are the others")


def is_server(url: str) -> bool:
    """Whether it is a server's address and nothing more."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in {"http", "https"}
            and bool(parts.hostname)
            and parts.port != 0
            and url == f"{parts.scheme}://{parts.netloc}"
        )
    except ValueError:
        return False


def _is_endpoint(text: str) -> bool:
    """Whether ZeroMQ would understand it; it takes a port of any size, and cuts it."""
    scheme, _, place = text.partition("://")
    if scheme == "ipc":
        return bool(place)
    host, _, port = place.rpartition(":")
    named = bool(host) and (":" not in host or (host[0] == "[" and host[-1] == "]"))
    return (
        scheme == "tcp" and named and (port == "*" or (port.isdecimal() and 0 < int(port) <= 65535))
    )
