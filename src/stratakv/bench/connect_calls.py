# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""SGLang's storage calls alone, over our back end and its own ``file``, for ``bench connect``.

Owns a host pool of SGLang's without a model, and batches of pages that both back ends store and
read in turns, in one process, each called as SGLang's cache controller calls it. Runs in SGLang's
environment.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from stratakv.bench.connect_lives import (
    HEAD_WIDTH,
    HEADS,
    LAYERS,
    PAGE_TOKENS,
    BenchTier,
    Calls,
    Life,
    drop_cached,
)
from stratakv.bench.connect_sglang import engine_arguments, storage_config

TIERS: Final[tuple[BenchTier, ...]] = ("strata", "own")
BATCHES: Final = 16
PAGES: Final = 32
"""Of a batch: a prompt's, of 1 MiB each."""
CallRows: TypeAlias = Any
"""A tensor of the rows of pages."""
Call: TypeAlias = Callable[[list[str], CallRows], None]


def measure_calls(life: Life) -> Mapping[BenchTier, Calls]:
    """``life`` has the directory, below which each tier has one of its own."""
    import torch  # noqa: PLC0415 - takes seconds
    from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: PLC0415
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    torch.set_num_threads(1)
    arguments = ServerArgs(**engine_arguments(life))
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    host = _host_pool()
    host.kv_buffer.copy_(torch.randn_like(host.kv_buffer))
    below = Path(life.directory)
    places: dict[BenchTier, Path] = {"strata": below / "strata", "own": below / "own"}
    lives: dict[BenchTier, Life] = {}
    for tier in TIERS:
        places[tier].mkdir()
        lives[tier] = replace(life, tier=tier, directory=str(places[tier]))
    tiers: dict[BenchTier, tuple[Call, Call]] = {
        "strata": _ours(host, lives["strata"]), "own": _theirs(host, lives["own"]),
    }  # fmt: skip
    rows = [torch.arange(first, first + PAGES * PAGE_TOKENS) for first in (0, PAGES * PAGE_TOKENS)]
    found: dict[BenchTier, Calls] = {tier: Calls() for tier in TIERS}
    for batch in range(BATCHES):
        keys = [f"{batch * PAGES + at:064x}" for at in range(PAGES)]
        order = TIERS[:: 1 if batch % 2 else -1]
        for tier in order:
            _timed(found[tier].store, tiers[tier][0], keys, rows[0])
        for tier in order:
            os.sync()
            drop_cached(places[tier])
            _timed(found[tier].read, tiers[tier][1], keys, rows[1])
    return found


def _timed(into: list[tuple[float, float]], call: Call, keys: list[str], rows: CallRows) -> None:
    begun = time.perf_counter(), time.process_time()
    call(keys, rows)
    into.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))


def _host_pool() -> Any:  # noqa: ANN401 - SGLang's
    """With room for two batches."""
    import torch  # noqa: PLC0415
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: PLC0415
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: PLC0415

    device = MHATokenToKVPool(
        size=PAGES * PAGE_TOKENS, page_size=PAGE_TOKENS, layer_num=LAYERS, device="cpu",
        dtype=torch.float32, head_num=HEADS, head_dim=HEAD_WIDTH, enable_memory_saver=False,
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, host_to_device_ratio=3.0, host_size=0,
        page_size=PAGE_TOKENS, pin_memory=False, device="cpu", layout="page_first_direct",
        device_capacity_tokens=device.size, start_layer=0, end_layer=LAYERS,
    )  # fmt: skip


def _config(life: Life) -> Any:  # noqa: ANN401 - SGLang's
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: PLC0415

    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
        model_name="model", extra_config=storage_config(life),
    )  # fmt: skip


def _ours(host: Any, life: Life) -> tuple[Call, Call]:  # noqa: ANN401 - SGLang's
    from stratakv.connect.sglang import StrataStorage  # noqa: PLC0415

    backend = StrataStorage(_config(life), {})
    backend.register_mem_pool_host(host)

    def store(keys: list[str], rows: CallRows) -> None:
        assert all(backend.batch_set_v1(keys, rows))

    def read(keys: list[str], rows: CallRows) -> None:
        assert backend.batch_exists(keys) == len(keys)
        assert all(backend.batch_get_v1(keys, rows))

    return store, read


def _theirs(host: Any, life: Life) -> tuple[Call, Call]:  # noqa: ANN401 - SGLang's
    """SGLang's ``_generic_page_set`` and ``_generic_page_get`` around it."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile  # noqa: PLC0415

    backend = HiCacheFile(_config(life))

    def firsts(rows: CallRows) -> Sequence[int]:
        return rows[::PAGE_TOKENS].tolist()

    def store(keys: list[str], rows: CallRows) -> None:
        pages = [host.get_data_page(first, flat=True) for first in firsts(rows)]
        assert backend.batch_set(keys, pages)

    def read(keys: list[str], rows: CallRows) -> None:
        assert backend.batch_exists(keys) == len(keys)
        pages = [host.get_dummy_flat_data_page() for _ in keys]
        for first, page in zip(firsts(rows), backend.batch_get(keys, pages), strict=True):
            assert page is not None
            host.set_from_flat_data_page(first, page)

    return store, read
