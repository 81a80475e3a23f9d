"""Engines over tiny models for tests: small pools, poisoned where nobody owns a page.

Two kinds of model run in them: the random transformers of ``fixtures.models``, whose logits are
recorded, and ``HeldTokens``, which computes nothing but checks every page it would have read.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from stratakv.assembly.build import DEFAULT_SOCKETS, Sockets
from stratakv.assembly.device import CPU, Device
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.models import EngineParts, assemble
from stratakv.assembly.sizing import Sizes, buffer_rows, spec_for
from stratakv.cache.records import CachedTokens, CacheUse
from stratakv.core.config import EngineConfig
from stratakv.core.ids import GroupId, LayerId, PageIds, RequestId
from stratakv.engine.attention.torch_pools import TorchPools
from stratakv.engine.batch import StepBatch
from stratakv.engine.executor import OwnTokens, Runner, TokenSource
from stratakv.engine.forward import Forward
from stratakv.engine.grammars import NO_GRAMMARS, Grammars
from stratakv.engine.huggingface.model import HuggingFaceModel
from stratakv.engine.request import FinishReason, Output, Phase, Prompt, SamplingParams
from stratakv.engine.roles import Role, UnifiedRole
from stratakv.engine.stats import RequestStatus
from stratakv.engine.verify.claims import cached_on
from stratakv.engine.verify.report import Way
from stratakv.memory.allocator import PageAllocator
from stratakv.memory.block_table import BlockTable
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec, Home
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepLive, Retention, needed
from stratakv.testing.fleet import runner
from stratakv.transfer.copier import Copier
from stratakv.transfer.cpu import DEFAULT_COPIER, CpuTransferEngine
from stratakv.tree.nodes import TIERS, Tier
from tests.fixtures.models import random_prompt


class PoisoningAllocator(PageAllocator):
    """Fills what is freed with NaN, so that a read of a page nobody owns cannot go unseen. ``peak``
    is the most pages that were out at once."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.poison = lambda pages: None
        self.peak = 0

    def alloc(self, count: int) -> PageIds | None:
        pages = super().alloc(count)
        self.peak = max(self.peak, self.capacity - self.available())
        return pages

    def free(self, pages: PageIds) -> None:
        super().free(pages)
        if len(pages):
            self.poison(pages)


@contextmanager
def small_engine(
    model: HuggingFaceModel,
    config: EngineConfig,
    device: Sequence[int],
    host: Sequence[int],
    copier: Copier = DEFAULT_COPIER,
    token_source: TokenSource | None = None,
    role: Role | None = None,
    device_kind: Device = CPU,
    grammars: Grammars = NO_GRAMMARS,
    home: Home = Home.HOST,
) -> Iterator[EngineParts]:
    """An engine with exactly these pages per group, everything unowned poisoned. ``token_source``:
    where its tokens are chosen. ``role``: None: it prefills and decodes. ``home``: of selected
    rows, with sparse offload."""
    tokens = token_source or OwnTokens()
    made = UnifiedRole if role is None else lambda: role
    sockets = Sockets(token_source=tokens, role=made, grammars=grammars)
    spec, rows = spec_for(model.facts, config, home), buffer_rows(model.facts, config)
    sizes = Sizes.of(spec, device, host, config.max_model_len or model.max_positions, rows)
    plan = EnginePlan.of(config, sizes, model.fingerprint, model.adapters.digests)
    with _assembled(model, plan, copier, sockets, device_kind) as parts:
        yield parts


@contextmanager
def _assembled(
    model: HuggingFaceModel, plan: EnginePlan, copier: Copier, sockets: Sockets, device: Device
) -> Iterator[EngineParts]:
    def transfer(*ends) -> CpuTransferEngine:
        return CpuTransferEngine(*ends, copier)

    device = replace(device, transfer=transfer, allocator=PoisoningAllocator)
    parts = assemble(model, plan, sockets, device)
    poison_unowned(parts)
    try:
        yield parts
    finally:
        parts.close()


def poison_unowned(parts: EngineParts) -> None:
    """Of an engine with ``PoisoningAllocator``: pages of both tiers hold NaN, now and whenever they
    are freed."""
    for group in parts.spec.groups:
        arena = parts.arenas[group.id]
        device, host = (allocator(parts, tier, group.id) for tier in TIERS)
        device.poison = lambda ids, g=group.id: parts.pools.poison(g, ids)
        host.poison = arena.poison
        device.poison(np.arange(device.capacity, dtype=np.int32))
        host.poison(np.arange(host.capacity, dtype=np.int32))


def allocator(parts: EngineParts, tier: Tier, group: int) -> PoisoningAllocator:
    return parts.cache.tiers.pools.tiers[tier][group]


def evict(parts: EngineParts, tier: Tier, group: int, keep: int = 0) -> None:
    """Take all but the ``keep`` warmest pages of a group that nothing pins off a tier."""
    parts.cache.progress.settle()
    pools = parts.cache.tiers.pools
    count = parts.cache.tiers.tree.eviction.evictable(tier, GroupId(group)) - keep
    pools.make_room(tier, GroupId(group), pools.tiers[tier][group].available() + max(0, count))


