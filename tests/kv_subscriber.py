"""A router's end of KV events: vLLM's classes, a subscriber that counts, and who asks for a replay.

The classes have the fields and options of vLLM's ``distributed/kv_events.py`` in August 2026, its
newest ones included, so that whatever decodes there decodes here.
"""

import time
from typing import Any, Self

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)
WAIT_MS = 5000


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(type=KVEventBatch)


def decode(payload: bytes) -> KVEventBatch:
    return _decoder.decode(payload)


class Subscriber:
    """``late`` joined after something was published: it must ask for what it has missed."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.sub.connect(endpoint)
        self._replay = replay
        self.batches: dict[int, KVEventBatch] = {}
        self.topics: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self.context.destroy(linger=0)

    def receive(self, wait_ms: int = WAIT_MS) -> int | None:
        """The number of the next batch; None where none comes."""
        if not self.sub.poll(wait_ms):
            return None
        return self._note(self.sub.recv_multipart())

    def missing(self) -> list[int]:
        """Numbers up to the last one seen that never came."""
        return sorted(set(range(max(self.batches, default=-1) + 1)) - self.batches.keys())

    def ask_again(self, first: int, sleep_s: float = 0.0) -> list[int]:
        """Replay from ``first`` on, read after ``sleep_s``; the numbers that came."""
        asks = self.context.socket(zmq.DEALER)
        asks.connect(self._replay)
        asks.send_multipart((b"", first.to_bytes(8, "big")))
        time.sleep(sleep_s)
        came = []
        while asks.poll(WAIT_MS):
            empty, *frames = asks.recv_multipart()
            assert empty == b""
            if frames == [b"", END, b""]:
                asks.close(linger=0)
                return came
            came.append(self._note(frames))
        raise AssertionError("a replay had no end")

    def _note(self, frames: list[bytes]) -> int:
        topic, number, payload = frames
        assert len(number) == 8
        self.topics.add(topic.decode())
        found = int.from_bytes(number, "big")
        self.batches[found] = decode(payload)
        return found
