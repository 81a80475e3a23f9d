"""Pages of SGLang's own host pools through our back end and back, in every layout that a pool has.

Owns pools of few pages with random bytes, and the comparison. Runs in SGLang's environment on a
CPU, as ``sglang_pools.py CASE ANSWERS``, with ``sglang_cpu`` on the path.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.memory_pool_host import (
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    LogicalHostPool,
)
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

from stratakv.connect.sglang import StrataStorage

ROWS, PAGES, LAYERS = 64, 8, 3
"""Of a page; of a pool; of each pool."""
KEYS = [f"{number:064x}" for number in range(PAGES)]
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
DEVICE = {"size": ROWS * 4, "page_size": ROWS, "layer_num": LAYERS, "device": "cpu"}
ON_CPU = {"pin_memory": False, "device": "cpu"}
SIZED = {"host_to_device_ratio": 2.0, "host_size": 0, "page_size": ROWS, **ON_CPU}


def sized(pool, layout):
    return {
        **SIZED, "layout": layout, "device_capacity_tokens": pool.size,
        "start_layer": 0, "end_layer": LAYERS,
    }  # fmt: skip


def mha(layout, dtype=torch.bfloat16):
    pool = MHATokenToKVPool(
        **DEVICE, dtype=dtype, head_num=2, head_dim=16, enable_memory_saver=False
    )
    info = pool.get_device_pool_infos()[0].buffer_info
    return MHATokenToKVPoolHost(info, **sized(pool, layout))


def latents(pool, layout):
    info = pool.get_device_pool_infos()[0].buffer_info
    return MLATokenToKVPoolHost(info, **sized(pool, layout), target_layer_num=LAYERS)


def mla(layout):
    pool = MLATokenToKVPool(
        **DEVICE, dtype=torch.bfloat16, kv_lora_rank=32, qk_rope_head_dim=16,
        enable_memory_saver=False,
    )  # fmt: skip
    return latents(pool, layout)


def indexer(layout):
    pool = DSATokenToKVPool(
        **DEVICE, dtype=torch.bfloat16, kv_lora_rank=32, qk_rope_head_dim=16, kv_cache_dim=48,
        index_head_dim=128, enable_memory_saver=False,
    )  # fmt: skip
    decl = make_dsa_indexer_pool_decl(pool)
    return DSAIndexerPoolHost(decl, latents(pool, layout), **ON_CPU)


def mamba(layout, temporal=torch.float32, conv=torch.float32):
    if layout == "layer_first":
        return None
    states = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, PAGES, 4, 8, 8, dtype=temporal),
        conv=(torch.zeros(LAYERS, PAGES, 24, 3, dtype=conv),),
    )
    return MambaPoolHost(states, 2.0, 0, device_capacity=PAGES, layout=layout, **ON_CPU)


def paged(layout, row_bytes=584):
    buffers = [torch.zeros(PAGES, ROWS * row_bytes, dtype=torch.uint8) for _ in range(LAYERS)]
    return DeepSeekV4PagedHostPool(
        "paged", buffers, ROWS * row_bytes, PAGES, ROWS, layout=layout, pin_memory=False
    )


def states(layout):
    pools = [
        SimpleNamespace(
            ring_size=8, kv_score_buffer=SimpleNamespace(kv_score=torch.zeros(PAGES * 8, 2, 16))
        )
        for _ in range(LAYERS)
    ]
    return DeepSeekV4StateHostPool("state", pools, PAGES, ROWS, layout=layout, pin_memory=False)


def fill(pool, generator):
    """Other random bytes in every page; what each is now."""
    for at in range(PAGES):
        sample = pool.get_dummy_flat_data_page()
        noise = torch.randint(0, 256, (sample.nbytes,), dtype=torch.uint8, generator=generator)
        pool.set_from_flat_data_page(at * pool.page_size, noise.view(sample.dtype))
    return bytes_of(pool)


def bytes_of(pool):
    pages = [pool.get_data_page(at * pool.page_size, flat=True) for at in range(PAGES)]
    return torch.stack([page.contiguous().view(torch.uint8) for page in pages])


def indices(pool, *pages):
    rows = torch.arange(pool.page_size)
    return torch.cat([page * pool.page_size + rows for page in pages])


class Storage:
    """A back end as SGLang's controller makes it. ``latent``: all ranks have the same KV."""

    def __init__(self, case, *, latent):
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=latent, enable_storage_metrics=False, is_page_first_layout=True,
            model_name="model", extra_config=case["extra"],
        )  # fmt: skip
        self.backend = StrataStorage(config, {})

    def attach(self, kv, **beside):
        self.backend.register_mem_pool_host(kv)
        self.backend.register_mem_host_pool_v2(kv, PoolName.KV)
        for name, pool in beside.items():
            self.backend.register_mem_host_pool_v2(pool, PoolName(name))
        self.backend.on_host_pools_registered()
        return self.backend