def evict_device(parts: EngineParts) -> None:
    """Leave nothing on the device but what the host has no copy of."""
    for group in range(1, len(parts.spec.groups)):
        evict(parts, Tier.DEVICE, group)
    evict(parts, Tier.DEVICE, 0)


def computing(parts: EngineParts) -> list[RequestStatus]:
    """Those that run and compute, the youngest last."""
    found = parts.engine.statuses()
    return [one for one in found if one.phase in (Phase.PREFILLING, Phase.DECODING)]


def retract_youngest(parts: EngineParts) -> None:
    parts.engine.retract(computing(parts)[-1].id)


def all_free(parts: EngineParts) -> bool:
    return all(pool.free == pool.total for pool in parts.cache.tiers.pools.stats())


def assert_nothing_left(parts: EngineParts) -> None:
    """Once all requests have ended and what is cached was flushed."""
    drain(parts)
    stats = parts.engine.stats()
    assert (stats.waiting, stats.running) == (0, 0)
    assert parts.engine.flush()
    parts.engine.check()
    assert all_free(parts)


# -- requests ------------------------------------------------------------------------------------


def greedy(
    name: str, tokens: Sequence[int], count: int, salt: str = "", adapter: str = ""
) -> Prompt:
    return Prompt(
        id=RequestId(name),
        tokens=np.array(tokens, np.int32),
        sampling=SamplingParams(max_tokens=count, temperature=0.0),
        salt=salt,
        adapter=adapter,
    )


def asked_of_lengths(name: str, count: int, new_tokens: int) -> list[Prompt]:
    """Prompts whose answers end one after the other, with log-probabilities."""
    prompts = [random_prompt(seed, 20 + 9 * seed) for seed in range(count)]
    made = [greedy(f"{name} {at}", one, new_tokens + 2 * at) for at, one in enumerate(prompts)]
    return [replace(one, sampling=replace(one.sampling, logprobs=1)) for one in made]


def run(parts: EngineParts, *prompts: Prompt) -> dict[str, list[Output]]:
    """Serve ``prompts`` together to their ends; the outputs of each, in order."""
    out: dict[str, list[Output]] = {prompt.id: [] for prompt in prompts}
    for prompt in prompts:
        parts.engine.submit(prompt)
    for output in drain(parts):
        out[output.request].append(output)
    return out


def drain(parts: EngineParts) -> list[Output]:
    """Step until nothing is left to do; what came out."""
    out: list[Output] = []
    while parts.engine.has_work():
        out += parts.engine.step()
    parts.engine.check()
    return out


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    return [output.token for output in outputs if output.token is not None]


def logprobs_of(outputs: Sequence[Output]) -> list[float]:
    """Of the tokens that were chosen."""
    return [output.logprob.chosen for output in outputs if output.logprob is not None]


def ended(outputs: Sequence[Output]) -> FinishReason | None:
    """The finish of the last output; no other one may have any."""
    assert all(output.finish is None for output in outputs[:-1]), "news after the end"
    return outputs[-1].finish


# -- what was cached -----------------------------------------------------------------------------


def span_tokens(spec: CacheSpec, end_tokens: int) -> tuple[int, ...]:
    """Tokens of the pages that each group needs to continue at ``end_tokens``."""
    page = spec.page_tokens
    return tuple(len(needed(g.retention, end_tokens, page)) * page for g in spec.groups)


def cached(
    groups_device: Sequence[int] = (),
    groups_host: Sequence[int] = (),
    groups_storage: Sequence[int] = (),
    *,
    device: int = 0,
    host: int = 0,
    storage: int = 0,
) -> CachedTokens:
    """What is not named is 0; one of the groups must be."""
    groups = max(map(len, (groups_device, groups_host, groups_storage)))
    by_tier = (
        tuple(tier) or (0,) * groups for tier in (groups_device, groups_host, groups_storage)
    )
    return CachedTokens(
        device=device,
        host=host,
        storage=storage,
        **dict(zip(("groups_device", "groups_host", "groups_storage"), by_tier, strict=True)),
    )


def on_device(spec: CacheSpec, end_tokens: int) -> CachedTokens:
    """A prefix of ``end_tokens`` that lay on the device."""
    return cached_on(spec, end_tokens, Way.DEVICE)


def kept_out(spec: CacheSpec) -> CachedTokens:
    """A request that could not use the cache at all, as under ``--cache off``."""
    return replace(on_device(spec, 0), use=CacheUse.NOTHING)


def on_host(spec: CacheSpec, end_tokens: int) -> CachedTokens:
    """A prefix of ``end_tokens`` of which every page came from the host."""
    return cached_on(spec, end_tokens, Way.HOST)


