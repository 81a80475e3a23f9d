"""LMCache's L1 gives the memory of its buffers to other chunks while our tasks on a slow store run.
Owns the comparison. Runs in LMCache's environment, as
``lmcache_memory.py MODEL STORE SLOW_STORE``, the latter two URLs of one store.
"""

import os
import sys

os.environ["LMCACHE_DISABLE_BANNER"] = "1"

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager

from stratakv.connect.lmcache import StrataL2
from stratakv.testing.patience import wait_until

SIZE = 1 << 20
LAYOUT = MemoryLayoutDesc([torch.Size([SIZE])], [torch.uint8])
SECONDS = 1
"""How long LMCache holds a buffer."""


def key(number):
    return ObjectKey(chunk_hash=bytes([number]) * 32, model_name="m", kv_rank=0)


def bytes_of(buffer):
    return torch.frombuffer(memoryview(buffer.byte_array).cast("B"), dtype=torch.uint8)[:SIZE]


def memory():
    """An L1 with room for two buffers, whose locks run out."""
    pool = L1MemoryManagerConfig(size_in_bytes=2 * SIZE, use_lazy=False, shm_name="")
    return L1Manager(L1ManagerConfig(pool, write_ttl_seconds=SECONDS, read_ttl_seconds=SECONDS))


def reserved(l1, one, number):
    buffer = l1.reserve_write([one], [False], LAYOUT, tag="t")[one][1]
    bytes_of(buffer).fill_(number)
    return buffer


def reused(l1, was, number):
    """Other chunks have the memory of a buffer now, all of ``number``."""
    address, others = was, []
    while (
        buffer := l1.reserve_write([key(100 + len(others))], [False], LAYOUT, tag="u")[
            key(100 + len(others))
        ][1]
    ) is not None:
        bytes_of(buffer).fill_(number)
        others.append(buffer)
    assert address in [bytes_of(one).data_ptr() for one in others], "it was not used again"
    return others


def freed(l1, address):
    """Once its lock has run out, as LMCache's eviction and its ``/clear`` do."""
    wait_until(lambda: l1.clear() or l1.get_memory_usage()[0] == 0, "the lock's end")
    return reused(l1, address, 0x55)


def unchanged(others):
    assert all(bool((bytes_of(one) == 0x55).all()) for one in others), "another chunk was changed"


def stored(adapter, count=1):
    ended = {}
    wait_until(
        lambda: ended.update(adapter.pop_completed_store_tasks()) or len(ended) == count, "stores"
    )
    return ended


def answer(adapter, task):
    answers = []
    wait_until(
        lambda: answers.append(adapter.query_load_result(task)) or answers[-1] is not None, "a load"
    )
    return answers[-1].test(0)


def main(model, store, slow_store):
    def adapter(url, **given):
        return StrataL2({"storage": url, "model": model, "engine": "none", **given})

    quick, slow = adapter(store), adapter(slow_store)
    in_time = adapter(slow_store, task_timeout_s=SECONDS / 2)
    a, b, c = key(1), key(2), key(3)

    l1 = memory()
    quick.submit_store_task([a], [reserved(l1, a, 0xAA)])
    stored(quick)

    # LMCache gives up on a load, as its prefetch controller does.
    l1 = memory()
    buffer = reserved(l1, a, 0)
    address = bytes_of(buffer).data_ptr()
    task = slow.submit_load_task([a], [buffer])
    slow.submit_unlock([a])
    l1.finish_write_and_delete([a], tag="t")
    others = reused(l1, address, 0x55)
    assert not answer(slow, task)
    unchanged(others)

    # The lock of a load's buffer runs out.
    l1 = memory()
    buffer = reserved(l1, a, 0)
    address = bytes_of(buffer).data_ptr()
    task = in_time.submit_load_task([a], [buffer])
    others = freed(l1, address)
    answer(in_time, task)
    unchanged(others)

    # That of an object that waits to be stored does.
    l1 = memory()
    reserved(l1, b, 0xBB)
    l1.finish_write([b], tag="t")
    buffer = l1.reserve_read([b])[b][1]
    address = bytes_of(buffer).data_ptr()
    slow.submit_store_task([c], [reserved(l1, c, 0xCC)])
    slow.submit_store_task([b], [buffer])
    freed(l1, address)
    stored(slow, 2)
    l1 = memory()
    buffer = reserved(l1, b, 0)
    assert answer(quick, quick.submit_load_task([b], [buffer]))
    assert bool((bytes_of(buffer) == 0xBB).all()), "another chunk was stored under this name"
    for one in (quick, slow, in_time):
        one.close()
    sys.stdout.write("every chunk is what it was\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
