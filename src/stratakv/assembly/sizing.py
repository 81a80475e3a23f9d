"""How large everything becomes: page counts of both tiers, and the longest request.

Owns the order of the questions: can this cache be served, does one request fit, is the memory
there. Takes no memory and reads no weights, so that every refusal comes before either. A plan asks
the same, but for what only the machine at hand could answer.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.core.identity.safetensors_layout import read_layout
from stratakv.core.units import format_bytes, parse_bytes
from stratakv.engine.model_facts import ModelFacts
from stratakv.spec.budget import (
    ExpectedLoad,
    device_bytes,
    device_pages,
    host_budget,
    host_pages,
    shortage,
)
from stratakv.spec.derive import default_page_tokens, spec_of
from stratakv.spec.groups import ANCHOR, DTYPE_BYTES, CacheSpec
from stratakv.spec.sharding import Sharding, sharding_of, unshared
from stratakv.spec.support import refusal

Pages = Sequence[int]
FLOATS: Final = frozenset(("F32", "BF16", "F16"))
"""Of weights that are loaded as any of these."""
ANY_AMOUNT: Final = 1 << 70
"""Bytes free where nobody looks: more than all page ids could hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """``device`` and ``host``: pages of every group. ``notice``: one line for the operator, where
    a flag will not be reached. ``spec``: of every rank; ``sharding``: how ranks share the whole."""

    spec: CacheSpec
    sharding: Sharding
    device: Pages
    host: Pages
    max_model_len: int
    notice: str | None = None

    @classmethod
    def of(cls, spec: CacheSpec, device: Pages, host: Pages, max_model_len: int) -> "Sizes":
        """Exactly these pages, for one rank alone."""
        return cls(
            spec=spec,
            sharding=unshared(spec),
            device=device,
            host=host,
            max_model_len=max_model_len,
        )


def size(facts: ModelFacts, config: EngineConfig, *, on_host: bool, weights: int = 0) -> Sizes:
    """ConfigError for what cannot be served, or does not fit. ``on_host``: the device tier takes
    host memory. ``weights``: bytes of memory that the model will take, if it is not there yet."""
    spec = spec_for(facts, config)
    if reason := refusal(spec):
        raise ConfigError(f"MODEL: it cannot be served: {reason}")
    sharding = sharding_of(facts.config, spec, config.tp)
    free_bytes = max(0, free_host_bytes() - weights) // ranks_here(config)
    return _sizes(sharding, facts, config, free_bytes=free_bytes, on_host=on_host)


def planned(spec: CacheSpec, facts: ModelFacts, config: EngineConfig) -> Sizes:
    """The same for another machine, and for a cache that waits for its place in the engine: this
    machine's free memory bounds nothing, and the host tier's default is its ratio."""
    sharding = sharding_of(facts.config, spec, config.tp)
    return _sizes(sharding, facts, config, free_bytes=ANY_AMOUNT, on_host=False)


def spec_for(facts: ModelFacts, config: EngineConfig) -> CacheSpec:
    """With the model's own page size where no flag says. ConfigError as in ``spec_of``."""
    page_tokens = config.page_tokens
    if page_tokens is None:
        page_tokens = default_page_tokens(facts.config)
    config.snapshot_pages(page_tokens)  # refuses before memory is taken
    return spec_of(facts.config, page_tokens=page_tokens, dtype=facts.dtype)


def _sizes(
    sharding: Sharding, facts: ModelFacts, config: EngineConfig, *, free_bytes: int, on_host: bool
) -> Sizes:
    spec = sharding.spec
    max_model_len = _max_model_len(facts.max_positions, config)
    load = ExpectedLoad(
        max_running=config.max_running,
        max_model_len=max_model_len,
        chunk_tokens=config.chunk_tokens,
        chat_tokens=config.chat_tokens,
    )
    device = device_pages(spec, parse_bytes(config.device_memory, "--device-memory"), load)
    if on_host:
        # The kernel would promise more than it has, and kill the server once pages are written.
        taken = device_bytes(spec, device)
        if taken > free_bytes:
            raise ConfigError(
                f"--device-memory {config.device_memory}: {format_bytes(free_bytes)} are free; "
                "allowed is that or less"
            )
        free_bytes -= taken
    host = _host_pages(spec, device, config, free_bytes)
    held = device[ANCHOR] * spec.page_tokens
    if config.max_model_len is None:
        max_model_len = min(max_model_len, held)  # longer ones could only ever be refused
    elif max_model_len > held:
        raise ConfigError(
            f"--max-model-len {max_model_len}: --device-memory {config.device_memory} holds "
            f"{held} tokens; allowed is that or less"
        )
    return Sizes(
        spec=spec,
        sharding=sharding,
        device=device,
        host=host,
        max_model_len=max_model_len,
        notice=_notice(spec, device, load),
    )


def _notice(spec: CacheSpec, device: Pages, load: ExpectedLoad) -> str | None:
    """Fewer requests than asked for is no fault, but nobody should have to find it out."""
    found = shortage(spec, device, load)
    if found is None:
        return None
    return (
        f"--max-running {load.max_running}: at most {found.running} requests run at once, since "
        f"group {found.group!r} has {found.pages} pages on the device and each request takes "
        f"{found.live}; --device-memory {found.device_bytes} "
        f"({format_bytes(found.device_bytes)}) is enough for {load.max_running}"
    )


def _max_model_len(max_positions: int, config: EngineConfig) -> int:
    wanted = config.max_model_len
    if wanted is None:
        return max_positions
    if wanted > max_positions:
        raise ConfigError(
            f"--max-model-len {wanted}: the model's positions end at {max_positions}; allowed is "
            "that or less"
        )
    return wanted


def _host_pages(
    spec: CacheSpec, device: Pages, config: EngineConfig, free_bytes: int
) -> tuple[int, ...]:
    if config.cache != "host":
        return (0,) * len(spec.groups)
    budget = host_budget(config.host_memory, config.host_ratio)
    return host_pages(spec, device, budget, free_bytes)


def ranks_here(config: EngineConfig) -> int:
    """How many ranks share this machine's memory and cores: all, where no launcher says less."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", config.tp))


def weights_bytes(directory: Path, dtype: str) -> int:
    """What the weights of a model directory take in memory, as ``dtype``."""
    return sum(_tensor_bytes(path, dtype) for path in directory.glob("*.safetensors"))


def _tensor_bytes(path: Path, dtype: str) -> int:
    with path.open("rb") as file:
        size = path.stat().st_size
        try:
            tensors = read_layout(file.fileno(), size).tensors
        except ValueError:  # whoever loads it will say so
            return size
    return sum(
        prod(tensor.shape) * DTYPE_BYTES[dtype] if tensor.dtype in FLOATS else tensor.size
        for tensor in tensors
    )


def free_host_bytes() -> int:
    """Memory that could be taken now: what the kernel calls available, within the cgroup."""
    free = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file():
        text = limit.read_text(encoding="ascii").strip()
        if text != "max":
            free = min(free, int(text) - int(used.read_text(encoding="ascii")))
    return max(0, free)