def on_storage(spec: CacheSpec, end_tokens: int) -> CachedTokens:
    """A prefix of ``end_tokens`` of which every page was fetched; a page without bytes counts."""
    return cached_on(spec, end_tokens, Way.STORAGE)


# -- recording -----------------------------------------------------------------------------------


class RecordingRunner:
    """Passes every batch on, and keeps the logits of each sampled token by request."""

    def __init__(self, parts: EngineParts) -> None:
        self._engine = parts.engine
        self._runner, self._inner = parts.runner, parts.runner.forward
        parts.runner.forward = self.forward
        self.logits: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.batches: list[StepBatch] = []

    def forward(self, batch: StepBatch) -> Forward:
        found = self._inner(batch)
        self.batches.append(batch)
        names = {one.row: one.id for one in self._engine.statuses()}
        for row, scores in zip(batch.rows[batch.sampled].tolist(), found.logits, strict=True):
            self.logits[names[row]].append(scores.clone())
        return found

    def stop(self) -> None:
        """Record no more."""
        self._runner.forward = self._inner

    @property
    def computed_tokens(self) -> int:
        return sum(int(batch.counts.sum()) for batch in self.batches)


# -- a model that only checks its pages ----------------------------------------------------------

VOCABULARY = runner.VOCABULARY
next_token = runner.next_token
expected_tokens = runner.expected_tokens


def token_spec(page_tokens: int, *rules: Retention) -> CacheSpec:
    """An anchor and one group per rule, each one layer that keeps a token id per position, or, of
    a group with a live page, a state."""
    groups = [
        CacheGroup(
            id=GroupId(index),
            name=f"g{index}",
            retention=rule,
            buffers=(_buffer(index, rule, page_tokens),),
        )
        for index, rule in enumerate((KeepAll(), *rules))
    ]
    return CacheSpec(page_tokens=page_tokens, groups=tuple(groups))


def without_anchor_bytes(spec: CacheSpec) -> CacheSpec:
    """The spec of a model without attention: its anchor only says which prefixes there are."""
    anchor, *others = spec.groups
    return replace(spec, groups=(replace(anchor, buffers=()), *others))


def _buffer(index: int, rule: Retention, page_tokens: int) -> BufferSpec:
    state = isinstance(rule, KeepBoundary | KeepLive)
    return BufferSpec(
        name="tokens",
        layers=(LayerId(index),),
        rows_per_page=1 if state else page_tokens,
        row_shape=(2,) if state else (1,),
        dtype="float32",
    )


class HeldTokens(runner.TokenRunner):
    """The simulation's model over real pages: the next token is a function of the whole prefix as
    the anchor's pages hold it; AssertionError where another group's pages disagree with them.
    ``pages_held`` is the most pages that any one row of the block table ever named, per group."""

    def __init__(self, spec: CacheSpec, pools: TorchPools, tables: BlockTable) -> None:
        super().__init__(spec, [_rows(group, pools) for group in spec.groups], tables)
        self._spec = spec
        self.pages_held = [0] * len(spec.groups)

    def forward(self, batch: StepBatch) -> Forward:
        for group, held in enumerate(self.pages_held):
            most = int((self._tables.pages(GroupId(group)) >= 0).sum(axis=1).max())
            most += int((self._tables.slots.own(GroupId(group)) >= 0).any())
            self.pages_held[group] = max(held, most)
        return super().forward(replace(batch, adapters=None))  # it says the same under all of them


def _rows(group: CacheGroup, pools: TorchPools) -> np.ndarray:
    if not group.buffers:
        return np.empty((0, 0, 0), np.float32)
    return pools.layer(group.id, "tokens", LayerId(group.id)).numpy()


@contextmanager
def token_engine(
    spec: CacheSpec,
    config: EngineConfig,
    device: Sequence[int],
    host: Sequence[int],
    copier: Copier = DEFAULT_COPIER,
    digests: Mapping[str, bytes] | None = None,
    make_runner: Callable[[CacheSpec, TorchPools, BlockTable], Runner] = HeldTokens,
    sockets: Sockets = DEFAULT_SOCKETS,
) -> Iterator[EngineParts]:
    """An engine over ``HeldTokens``: real pages, tree, copies and scheduling, no arithmetic.
    ``digests``: of adapters that it says it has, by name."""
    model = SimpleNamespace(
        device=torch.device("cpu"),
        fingerprint=b"tokens",
        max_positions=4096,
        config={"model_type": "tokens"},
        adapters=SimpleNamespace(digests=digests or {}),
    )

    def made(_model, spec, pools, tables, _kernels, _host_rows) -> Runner:
        return make_runner(spec, pools, tables)

    sizes = Sizes.of(spec, device, host, config.max_model_len or model.max_positions)
    plan = EnginePlan.of(config, sizes, model.fingerprint, model.adapters.digests)
    with _assembled(
        model, plan, copier, sockets, replace(CPU, runner=made, kernels=lambda _: None)
    ) as parts:
        yield parts
