"""Engines over tiny models for tests: small pools, poisoned where nobody owns a page.

Two kinds of model run in them: the random transformers of ``fixtures.models``, whose logits are
recorded, and ``TokenRunner``, which computes nothing but checks every page it would have read.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from stratakv.cache.records import CachedTokens
from stratakv.core.config import EngineConfig
from stratakv.core.ids import GroupId, LayerId, PageIds, RequestId
from stratakv.engine.batch import StepBatch
from stratakv.engine.loop import Runner
from stratakv.engine.model import HuggingFaceModel
from stratakv.engine.request import FinishReason, Output, Prompt, SamplingParams
from stratakv.memory.allocator import PageAllocator
from stratakv.memory.block_table import BlockTable
from stratakv.memory.device_pools import DevicePools
from stratakv.serve import wiring
from stratakv.spec.derive import spec_of
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll, KeepBoundary, KeepLive, Retention, needed
from stratakv.transfer.copier import Copier
from stratakv.transfer.cpu import DEFAULT_COPIER, CpuTransferEngine
from stratakv.tree.nodes import TIERS, Tier


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
) -> Iterator[wiring.EngineParts]:
    """An engine with exactly these pages per group, everything unowned poisoned."""
    spec = spec_of(model.config, page_tokens=config.page_tokens, dtype=model.dtype)
    with _assembled(model, spec, config, (device, host), copier) as parts:
        yield parts


@contextmanager
def _assembled(
    model: HuggingFaceModel,
    spec: CacheSpec,
    config: EngineConfig,
    pages: tuple[Sequence[int], Sequence[int]],
    copier: Copier,
) -> Iterator[wiring.EngineParts]:
    def transfer(*ends) -> CpuTransferEngine:
        return CpuTransferEngine(*ends, copier)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(wiring, "PageAllocator", PoisoningAllocator))
        patches.enter_context(mock.patch.object(wiring, "CpuTransferEngine", transfer))
        parts = wiring.assemble(
            model, spec, config, pages, config.max_model_len or model.max_positions
        )
    for group in spec.groups:
        arena = parts.arenas[group.id]
        device, host = (allocator(parts, tier, group.id) for tier in TIERS)
        device.poison = lambda ids, g=group.id: parts.pools.poison(g, ids)
        host.poison = arena.poison
        device.poison(np.arange(device.capacity, dtype=np.int32))
        host.poison(np.arange(host.capacity, dtype=np.int32))
    try:
        yield parts
    finally:
        parts.close()


def allocator(parts: wiring.EngineParts, tier: Tier, group: int) -> PoisoningAllocator:
    return parts.cache._pools.tiers[tier][group]


def evict(parts: wiring.EngineParts, tier: Tier, group: int, keep: int = 0) -> None:
    """Take all but the ``keep`` warmest pages of a group that nothing pins off a tier."""
    parts.cache.settle()
    pools = parts.cache._pools
    count = parts.cache._tree.evictable(tier, GroupId(group)) - keep
    pools.make_room(tier, GroupId(group), pools.tiers[tier][group].available() + max(0, count))


def evict_device(parts: wiring.EngineParts) -> None:
    """Leave nothing on the device but what the host has no copy of."""
    for group in range(1, len(parts.spec.groups)):
        evict(parts, Tier.DEVICE, group)
    evict(parts, Tier.DEVICE, 0)


def all_free(parts: wiring.EngineParts) -> bool:
    return all(pool.free == pool.total for pool in parts.cache.stats())


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


def run(parts: wiring.EngineParts, *prompts: Prompt) -> dict[str, list[Output]]:
    """Serve ``prompts`` together to their ends; the outputs of each, in order."""
    out: dict[str, list[Output]] = {prompt.id: [] for prompt in prompts}
    for prompt in prompts:
        parts.engine.submit(prompt)
    for output in drain(parts):
        out[output.request].append(output)
    return out


def drain(parts: wiring.EngineParts) -> list[Output]:
    """Step until nothing is left to do; what came out."""
    out: list[Output] = []
    while parts.engine.has_work():
        out += parts.engine.step()
    parts.engine.check()
    return out


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    return [output.token for output in outputs if output.token is not None]


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
    return cached(span_tokens(spec, end_tokens), device=end_tokens)


def on_host(spec: CacheSpec, end_tokens: int) -> CachedTokens:
    """A prefix of ``end_tokens`` of which every page came from the host."""
    return cached((), span_tokens(spec, end_tokens), host=end_tokens)


def on_storage(spec: CacheSpec, end_tokens: int) -> CachedTokens:
    """A prefix of ``end_tokens`` of which every page was fetched; a page without bytes counts."""
    return cached((), (), span_tokens(spec, end_tokens), storage=end_tokens)


# -- recording -----------------------------------------------------------------------------------


class RecordingRunner:
    """Passes every batch on, and keeps the logits of each sampled token by request."""

    def __init__(self, parts: wiring.EngineParts) -> None:
        self._engine = parts.engine
        self._inner = parts.engine._runner
        parts.engine._runner = self
        self.logits: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.batches: list[StepBatch] = []

    def forward(self, batch: StepBatch) -> torch.Tensor:
        logits = self._inner.forward(batch)
        self.batches.append(batch)
        for row, scores in zip(batch.rows[batch.sampled].tolist(), logits, strict=True):
            self.logits[self._engine._running.by_row[row].id].append(scores.clone())
        return logits

    @property
    def computed_tokens(self) -> int:
        return sum(int(batch.counts.sum()) for batch in self.batches)


# -- a model that only checks its pages ----------------------------------------------------------

VOCABULARY = 97


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


def state_of(rule: Retention, tokens: np.ndarray, page_tokens: int) -> list[float]:
    """What a state group holds after ``tokens``: how many it has seen, and a digest of them. The
    scratch of ``KeepLive`` is empty at every page boundary."""
    if isinstance(rule, KeepLive):
        tokens = tokens[len(tokens) // page_tokens * page_tokens :]
    return [float(len(tokens)), float(next_token(tokens))]


def next_token(tokens: np.ndarray, start: int = 0) -> int:
    """What ``TokenRunner`` says after ``tokens``: depends on every one and on its place. A sum over
    the tokens: of those from ``start`` on it is their share."""
    places = np.arange(start + 1, start + len(tokens) + 1, dtype=np.int64)
    return int((tokens.astype(np.int64) * (places * 31 % 89 + 1)).sum() % VOCABULARY)


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(np.array(tokens)))
    return tokens[len(prompt) :]


class TokenRunner:
    """Keeps token ids where keys and values would lie, and reads them back as attention would.

    The next token is a function of the whole prefix as the anchor's pages hold it; AssertionError
    where another group's pages disagree with them. ``pages_held`` is the most pages that any one
    row of the block table ever named, per group.
    """

    def __init__(self, spec: CacheSpec, pools: DevicePools, tables: BlockTable) -> None:
        self._spec = spec
        self._tables = tables
        self._pages: dict[int, np.ndarray] = {}
        for group in spec.groups:
            if group.buffers:
                view = pools.layer(group.id, "tokens", LayerId(group.id)).numpy()
                self._pages[group.id] = view[:, 0] if group.stateful else view[..., 0]
        self.pages_held = [0] * len(spec.groups)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        answers: list[int] = []
        for group in self._pages if batch.gate else ():
            batch.gate.wait(LayerId(group))
        for group, held in enumerate(self.pages_held):
            most = int((self._tables.pages(GroupId(group)) >= 0).sum(axis=1).max())
            most += int((self._tables.slots.own(GroupId(group)) >= 0).any())
            self.pages_held[group] = max(held, most)
        offsets = np.cumsum(batch.counts) - batch.counts
        for at, row in enumerate(batch.rows.tolist()):
            start, count = int(batch.starts[at]), int(batch.counts[at])
            answer = self._continue(row, start, batch.tokens[offsets[at] :][:count])
            if batch.sampled[at]:
                answers.append(answer)
        return torch.nn.functional.one_hot(
            torch.tensor(answers, dtype=torch.int64), VOCABULARY
        ).float()

    def _continue(self, row: int, start: int, tokens: np.ndarray) -> int:
        self._write(row, start, tokens)
        return next_token(self._read(row, start, start + len(tokens)))

    def _slots(self, row: int, group: int, span: range) -> tuple[np.ndarray, np.ndarray]:
        index, offset = np.divmod(np.array(span), self._spec.page_tokens)
        pages = self._tables.pages(GroupId(group))[row, index]
        assert pages.min(initial=0) >= 0, f"row {row} lacks pages of group {group}"
        return pages, offset

    def _write(self, row: int, start: int, tokens: np.ndarray) -> None:
        for group, pages in self._pages.items():
            if not self._spec.groups[group].stateful:
                pages[self._slots(row, group, range(start, start + len(tokens)))] = tokens

    def _read(self, row: int, start: int, end: int) -> np.ndarray:
        prefix = self._pages[0][self._slots(row, 0, range(end))]
        assert not np.isnan(prefix).any(), f"row {row} reads pages nobody owns"
        page = self._spec.page_tokens
        for group in self._spec.groups[1:]:
            if group.stateful:
                self._advance(row, group, prefix, start)
                continue
            first = needed(group.retention, start, page).start * page
            seen = self._pages[group.id][self._slots(row, group.id, range(first, end))]
            assert (seen == prefix[first:]).all(), f"group {group.name} holds another prefix"
        return prefix

    def _advance(self, row: int, group: CacheGroup, prefix: np.ndarray, start: int) -> None:
        """Check the state before ``start`` and write the one after ``prefix``."""
        page = self._spec.page_tokens
        before, found = state_of(group.retention, prefix[:start], page), self._state(row, group)
        assert found == before, f"group {group.name}: state {found} at {start}, not {before}"
        self._keep_state(row, group, state_of(group.retention, prefix, page))

    def _state(self, row: int, group: CacheGroup) -> list[float]:
        source = self._tables.slots.source(group.id).item(row)
        return [0.0, 0.0] if source < 0 else self._pages[group.id][source].tolist()

    def _keep_state(self, row: int, group: CacheGroup, state: list[float]) -> None:
        own = self._tables.slots.own(group.id).item(row)
        assert own >= 0, "nowhere to write the state"
        self._pages[group.id][own] = state


class StateRunner(TokenRunner):
    """For an anchor without bytes and groups of states: what is known of a prefix is what they say
    of it."""

    def _continue(self, row: int, start: int, tokens: np.ndarray) -> int:
        digests: set[int] = set()
        for group in self._spec.groups[1:]:
            seen, digest = self._state(row, group)
            assert seen == start, f"group {group.name}: a state of {seen} tokens at {start}"
            after = (int(digest) + next_token(tokens, start)) % VOCABULARY
            self._keep_state(row, group, [float(start + len(tokens)), float(after)])
            digests.add(after)
        assert len(digests) == 1, f"row {row}: its states disagree"
        return digests.pop()


def token_runner(spec: CacheSpec, pools: DevicePools, tables: BlockTable) -> TokenRunner:
    return (TokenRunner if spec.groups[0].buffers else StateRunner)(spec, pools, tables)


@contextmanager
def token_engine(
    spec: CacheSpec,
    config: EngineConfig,
    device: Sequence[int],
    host: Sequence[int],
    copier: Copier = DEFAULT_COPIER,
    digests: Mapping[str, bytes] | None = None,
    make_runner: Callable[[CacheSpec, DevicePools, BlockTable], Runner] = token_runner,
) -> Iterator[wiring.EngineParts]:
    """An engine over ``TokenRunner``: real pages, tree, copies and scheduling, no arithmetic.
    ``digests``: of adapters that it says it has, by name."""
    model = SimpleNamespace(
        device=torch.device("cpu"),
        fingerprint=b"tokens",
        max_positions=4096,
        config={"model_type": "tokens"},
        adapters=SimpleNamespace(digests=digests or {}),
    )

    def runner(_model, *pages) -> Runner:
        return make_runner(*pages)

    patch = mock.patch.object(wiring, "ModelRunner", runner)
    with patch, _assembled(model, spec, config, (device, host), copier) as parts:
        yield parts


@dataclass(frozen=True)
class Answer:
    """What an engine said to one prompt; ``logits`` [n, vocab] belong to ``tokens``."""

    tokens: list[int]
    logits: torch.Tensor
    cached: CachedTokens