def round_trip(backend, name, pool, generator):
    """Pages come back elsewhere, byte by byte, and nothing beside them changes."""
    sent = fill(pool, generator)
    stored = backend.batch_set_v2([PoolTransfer(name, indices(pool, 1, 3, 4), keys=KEYS[:3])])
    assert stored == {name: [True] * 3}, (name, stored)
    before = fill(pool, generator)
    asked = PoolTransfer(name, indices(pool, 6, 0, 2, 5), keys=KEYS[:4])
    loaded = backend.batch_get_v2([asked])
    assert loaded == {name: [True] * 3 + [False]}, (name, loaded)
    before[[6, 0, 2]] = sent[[1, 3, 4]]
    assert torch.equal(bytes_of(pool), before), name
    return 3 * sent.shape[1]


def every_pool(case, generator):
    """Each pool alone, in each layout; what another layout has stored is another's."""
    pools = {
        "mha": mha, "mla": mla, "indexer": indexer, "mamba": mamba, "paged": paged,
        "state": states,
    }  # fmt: skip
    done = {}
    for name, make in pools.items():
        for layout in LAYOUTS:
            pool = make(layout)
            if pool is not None:
                backend = Storage(case, latent=False).attach(pool)
                assert backend.batch_exists(KEYS) == 0, (name, layout)
                done[f"{name} {layout}"] = round_trip(backend, PoolName.KV, pool, generator)
                backend.close()
    return done


def deepseek_v4(case, generator):
    """Its anchor has no bytes: a page is there once it was stored, and what counts lies beside."""
    beside = {
        PoolName.SWA: paged("page_first_direct", 520),
        PoolName.DEEPSEEK_V4_C4: paged("page_first_direct"),
        PoolName.DEEPSEEK_V4_C4_INDEXER: paged("page_first_direct", 132),
        PoolName.DEEPSEEK_V4_C128: paged("page_first_direct", 40),
        PoolName.DEEPSEEK_V4_C4_STATE: states("page_first_direct"),
    }
    anchor = LogicalHostPool(PAGES * ROWS, ROWS, layout="page_first_direct")
    named = {str(name): pool for name, pool in beside.items()}
    backend = Storage(case, latent=True).attach(anchor, **named)
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_set_v1(KEYS[:6], indices(anchor, *range(6))) == [True] * 6
    assert backend.batch_exists(KEYS) == 6
    assert backend.batch_get_v1(KEYS[:7], indices(anchor, *range(7))) == [True] * 6 + [False]
    moved = sum(round_trip(backend, name, pool, generator) for name, pool in beside.items())
    trailing = (PoolName.SWA, PoolName.DEEPSEEK_V4_C4_STATE)
    asked = [
        PoolTransfer(
            name, keys=KEYS[:1],
            hit_policy=PoolHitPolicy.TRAILING_PAGES if name in trailing
            else PoolHitPolicy.ALL_PAGES,
        )
        for name in beside
    ]  # fmt: skip
    found = backend.batch_exists_v2(KEYS, asked)
    assert found.kv_hit_pages == 3, found
    assert found.restorable_prefix_pages == [1, 2, 3], found
    assert found.extra_pool_hit_pages == {"kv": 6} | {str(name): 3 for name in beside}, found
    assert backend.batch_set(KEYS[6:7], [anchor.get_data_page(0)])
    page = anchor.get_dummy_flat_data_page()
    assert backend.batch_get(KEYS[6:8], [page, page]) == [page, None]
    backend.close()
    return moved


def hybrid(case, generator):
    """States of another dtype that are as wide never hit."""
    one, other = torch.bfloat16, torch.float16
    moved = {}
    for temporal, conv in ((one, one), (other, one), (one, other)):
        pool = mamba("page_first_direct", temporal, conv)
        backend = Storage(case, latent=False).attach(mha("page_first_direct"), mamba=pool)
        asked = PoolTransfer(PoolName.MAMBA, indices(pool, 0), keys=KEYS[:1])
        assert backend.batch_get_v2([asked]) == {PoolName.MAMBA: [False]}, (temporal, conv)
        moved[f"hybrid {temporal} {conv}"] = round_trip(backend, PoolName.MAMBA, pool, generator)
        backend.close()
    return moved


def main(case):
    torch.set_num_threads(1)
    arguments = ServerArgs(**case["engine"])
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    generator = torch.Generator().manual_seed(3)
    return {
        **every_pool(case, generator), **hybrid(case, generator),
        "v4": deepseek_v4(case, generator),
    }  # fmt: skip


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
