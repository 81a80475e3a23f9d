"""How large everything becomes: page counts of both tiers, and the longest request.

Owns the order of the questions: can this cache be served, does one request fit, is the memory
there. Takes no memory and reads no weights, so that every refusal comes before either. A plan asks
the same, but for what only the machine at hand could answer.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stratakv.core.config import EngineConfig
from stratakv.core.device_memory import DeviceBudget
from stratakv.core.errors import ConfigError
from stratakv.core.free_memory import free_host_bytes
from stratakv.core.ids import GroupId, LayerId
from stratakv.core.units import format_bytes
from stratakv.sparse.hot_buffer import MOST_ENTRIES, HotBuffers
from stratakv.sparse.sizing import OffloadPages, advice
from stratakv.spec.budget import (
    FILLING_PAGES,
    ExpectedLoad,
    device_bytes,
    device_pages,
    host_budget,
    host_pages,
    shortage,
)
from stratakv.spec.derive import default_page_tokens, spec_of
from stratakv.spec.groups import ANCHOR, CacheGroup, CacheSpec, Home
from stratakv.spec.longest import bytes_for_length, load_for_length, longest_fitting
from stratakv.spec.model_facts import ModelFacts
from stratakv.spec.offload import (
    SELECTED,
    bounds_pages,
    has_pages_to_select,
    indexers,
    offloaded,
    top_k,
    with_bounds,
)
from stratakv.spec.sharding import Sharding, sharding_of, unshared
from stratakv.spec.support import refusal

Pages = Sequence[int]
ANY_AMOUNT: Final = 1 << 70
"""Bytes free where nobody looks: more than all page ids could hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """``device`` and ``host``: pages of every group. ``notice``: one line for the operator, where
    a flag will not be reached. ``spec``: of every rank; ``sharding``: how ranks share the whole.
    ``buffer_rows``: of the buffer of a request whose selected rows are read on the host, and
    ``beside_bytes``: what that takes there beside its pages, and on a device that has memory of its
    own there too."""

    spec: CacheSpec
    sharding: Sharding
    device: Pages
    host: Pages
    max_model_len: int
    notice: str | None = None
    buffer_rows: int = 0
    beside_bytes: int = 0

    @property
    def buffers(self) -> dict[GroupId, int]:
        """Pages of a spilled request's buffer, of each group that has its home on the host."""
        return {
            group.id: -(-self.buffer_rows // group.page_rows)
            for group in self.spec.groups
            if group.at_home_on_host
        }

    def advice(self, chat_tokens: int) -> list[str]:
        """What fits with rows on the host, and from where on that pays: a line for the operator for
        a typical conversation, one for the longest, and one for what it takes."""
        if not self.buffers:
            return []
        beside = format_bytes(self.beside_bytes)
        taken = (
            f"tables of buffers and the context of a prompt take {beside} beside host pages, and "
            "on a GPU about as much there"
        )
        return [
            line
            for group, buffer in self.buffers.items()
            for line in advice(
                OffloadPages(
                    page_tokens=self.spec.page_tokens,
                    kept_pages=self.device[ANCHOR],
                    selected_pages=self.device[group],
                    host_pages=self.host[group],
                    buffer_pages=buffer + FILLING_PAGES + 1,
                ),
                sorted({min(chat_tokens, self.max_model_len), self.max_model_len}),
            )
        ] + [taken]

    @classmethod
    def of(
        cls,
        spec: CacheSpec,
        device: Pages,
        host: Pages,
        max_model_len: int,
        buffer_rows: int = 0,
    ) -> "Sizes":
        """Exactly these pages, for one rank alone."""
        return cls(
            spec=spec,
            sharding=unshared(spec),
            device=device,
            host=host,
            max_model_len=max_model_len,
            buffer_rows=buffer_rows,
        )


@dataclass(frozen=True, slots=True)
class Free:
    """Bytes that could be taken beside the model. ``device``: of the device's own memory; None: its
    tier takes host memory."""

    host: int
    device: int | None

    @property
    def of_device_tier(self) -> int:
        return self.host if self.device is None else self.device


def size(
    facts: ModelFacts,
    config: EngineConfig,
    *,
    device_free: int | None,
    weights: int = 0,
    home: Home = Home.HOST,
) -> Sizes:
    """ConfigError for what cannot be served, or does not fit. ``device_free``: bytes that the
    device has free of memory of its own; None: its tier takes host memory. ``weights``: bytes of
    that memory that the model of all ranks will take, if it is not there yet. ``home``: as in
    ``spec_for``."""
    spec = spec_for(facts, config, home)
    if reason := refusal(spec):
        raise ConfigError(f"MODEL: it cannot be served: {reason}")
    sharding = sharding_of(facts.config, spec, config.tp)
    if device_free is None:
        free = Free(max(0, free_host_bytes() - weights) // ranks_here(config), None)
    else:
        own = weights // config.tp
        left = device_free - own
        if left <= 0:
            raise ConfigError(
                f"--device {config.device}: the weights take {format_bytes(own)} and "
                f"{format_bytes(device_free)} are free on the device; allowed is a model that "
                "fits, or more ranks (--tp)"
            )
        free = Free(free_host_bytes() // ranks_here(config), left)
    return _sizes(sharding, facts, config, free)


def planned(spec: CacheSpec, facts: ModelFacts, config: EngineConfig) -> Sizes:
    """The same for another machine, and for a cache that waits for its place in the engine: this
    machine's free memory bounds nothing, and the host tier's default is its ratio."""
    sharding = sharding_of(facts.config, spec, config.tp)
    return _sizes(sharding, facts, config, Free(ANY_AMOUNT, ANY_AMOUNT))


def spec_for(facts: ModelFacts, config: EngineConfig, home: Home = Home.HOST) -> CacheSpec:
    """With the model's own page size where no flag says. ConfigError as in ``spec_of``. ``home``:
    with --sparse-offload, of the selected rows."""
    page_tokens = config.page_tokens
    if page_tokens is None:
        page_tokens = default_page_tokens(facts.config)
    config.snapshot_pages(page_tokens)  # refuses before memory is taken
    spec = spec_of(facts.config, page_tokens=page_tokens, dtype=facts.dtype)
    if not buffer_rows(facts, config):
        return spec
    if config.approximate_pages is None:
        return offloaded(spec, facts.config, home)
    if not has_pages_to_select(spec):
        raise ConfigError(
            "--approximate-pages: this model has no keys and values of its whole context, or more "
            "than those; allowed with a model like Llama"
        )
    return with_bounds(spec, config.approximate_pages)


def buffer_rows(facts: ModelFacts, config: EngineConfig) -> int:
    """Rows of a spilled request's buffer; 0 without --sparse-offload. ConfigError where the model
    has nothing that could be on the host, or selects more."""
    if not config.sparse_offload:
        return 0
    least = top_k(facts.config)
    page = config.page_tokens or default_page_tokens(facts.config)
    unit = 1  # rows of a position
    if config.approximate_pages is not None:
        if least is not None:
            raise ConfigError(
                "--approximate-pages: this model selects its rows itself; allowed with one that "
                "does not"
            )
        least, unit = config.approximate_pages * page, page
    if least is None:
        raise ConfigError(f"--sparse-offload: {_selects_nothing(facts.config)}")
    wanted = config.device_buffer_size
    if wanted is not None and wanted < least:
        raise ConfigError(
            f"--device-buffer-size {wanted}: a step selects {least} rows; allowed is that or more"
        )
    most, rows = MOST_ENTRIES * unit // page * page, 2 * least if wanted is None else wanted
    if rows > most:
        raise ConfigError(
            f"--device-buffer-size {rows}: with --page-tokens {page} allowed is {most} or less"
        )
    return rows


def _selects_nothing(config: Mapping[str, object]) -> str:
    name = str(config["model_type"])
    if name in SELECTED:
        return (
            f"no layer of this {name} has an indexer (layer_types), so that none selects rows; "
            "allowed with a model that has some"
        )
    return (
        f"model type {name!r} selects no rows that can be on the host; allowed with "
        f"{', '.join(sorted(SELECTED))}, or, approximately, with --approximate-pages"
    )


def _sizes(sharding: Sharding, facts: ModelFacts, config: EngineConfig, free: Free) -> Sizes:
    spec = sharding.spec
    max_model_len = _max_model_len(facts.max_positions, config)
    load = ExpectedLoad(
        max_running=config.max_running,
        max_model_len=max_model_len,
        chunk_tokens=config.chunk_tokens,
        chat_tokens=config.chat_tokens,
        buffer_rows=buffer_rows(facts, config) if spec.has_home_on_host else 0,
    )
    beside_bytes = offload_bytes(spec, load)
    if free.device is not None:
        free = Free(free.host, max(0, free.device - beside_bytes))
    budget = DeviceBudget.of(config.device_tier, config.device_memory_text, free.of_device_tier)
    budget_bytes = budget.size_bytes
    asked = load
    if config.max_model_len is not None and not spec.has_home_on_host:
        load = load_for_length(spec, budget_bytes, load) or load
    device = device_pages(spec, budget_bytes, load, budget.text)
    taken = _taken(spec, device, budget, free)
    left = free.host - (taken if free.device is None else 0)
    host = _host_pages(spec, device, config, max(0, left - beside_bytes))
    held = _longest_pages(spec, device, host) * spec.page_tokens
    if config.max_model_len is None:
        max_model_len = min(max_model_len, held)  # longer ones could only ever be refused
    elif max_model_len > held:
        held_and_allowed = _allowed_length(spec, load, held, budget_bytes, free.of_device_tier)
        raise ConfigError(
            f"--max-model-len {max_model_len}: --device-memory {budget.text} holds "
            f"{held_and_allowed}"
        )
    notices = (_adapted(asked, load), _notice(spec, device, load))
    return Sizes(
        spec=spec,
        sharding=sharding,
        device=device,
        host=host,
        max_model_len=max_model_len,
        notice="; ".join(filter(None, notices)) or None,
        buffer_rows=load.buffer_rows,
        beside_bytes=beside_bytes,
    )


def _taken(spec: CacheSpec, device: Pages, budget: DeviceBudget, free: Free) -> int:
    """Bytes of the device tier. ConfigError where so many are not free: of host memory the kernel
    would promise more than it has, and kill the server once pages are written."""
    taken, there = device_bytes(spec, device), free.of_device_tier
    if taken > there:
        where = "" if free.device is None else " on the device beside the model"
        raise ConfigError(
            f"--device-memory {budget.text}: the tier takes {format_bytes(taken)}, and "
            f"{format_bytes(there)} are free{where}; allowed is that or less"
        )
    return taken


def _allowed_length(
    spec: CacheSpec, load: ExpectedLoad, held: int, budget_bytes: int, free_bytes: int
) -> str:
    """What a refused length could be in its place, and what would make it fit."""
    if spec.has_home_on_host:  # where there is more than one way to hold it
        return f"{held} tokens; allowed is that or less"
    longest = longest_fitting(spec, budget_bytes, load)
    more_bytes = bytes_for_length(spec, load)
    more = f"--device-memory {more_bytes} ({format_bytes(more_bytes)}) and more"
    if more_bytes > free_bytes:
        more = f"{format_bytes(more_bytes)} for --device-memory, which are not free here"
    return f"{longest} tokens; allowed is that or less, or {more}"


def _adapted(asked: ExpectedLoad, load: ExpectedLoad) -> str | None:
    if load == asked:
        return None
    return (
        f"--max-model-len {load.max_model_len}: the device is split for conversations of "
        f"{load.chat_tokens} tokens, not of --chat-tokens {asked.chat_tokens}, or a request of "
        "that length would not fit"
    )


def offload_bytes(spec: CacheSpec, load: ExpectedLoad) -> int:
    """What offload takes beside pages, on the host and on a device with memory of its own: tables
    of buffers, whoever is spilled, and while a prompt of the longest is computed its rows of a
    layer, twice: as they are read and in their order."""
    pages = -(-load.max_model_len // spec.page_tokens)
    found = 0
    for group in spec.groups:
        if group.at_home_on_host:
            unit = 1 if bounds_pages(spec) else group.page_rows  # positions of a page
            entries = -(-load.buffer_rows // group.page_rows) * unit
            found += HotBuffers.bytes_of(entries, indexers(spec), load.max_running, pages * unit)
            found += 2 * pages * max(_layer_bytes(group))
    return found


def _layer_bytes(group: CacheGroup) -> Iterable[int]:
    """What each layer has of a page."""
    found: dict[LayerId, int] = {}
    for buffer in group.buffers:
        for layer in buffer.layers:
            found[layer] = found.get(layer, 0) + buffer.layer_bytes
    return found.values()


def _longest_pages(spec: CacheSpec, device: Pages, host: Pages) -> int:
    """Of the longest request: of what has its home on the host it fills one tier or the other."""
    longest = device[ANCHOR]
    for group in spec.groups:
        if group.at_home_on_host:
            if not host[group.id]:
                raise ConfigError("--sparse-offload: there is no host memory; allowed with some")
            longest = min(longest, max(device[group.id], host[group.id]))
    return longest


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
