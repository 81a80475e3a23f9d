"""Every setting of a server, validated once. Owns names and defaults; must not allocate or read the
environment.

The flag of a field is its name with dashes. Sizes are strings with units until ``spec.budget``.
"""

from dataclasses import dataclass
from typing import Final

from stratakv.core.errors import ConfigError

TIERS: Final = ("off", "device", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """``cache``: off (recompute everything), device, or host (device and host)."""

    page_tokens: int = 64
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
    load_back_threshold: int = 10
    load_back_budget: int = 65536

    def __post_init__(self) -> None:
        least_one = (
            "page_tokens", "max_running", "step_tokens", "chunk_tokens", "chat_tokens",
            "load_back_budget",
        )  # fmt: skip
        for name in least_one:
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)}: allowed is 1 and more")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"--max-model-len {self.max_model_len}: allowed is 2 and more")
        if self.load_back_threshold < 0:
            raise ConfigError(
                f"--load-back-threshold {self.load_back_threshold}: allowed is 0 and more"
            )
        if self.cache not in TIERS:
            raise ConfigError(f"--cache {self.cache}: allowed are {', '.join(TIERS)}")
        if self.step_tokens <= self.max_running:
            raise ConfigError(
                f"--step-tokens {self.step_tokens}: more than --max-running {self.max_running} is "
                "needed, or prefill would starve beside decoding"
            )
        if self.cache != "host" and (self.host_memory is not None or self.host_ratio is not None):
            raise ConfigError(
                f"--cache {self.cache} has no host tier to size: --host-memory and --host-ratio "
                "are allowed with --cache host"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where and how to listen. ``drain_s``: what running requests get after SIGTERM."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = None
    max_waiting: int = 4096
    default_max_tokens: int = 1024
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: allowed are 0 (any free one) to 65535")
        if self.max_waiting < 1:
            raise ConfigError(f"--max-waiting {self.max_waiting}: allowed is 1 and more")
        if self.default_max_tokens < 1:
            raise ConfigError(
                f"--default-max-tokens {self.default_max_tokens}: allowed is 1 and more"
            )
        if not 0 <= self.drain_s < float("inf"):
            raise ConfigError(f"--drain-s {self.drain_s}: allowed are finite seconds from 0 up")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
