"""What it costs to move selected rows by tokens instead of by the device's pages: from a store to
the host, and from one engine to another.

Owns the comparison. Both cuts of the same bytes take turns, so that a busy machine slows both.
"""

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from stratakv.bench.hand_offs import HandOffLoad, HandOffs
from stratakv.bench.rig import Laps, in_turn
from stratakv.core.clock import WallClock
from stratakv.core.ids import GroupId, PageKey
from stratakv.spec.derive import spec_of
from stratakv.spec.groups import CacheSpec
from stratakv.spec.offload import offloaded, selected_group
from stratakv.storage.backend import ObjectKey, ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.store import FileStore

PAGE_TOKENS: Final = 64
STORED_TOKENS: Final = 1536
STORED_LAYERS: Final = 61
HAND_OFF_LAYERS: Final = 4
HANDED_OVER: Final = 8
HANDED_OVER_PROMPT: Final = 4096
LAPS: Final = 6
_QUOTA_BYTES: Final = 4 << 30

Round: TypeAlias = Callable[[], object]
Opened: TypeAlias = Callable[[int], AbstractContextManager[tuple[int, Round]]]
"""Bytes of a round, and the round, for pages of so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSizeCase:
    """GB/s (10^9 bytes) of the same bytes, in pages of ``page_tokens`` and of one token: medians.
    ``ratio``: how many times as fast pages are, the median of neighbouring laps."""

    path: str
    page_tokens: int
    gb_s: float
    single_gb_s: float
    ratio: float


def page_size_cases() -> list[PageSizeCase]:
    return [
        _compare("storage to host", stored_rounds),
        _compare("hand-off", hand_off_rounds),
    ]


def selected_spec(layers: int, page_tokens: int) -> CacheSpec:
    """What of DeepSeek-V3.2 may be on the host, alone."""
    config = {
        "model_type": "deepseek_v32", "num_hidden_layers": layers, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 2048, "index_n_heads": 64,
        "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
        "layer_types": ["deepseek_sparse_attention"] * layers,
    }  # fmt: skip
    spec = offloaded(spec_of(config, page_tokens=page_tokens, dtype="bfloat16"), config)
    group = spec.groups[selected_group(spec)]
    return replace(spec, groups=(replace(group, id=GroupId(0), home=spec.groups[0].home),))


def _compare(path: str, opened: Opened) -> PageSizeCase:
    laps = Laps()
    with ExitStack() as stack:
        rounds = {str(size): stack.enter_context(opened(size)) for size in (PAGE_TOKENS, 1)}
        for turn in range(LAPS):
            for name, (_, work) in in_turn(list(rounds.items()), turn):
                laps.time(name, work)
        size_bytes = rounds["1"][0]
    pages, single = str(PAGE_TOKENS), "1"
    return PageSizeCase(
        path=path,
        page_tokens=PAGE_TOKENS,
        gb_s=round(size_bytes / laps.median_s(pages) / 1e9, 3),
        single_gb_s=round(size_bytes / laps.median_s(single) / 1e9, 3),
        ratio=round(laps.ratio(single, pages), 2),
    )


@contextmanager
def stored_rounds(page_tokens: int) -> Generator[tuple[int, Round]]:
    """Reads of all host pages of a prompt from files, which the kernel still has in memory."""
    spec = selected_spec(STORED_LAYERS, page_tokens)
    (group,), count = spec.groups, STORED_TOKENS // page_tokens
    size = group.page_bytes
    source = np.random.default_rng(page_tokens).integers(0, 256, (count, size), np.uint8)
    target = np.zeros_like(source)
    keys = [ObjectKey(PageKey(bytes([at % 256, at // 256] * 16)), group.id) for at in range(count)]
    form = StoreFormat(spec_digest=spec.digest, page_bytes=(size,))
    with tempfile.TemporaryDirectory(prefix="stratakv-bench-") as root:
        limits = StoreLimits(quota_bytes=_QUOTA_BYTES)
        store = FileStore(Path(root), form, limits, WallClock())
        try:
            stored = store.write(keys, list(map(memoryview, source)))
            assert set(stored) == {WriteStatus.STORED}, f"not stored: {set(stored)}"
            yield source.nbytes, partial(_read, store, keys, source, target)
        finally:
            store.close()


def _read(
    store: FileStore, keys: Sequence[ObjectKey], source: np.ndarray, target: np.ndarray
) -> None:
    target[:, 0] ^= 0xFF
    found = store.read(keys, list(map(memoryview, target)))
    assert set(found) == {ReadStatus.HIT}, f"no hits: {set(found)}"
    assert np.array_equal(target[:, 0], source[:, 0]), "bytes differ"


@contextmanager
def hand_off_rounds(page_tokens: int) -> Generator[tuple[int, Round]]:
    """Hand-offs of several prompts within this process, with all that proves them."""
    spec = selected_spec(HAND_OFF_LAYERS, page_tokens)
    load = HandOffLoad(
        spec=spec, requests=HANDED_OVER, prompt=HANDED_OVER_PROMPT, under_way=HANDED_OVER
    )
    with HandOffs.opened("loopback", load) as hand_offs:
        yield load.request_bytes * HANDED_OVER, partial(hand_offs.hand_over, HANDED_OVER)
