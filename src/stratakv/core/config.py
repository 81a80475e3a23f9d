"""Every setting of a server, validated once. Owns names and defaults; must not allocate or read the
environment. A field's flag is its name with dashes; sizes are strings until ``spec.budget``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stratakv.core.choices import (
    DEVICES,
    DTYPES,
    EVICTIONS,
    MAX_NAME_CHARS,
    PREFETCH_POLICIES,
    PREFETCH_SHARE,
    PREFETCH_TIMEOUT_PER_1K_S,
    PREFETCH_TIMEOUT_S,
    SNAPSHOT_TOKENS,
    TIERS,
    TOOL_CALL_PARSERS,
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
    check_text,
    given,
)
from stratakv.core.device_memory import DEFAULTS, DeviceMemory, device_memory_of
from stratakv.core.errors import ConfigError
from stratakv.core.logs import FORMATS, LEVELS
from stratakv.core.server_checks import (
    check_graphs,
    check_kv_events,
    check_origins,
    check_role,
    check_tls,
    check_traces,
    is_server,
)
from stratakv.core.units import parse_bytes

LEAST_PAGES: Final = 3
"""A query sees its own page and the one before in any case, and one that is chosen."""
ADDRESS: Final = "an address of this machine, as 127.0.0.1, or 0.0.0.0 for all of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """``page_tokens``: None is the model's own default. ``device``: what computes, and has the
    device tier; ``device_memory``: None is the device's default. ``cache``: off (recompute
    everything), device, or host (device and host). ``lora``: adapters as NAME=DIR. ``storage``: a
    URL, read where the server is put together; the prefetch fields also hold for a storage that is
    attached later, and ``storage_root`` only for one: directories below which it may be.
    ``storage_key_file``: holds the secret that stored pages are sealed with. ``tp``:
    tensor-parallel ranks; sizes are of each. ``sparse_offload``: rows that an indexer selects may
    stay on the host; ``device_buffer_size``: so many of a request and layer are on the device;
    ``approximate_pages``: of a model without an indexer a query sees so many pages of its context.
    ``kv_cache_metrics``: measure how old cached pages grow, for a few microseconds a request."""

    page_tokens: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    cache: str = "host"
    device_memory: str | None = None
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
    sparse_offload: bool = False
    device_buffer_size: int | None = None
    approximate_pages: int | None = None
    kv_cache_metrics: bool = False
    cuda_graph_max_bs: int | None = None
    disable_cuda_graph: bool = False

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
        check_choice("--device", self.device, DEVICES)
        check_choice("--cache", self.cache, TIERS)
        self._check_host()
        self._check_policies()
        self._check_storage()
        self._check_ranks()
        self._check_offload()
        check_graphs(self)
        if self.step_tokens <= self.max_running:
            raise ConfigError(
                f"--step-tokens {self.step_tokens}: allowed is more than --max-running "
                f"{self.max_running}, or prefill would starve beside decoding"
            )
        self.adapters()

    def _check_host(self) -> None:
        memory, ratio = self.host_memory, self.host_ratio
        device_memory_of(self.device_memory_text, self.device)
        if memory is not None:
            parse_bytes(memory, "--host-memory")
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
                f"--storage-shards {self.storage_shards}: allowed are multiples of --tp {self.tp} "
                "from it up"
            )
        if self.tp > 1 and self.lora:
            raise ConfigError(
                f"--tp {self.tp}: adapters are not sharded; allowed with --lora is --tp 1"
            )

    def _check_offload(self) -> None:
        check_count("--device-buffer-size", self.device_buffer_size)
        if not self.sparse_offload:
            if self.device_buffer_size is not None:
                raise ConfigError("--device-buffer-size: allowed with --sparse-offload")
            if self.approximate_pages is not None:
                raise ConfigError("--approximate-pages: allowed with --sparse-offload")
            return
        check_count("--approximate-pages", self.approximate_pages, LEAST_PAGES)
        if self.approximate_pages is not None and self.tp > 1:
            raise ConfigError(
                f"--approximate-pages: allowed with --tp 1; bounds of --tp {self.tp} ranks differ"
            )
        if self.cache != "host":
            raise ConfigError(
                f"--sparse-offload: --cache {self.cache} has no host pages; allowed with --cache "
                "host"
            )
        if self.approximate_pages is not None and self.device != "cpu":
            raise ConfigError(
                f"--approximate-pages: --device {self.device} has no kernels that select pages; "
                "allowed with --device cpu"
            )
        if self.write_policy != "write-through":
            raise ConfigError(
                f"--sparse-offload: a page leaves the device once it is copied; --write-policy "
                f"{self.write_policy} makes none at first; allowed is write-through"
            )

    @property
    def device_memory_text(self) -> str:
        """As it was given, or the device's default."""
        return DEFAULTS[self.device] if self.device_memory is None else self.device_memory

    @property
    def device_tier(self) -> DeviceMemory:
        return device_memory_of(self.device_memory_text, self.device)

    def adapters(self) -> dict[str, Path]:
        """Directories of the LoRA adapters by name, in the order of the flags."""
        found: dict[str, Path] = {}
        for flag in self.lora:
            name, _, directory = flag.partition("=")
            if not 1 <= len(name) <= MAX_NAME_CHARS or not directory:
                raise ConfigError(
                    f"{given('--lora', flag)}: allowed is NAME=DIR, a name of 1 to "
                    f"{MAX_NAME_CHARS} characters and a PEFT directory"
                )
            if name in found:
                raise ConfigError(
                    f"--lora {flag}: the name {name} is taken by another --lora; allowed is a name "
                    "of its own"
                )
            found[name] = Path(directory)
        return found

    def snapshot_pages(self, page_tokens: int) -> int:
        """Pages between two snapshots of a state while decoding; 256 tokens, or whole pages that
        hold as many, where nothing else is given. ConfigError where what is given is no number of
        whole pages."""
        wanted = self.snapshot_tokens
        if wanted is not None and (wanted < 1 or wanted % page_tokens):
            raise ConfigError(
                f"--snapshot-tokens {wanted}: allowed are multiples of --page-tokens {page_tokens} "
                "from it up"
            )
        return -(-(SNAPSHOT_TOKENS if wanted is None else wanted) // page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where and how to listen. ``drain_s``: what running requests get after SIGTERM.
    ``api_key_file``: has keys of several clients with their names, beside ``api_key``.
    ``admin_key``: opens what changes the server; None: nobody may change its storage.
    ``ssl_certfile``: speak TLS, with this certificate; ``allowed_origins``: whose web pages may
    ask. ``limit_concurrency``: connections; None: as many as open files leave room for.
    ``kv_events``: ZeroMQ endpoint of what is cached, for routers. ``otlp_traces_endpoint``: where
    a span of each request goes. ``role``: whether it
    computes prompts, decodes what others have computed, or does both; the fields behind it are of
    the first two alone."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = None
    api_key_file: str | None = None
    admin_key: str | None = None
    max_waiting: int = 4096
    default_max_tokens: int = 1024
    tool_call_parser: str = "auto"
    limit_concurrency: int | None = None
    timeout_keep_alive: float = 75.0
    timeout_request: float = 10.0
    drain_s: float = 30.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    allowed_origins: tuple[str, ...] = ()
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_topic: str | None = None
    otlp_traces_endpoint: str | None = None
    role: str = "unified"
    transport: str | None = None
    bootstrap_port: int | None = None
    advertise_host: str | None = None
    transfer_timeout: float = TRANSFER_TIMEOUT_S
    peer_tp: int | None = None
    unsalted_rooms: str = "refuse"
    prefill_hosts: tuple[str, ...] = ()
    threads: int | None = None
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self) -> None:
        check_kv_events(self)
        check_tls(self)
        check_origins(self)
        check_traces(self)
        check_text("--host", self.host, ADDRESS)
        check_text("--advertise-host", self.advertise_host, "an address at which peers reach it")
        check_text("--api-key-file", self.api_key_file, "a file with lines of NAME KEY")
        check_text("--served-model-name", self.served_model_name, "a name that is not empty")
        check_role(self)
        check_port("--port", self.port)
        check_count("--max-waiting", self.max_waiting)
        check_count("--default-max-tokens", self.default_max_tokens)
        check_count("--limit-concurrency", self.limit_concurrency)
        check_count("--threads", self.threads)
        check_choice("--log-level", self.log_level, LEVELS)
        check_choice("--log-format", self.log_format, FORMATS)
        check_choice("--tool-call-parser", self.tool_call_parser, TOOL_CALL_PARSERS)
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
            not self.admin_key.strip() or self.admin_key == self.api_key
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
                if not is_server(url):
                    raise ConfigError(f"{given(flag, url)}: allowed is http://HOST:PORT")
        check_text("--host", self.host, ADDRESS)
        check_port("--port", self.port)


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"
