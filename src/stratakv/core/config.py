"""Every setting of a server, validated once. Owns names and defaults; must not allocate or read the
environment.

The flag of a field is its name with dashes. Sizes are strings with units until ``spec.budget``.
"""

from dataclasses import dataclass
from pathlib import Path

from stratakv.core.choices import (
    DTYPES,
    EVICTIONS,
    MAX_NAME_CHARS,
    PREFETCH_POLICIES,
    PREFETCH_SHARE,
    PREFETCH_TIMEOUT_PER_1K_S,
    PREFETCH_TIMEOUT_S,
    ROLES,
    SNAPSHOT_TOKENS,
    TIERS,
    TP_TIMEOUT_S,
    TRANSFER_TIMEOUT_S,
    TRANSPORTS,
    WRITE_BACK_RESERVE,
    WRITE_HITS,
    WRITE_POLICIES,
    check_choice,
    check_count,
    check_port,
    check_seconds,
    check_share,
)
from stratakv.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """``page_tokens``: None is the model's own default. ``cache``: off (recompute everything),
    device, or host (device and host). ``lora``: adapters as NAME=DIR. ``storage``: a URL, read
    where the server is put together; the prefetch fields also hold for a storage that is attached
    later, and ``storage_root`` only for one: directories below which it may be.
    ``storage_key_file``: holds the secret that stored pages are sealed with. ``tp``:
    tensor-parallel ranks; sizes are of each."""

    page_tokens: int | None = None
    dtype: str = "auto"
    cache: str = "host"
    device_memory: str = "2GiB"
    host_memory: str | None = None
    host_ratio: float | None = None
    max_running: int = 32
    max_model_len: int | None = None
    step_tokens: int = 2048
    chunk_tokens: int = 512
    chat_tokens: int = 2048
    reserve_tokens: int = 512
    snapshot_tokens: int | None = None
    load_back_threshold: int = 10
    load_back_budget: int = 65536
    eviction: str = "lru"
    write_policy: str = "write-through"
    write_hits: int = WRITE_HITS
    write_back_reserve: float = WRITE_BACK_RESERVE
    lora: tuple[str, ...] = ()
    storage: str | None = None
    storage_root: tuple[str, ...] = ()
    storage_key_file: str | None = None
    prefetch_policy: str = "timeout"
    prefetch_threshold: int | None = None
    prefetch_share: float = PREFETCH_SHARE
    prefetch_timeout: float = PREFETCH_TIMEOUT_S
    prefetch_timeout_per_1k: float = PREFETCH_TIMEOUT_PER_1K_S
    tp: int = 1
    tp_timeout: float = TP_TIMEOUT_S
    storage_shards: int | None = None

    def __post_init__(self) -> None:
        least_one = (
            "max_running", "step_tokens", "chunk_tokens", "chat_tokens",
            "load_back_budget", "reserve_tokens", "write_hits", "tp",
        )  # fmt: skip
        for name in least_one:
            check_count(flag_of(name), getattr(self, name))
        check_count("--page-tokens", self.page_tokens)
        check_count("--max-model-len", self.max_model_len, 2)
        if self.page_tokens is not None:
            self.snapshot_pages(self.page_tokens)
        check_count("--load-back-threshold", self.load_back_threshold, 0)
        check_choice("--dtype", self.dtype, (*DTYPES, "auto"))
        check_choice("--cache", self.cache, TIERS)
        self._check_host()
        self._check_policies()
        self._check_storage()
        self._check_ranks()
        if self.step_tokens <= self.max_running:
            raise ConfigError(
                f"--step-tokens {self.step_tokens}: more than --max-running {self.max_running} is "
                "needed, or prefill would starve beside decoding"
            )
        self.adapters()

    def _check_host(self) -> None:
        memory, ratio = self.host_memory, self.host_ratio
        if self.cache != "host" and (memory is not None or ratio is not None):
            raise ConfigError(
                f"--cache {self.cache} has no host tier to size: --host-memory and --host-ratio "
                "are allowed with --cache host"
            )
        if ratio is not None and not 0 <= ratio < float("inf"):
            raise ConfigError(f"--host-ratio {ratio}: allowed are finite numbers from 0 up")
        if memory is not None and ratio is not None:
            raise ConfigError(
                f"--host-memory {memory} and --host-ratio {ratio:g} both size the host tier: "
                "allowed is one of them, or neither"
            )

    def _check_policies(self) -> None:
        check_choice("--eviction", self.eviction, EVICTIONS)
        check_choice("--write-policy", self.write_policy, WRITE_POLICIES)
        check_share("--write-back-reserve", self.write_back_reserve)
        if self.cache != "host" and self.write_policy != "write-through":
            raise ConfigError(
                f"--write-policy {self.write_policy}: with --cache {self.cache} there is no host "
                "tier to write to; allowed with --cache host"
            )
        for flag, policy, used in (
            ("--write-hits", "write-through-selective", self.write_hits != WRITE_HITS),
            ("--write-back-reserve", "write-back", self.write_back_reserve != WRITE_BACK_RESERVE),
        ):
            if used and self.write_policy != policy:
                raise ConfigError(f"{flag}: allowed with --write-policy {policy}")

    def _check_storage(self) -> None:
        check_choice("--prefetch-policy", self.prefetch_policy, PREFETCH_POLICIES)
        check_count("--prefetch-threshold", self.prefetch_threshold)
        check_share("--prefetch-share", self.prefetch_share)
        check_seconds("--prefetch-timeout", self.prefetch_timeout)
        check_seconds("--prefetch-timeout-per-1k", self.prefetch_timeout_per_1k)
        self._check_use_of_storage()

    def _check_use_of_storage(self) -> None:
        """A flag that would do nothing is refused."""
        timed = (
            ("--prefetch-timeout", self.prefetch_timeout != PREFETCH_TIMEOUT_S),
            ("--prefetch-timeout-per-1k",
             self.prefetch_timeout_per_1k != PREFETCH_TIMEOUT_PER_1K_S),
        )  # fmt: skip
        for flag, used in timed:
            if used and self.prefetch_policy != "timeout":
                raise ConfigError(f"{flag}: allowed with --prefetch-policy timeout")
        if self.cache == "host":
            return
        for flag, used in (
            ("--storage", self.storage is not None),
            ("--storage-root", bool(self.storage_root)),
            ("--storage-key-file", self.storage_key_file is not None),
            ("--storage-shards", self.storage_shards is not None),
            ("--prefetch-policy", self.prefetch_policy != "timeout"),
            ("--prefetch-threshold", self.prefetch_threshold is not None),
            ("--prefetch-share", self.prefetch_share != PREFETCH_SHARE),
            *timed,
        ):
            if used:
                raise ConfigError(
                    f"{flag}: with --cache {self.cache} there is no host tier between storage and "
                    "the device; allowed with --cache host"
                )

    def _check_ranks(self) -> None:
        check_seconds("--tp-timeout", self.tp_timeout, 1)
        if self.tp_timeout != TP_TIMEOUT_S and self.tp == 1:
            raise ConfigError("--tp-timeout: allowed with --tp 2 and more")
        if self.storage_shards is not None and (
            self.storage_shards < 1 or self.storage_shards % self.tp
        ):
            raise ConfigError(
                f"--storage-shards {self.storage_shards}: allowed are multiples of --tp {self.tp}"
            )
        if self.tp > 1 and self.lora:
            raise ConfigError(f"--tp {self.tp}: adapters are not sharded; --lora is allowed alone")

    def adapters(self) -> dict[str, Path]:
        """Directories of the LoRA adapters by name, in the order of the flags."""
        found: dict[str, Path] = {}
        for flag in self.lora:
            name, _, directory = flag.partition("=")
            if not 1 <= len(name) <= MAX_NAME_CHARS or not directory:
                raise ConfigError(
                    f"--lora {flag}: allowed is NAME=DIR, a name of 1 to {MAX_NAME_CHARS} "
                    "characters and a PEFT directory"
                )
            if name in found:
                raise ConfigError(f"--lora {flag}: the name {name} is taken by another --lora")
            found[name] = Path(directory)
        return found

    def snapshot_pages(self, page_tokens: int) -> int:
        """Pages between two snapshots of a state while decoding; 256 tokens, or whole pages that
        hold as many, where nothing else is given. ConfigError where what is given is no number of
        whole pages."""
        wanted = self.snapshot_tokens
        if wanted is not None and (wanted < 1 or wanted % page_tokens):
            raise ConfigError(
                f"--snapshot-tokens {wanted}: allowed are multiples of --page-tokens {page_tokens}"
            )
        return -(-(SNAPSHOT_TOKENS if wanted is None else wanted) // page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where and how to listen. ``drain_s``: what running requests get after SIGTERM.
    ``admin_key``: opens what changes the server; None: nobody may change its storage.
    ``limit_concurrency``: connections; None: as many as open files leave room for.
    ``kv_events``: ZeroMQ endpoint at which routers hear what is cached. ``role``: whether it
    computes prompts, decodes what others have computed, or does both; the fields behind it are of
    the first two alone."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = None
    admin_key: str | None = None
    max_waiting: int = 4096
    default_max_tokens: int = 1024
    limit_concurrency: int | None = None
    timeout_keep_alive: float = 75.0
    timeout_request: float = 10.0
    drain_s: float = 30.0
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_topic: str | None = None
    role: str = "unified"
    transport: str | None = None
    bootstrap_port: int | None = None
    advertise_host: str | None = None
    transfer_timeout: float = TRANSFER_TIMEOUT_S
    unsalted_rooms: str = "refuse"

    def __post_init__(self) -> None:
        self._check_kv_events()
        self._check_role()
        check_port("--port", self.port)
        check_count("--max-waiting", self.max_waiting)
        check_count("--default-max-tokens", self.default_max_tokens)
        check_count("--limit-concurrency", self.limit_concurrency)
        for flag, seconds in (
            ("--timeout-keep-alive", self.timeout_keep_alive),
            ("--timeout-request", self.timeout_request),
        ):
            if not 0 < seconds < float("inf"):
                raise ConfigError(f"{flag} {seconds}: allowed are finite seconds above 0")
        check_seconds("--drain-s", self.drain_s)
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("--api-key: allowed is a key that is not empty")
        if self.admin_key is not None and (
            not self.admin_key or self.admin_key == self.api_key
        ):  # the key itself never shows
            raise ConfigError("--admin-key: allowed is a key that is not empty and not --api-key's")

    @property
    def transport_name(self) -> str:
        """What moves pages between servers."""
        return TRANSPORTS[0] if self.transport is None else self.transport

    @property
    def reached_at(self) -> str:
        """The address at which peers reach this machine."""
        return self.host if self.advertise_host is None else self.advertise_host

    def _check_role(self) -> None:
        check_choice("--role", self.role, ROLES)
        check_choice("--transport", self.transport_name, TRANSPORTS)
        check_choice("--unsalted-rooms", self.unsalted_rooms, ("refuse", "share"))
        check_seconds("--transfer-timeout", self.transfer_timeout, 1)
        for flag, used, roles in (
            ("--transport", self.transport is not None, ROLES[1:]),
            ("--bootstrap-port", self.bootstrap_port is not None, ROLES[1:2]),
            ("--advertise-host", self.advertise_host is not None, ROLES[1:]),
            ("--transfer-timeout", self.transfer_timeout != TRANSFER_TIMEOUT_S, ROLES[1:]),
            ("--unsalted-rooms", self.unsalted_rooms != "refuse", ROLES[1:]),
        ):
            if used and self.role not in roles:
                raise ConfigError(f"{flag}: allowed with --role {' and '.join(roles)}")
        if self.bootstrap_port is not None:
            check_port("--bootstrap-port", self.bootstrap_port)
        if self.role != "unified" and self.reached_at in {"0.0.0.0", "::", ""}:
            raise ConfigError(
                f"--host {self.host}: peers cannot reach that; allowed with --role {self.role} is "
                "an address of this machine, or --advertise-host with one"
            )

    def _check_kv_events(self) -> None:
        for flag, endpoint in (
            ("--kv-events", self.kv_events),
            ("--kv-events-replay", self.kv_events_replay),
        ):
            if endpoint is not None and not _is_endpoint(endpoint):
                raise ConfigError(
                    f"{flag} {endpoint}: allowed are tcp://*:PORT, tcp://HOST:PORT and ipc://PATH"
                )
        for flag, used in (
            ("--kv-events-replay", self.kv_events_replay is not None),
            ("--kv-events-topic", self.kv_events_topic is not None),
        ):
            if used and self.kv_events is None:
                raise ConfigError(f"{flag}: allowed with --kv-events")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig:
    """Of ``stratakv route``. ``prefill`` and ``decode``: addresses of servers with these roles."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8080

    def __post_init__(self) -> None:
        for flag, urls in (("--prefill", self.prefill), ("--decode", self.decode)):
            if not urls:
                raise ConfigError(f"{flag}: allowed is at least one, as http://HOST:PORT")
            for url in urls:
                scheme, _, rest = url.partition("://")
                if scheme not in {"http", "https"} or not rest or "/" in rest:
                    raise ConfigError(f"{flag} {url}: allowed is http://HOST:PORT")
        check_port("--port", self.port)


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


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
