"""Engines with a third tier for tests: attached to a store of the test's own, and what is in it.

``usable_end`` is the oracle: how far a prefix can be used with the objects that a store holds, one
end after the other, by ``needed`` alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from stratakv.assembly.models import EngineParts
from stratakv.assembly.stores import open_store
from stratakv.core.clock import Clock, MonotonicClock
from stratakv.core.ids import GroupId
from stratakv.core.page_keys import PageHasher
from stratakv.engine.attachment import AttachmentState, StorageCall, Verb
from stratakv.engine.loop import Engine
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import needed
from stratakv.storage.backend import ObjectKey, StorageBackend, StoreFormat
from stratakv.storage.io_worker import Backends, IoLimits, IoWorker
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.patience import wait_until
from stratakv.tree.nodes import TIERS
from tests.engines import evict, evict_device, on_device, on_storage
from tests.hit_cases import Lab, lab, last_end, prompt, spec_for

KINDS: Final = (
    "llama", "gemma3", "gpt_oss", "llama4", "deepseek_v3", "qwen3_next", "falcon_h1", "mamba2",
)  # fmt: skip
"""Full, sliding, sliding with sinks, chunked, latent, state beside attention, both in one layer,
and states below an anchor without bytes."""
QUICK: Final = ("gemma3", "qwen3_next")
"""The two of them that ``make test`` runs: with a window, and with a state."""
PATIENT: Final = {"prefetch_policy": "wait-complete", "prefetch_threshold": 1}
"""Prefetches that wait for all, however short."""


def of_each(families: Sequence[str] = KINDS, quick: Sequence[str] = QUICK) -> pytest.MarkDecorator:
    """Run for every family of ``families``; those not ``quick`` in `make test-long` alone."""
    return pytest.mark.parametrize(
        "family",
        [
            family if family in quick else pytest.param(family, marks=pytest.mark.long)
            for family in families
        ],
    )


def file_url(directory: Path, quota: str = "64MiB", more: str = "") -> str:
    return f"file://{directory}?quota={quota}{more}"


def attach(parts: EngineParts, url: str) -> IoWorker:
    """The worker of the store at ``url``, which the engine uses from now on."""
    worker = open_store(url, parts.spec, [arena.pages for arena in parts.arenas]).worker
    parts.engine.attach_storage(worker)
    return worker


def detached(engine: Engine, *, force: bool = False) -> bool:
    """Whether its store is closed; it is not while pages are being written or fetched."""

    def call(verb: Verb) -> AttachmentState:
        (report,) = engine.call_storage(StorageCall(verb, force=force))
        return report.state

    if call(Verb.DETACH) is AttachmentState.DRAINING:
        return False
    wait_until(lambda: call(Verb.LOOK) is AttachmentState.DETACHED)
    return True


def format_of(spec: CacheSpec) -> StoreFormat:
    return StoreFormat(
        spec_digest=spec.digest, page_bytes=tuple(group.page_bytes for group in spec.groups)
    )


def attach_backend(
    parts: EngineParts,
    backend: StorageBackend,
    limits: IoLimits | None = None,
    clock: Clock | None = None,
) -> IoWorker:
    """``clock``: of the back-off after a failure."""
    worker = IoWorker(
        Backends(backend, backend),
        format_of(parts.spec),
        limits or IoLimits(),
        clock or MonotonicClock(),
    )
    parts.engine.attach_storage(worker)
    return worker


@contextmanager
def storage_lab(family: str, page: int, url: str, **settings) -> Iterator[Lab]:
    """A ``lab`` whose prefetches wait for all, however short, from the store at ``url``."""
    with lab(family, page, **(PATIENT | settings)) as this:
        attach(this.parts, url)
        yield this


class Shelf(MemoryBackend):
    """Outlives the engines that close it."""

    def close(self) -> None:
        pass


def shelf_for(family: str, page: int, quota_bytes: int = 1 << 30) -> Shelf:
    return Shelf(format_of(spec_for(family, page)), quota_bytes)


@contextmanager
def shelf_lab(family: str, page: int, backend: StorageBackend, **settings) -> Iterator[Lab]:
    """The same with ``backend``; what is to be stored is stored when it is left."""
    with lab(family, page, **(PATIENT | settings)) as this:
        attach_backend(this.parts, backend)
        yield this
        settled(this)


def objects_of(this: Lab, tokens: Sequence[int], group: int, salt: str = "") -> list[ObjectKey]:
    """The names of the full pages of a prefix, in one group."""
    prefix = PageHasher(this.parts.plan.namespaces.of("", salt), this.page)
    prefix.extend(np.array(tokens, np.int32))
    return [ObjectKey(key, GroupId(group)) for key in prefix.keys]


def stored_pages(this: Lab, backend: StorageBackend, tokens: Sequence[int]) -> list[set[int]]:
    """Which pages of a prefix a store holds, by group."""
    return [
        set(np.flatnonzero(backend.contains(objects_of(this, tokens, group.id))).tolist())
        for group in this.spec.groups
    ]


def usable_end(
    this: Lab, stored: Sequence[set[int]], tokens: int, host: Sequence[int] | None = None
) -> int:
    """The longest prefix, in tokens, of a prompt of ``tokens`` that can be used with ``stored``
    pages alone; ``host``: pages by group that there is room for."""
    spec, page = this.spec, this.page

    def usable(end: int) -> bool:
        return all(
            (not group.page_bytes or set(wanted) <= stored[group.id])
            and (host is None or len(wanted) <= host[group.id])
            for group in spec.groups
            for wanted in [needed(group.retention, end, page)]
        )

    return max(end for end in range(0, last_end(tokens, page) + 1, page) if usable(end))


def evict_all(this: Lab) -> None:
    """Leave nothing on the device nor on the host."""
    evict_device(this.parts)
    for tier in reversed(TIERS):
        for group in reversed(range(len(this.spec.groups))):
            evict(this.parts, tier, group)


def prove_storage(family: str, backend: StorageBackend, page: int = 16) -> None:
    """The short proof that a family is exact through storage: stored by one engine, fetched by the
    next one, which goes on from there; and fetched again after it has lost what it had."""
    tokens = prompt(page, 1)
    end = last_end(len(tokens), page)
    with shelf_lab(family, page, backend) as this:
        reply = this.ask(tokens)
        assert reply.cached == on_device(this.spec, 0)
    with shelf_lab(family, page, backend) as this:
        assert this.ask(tokens).cached == on_storage(this.spec, end)
        assert this.ask(tokens).cached == on_device(this.spec, end)
        evict_all(this)
        turn = [*tokens, *reply.tokens, *prompt(page, 2, page + 1)]
        assert this.ask(turn).cached == on_storage(this.spec, end)
        check_sums(this)


def settled(this: Lab) -> None:
    """Wait until all that is to be stored is stored."""
    this.parts.cache.progress.settle()


def check_sums(this: Lab) -> None:
    """What was found is what was used and what was lost, each token under one reason; and so is
    what was known on any tier, where storage explains no more than what nobody else brought."""
    stats = this.parts.engine.storage_stats()
    assert stats is not None
    lost = sum(stats.lost_tokens.values())
    assert stats.tokens["hits"] + lost == stats.tokens["found"], stats
    all_tiers = this.parts.engine.stats()
    cached = all_tiers.cached_device_tokens + all_tiers.cached_host_tokens
    cached += all_tiers.cached_storage_tokens
    assert all_tiers.known_tokens == cached + sum(all_tiers.lost_tokens.values()), all_tiers
    for reason, tokens in stats.lost_tokens.items():
        assert all_tiers.lost_tokens["storage", reason] <= tokens, reason


def lost(this: Lab) -> dict[str, int]:
    """Tokens that storage had and requests did not get, by reason."""
    check_sums(this)
    stats = this.parts.engine.storage_stats()
    assert stats is not None
    return {reason: count for reason, count in stats.lost_tokens.items() if count}


def lost_alone(this: Lab) -> dict[str, int]:
    """``lost``, where no other request has brought any of it: all of it is told of the tier storage
    too, but that what landed and was not loaded is the host's loss."""
    found = lost(this)
    totals = this.parts.engine.stats().lost_tokens
    of_storage = {reason: n for (tier, reason), n in totals.items() if tier == "storage" and n}
    assert of_storage == {reason: n for reason, n in found.items() if reason != "not_loaded"}
    return found
