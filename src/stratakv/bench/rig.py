"""What the benches have in common: contenders in turn and their clocks, one thread, quiet logs,
greedy requests, and what an engine is sized by.

Owns how a ratio comes about. Must not know what is compared with what.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TypeVar

import torch

from stratakv.assembly.stores import open_store
from stratakv.core.config import EngineConfig
from stratakv.core.ids import RequestId, TokenIds
from stratakv.engine.loop import Engine
from stratakv.engine.request import Prompt, SamplingParams
from stratakv.spec.budget import ExpectedLoad, device_bytes, pages_beside
from stratakv.spec.groups import CacheSpec

Contender = TypeVar("Contender")


def seconds_of(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def in_turn(contenders: Sequence[Contender], turn: int) -> Sequence[Contender]:
    """Who comes second meets what the first has left in the caches: nobody always is."""
    return contenders[:: 1 if turn % 2 else -1]


class Laps:
    """Seconds of each contender, lap by lap. The first one does not count: it pays for what is
    imported and allocated, and warms what the machine keeps."""

    def __init__(self) -> None:
        self._laps_s: dict[str, list[float]] = defaultdict(list)

    def add(self, name: str, taken_s: float) -> None:
        self._laps_s[name].append(taken_s)

    def time(self, name: str, work: Callable[[], object]) -> None:
        self.add(name, seconds_of(work))

    def median_s(self, name: str) -> float:
        return median(self._laps_s[name][1:])

    def ratio(self, name: str, other: str) -> float:
        """Of one's seconds to the other's: the median over laps, each by itself, since a machine
        that is busy for a while slows both."""
        laps = zip(self._laps_s[name][1:], self._laps_s[other][1:], strict=True)
        return median(one_s / other_s for one_s, other_s in laps)


@contextmanager
def one_thread() -> Generator[None]:
    """Torch's threads would share the cores with what is measured beside them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def errors_alone(name: str) -> Generator[None]:
    """Of the logger of that name: what it warns of or advises would stand between the tables."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def greedy(name: str, tokens: TokenIds, new_tokens: int) -> Prompt:
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0)
    return Prompt(id=RequestId(name), tokens=tokens, sampling=sampling)


def first_token_s(engine: Engine, tokens: TokenIds, cached: tuple[int, int, int]) -> float:
    """Seconds to the first token. ``cached``: tokens that must be found on the device, on the host
    and in storage. Copies and writes have ended before and after."""
    begin_s = time.perf_counter()
    engine.submit(greedy("0", tokens, 1))
    while not (outputs := engine.step()):
        pass
    taken_s = time.perf_counter() - begin_s
    while engine.has_work():
        engine.step()
    found = outputs[0].cached
    assert found is not None, "the first token came without its counts"
    assert (found.device, found.host, found.storage) == cached, f"{found} where {cached} was due"
    return taken_s


def config_for(
    spec: CacheSpec, tokens: int, load: ExpectedLoad, cache: str, host_ratio: float | None = None
) -> EngineConfig:
    """Of an engine whose device has room for ``tokens`` in full beside ``load``."""
    size = device_bytes(spec, pages_beside(spec, tokens // spec.page_tokens, load))
    return EngineConfig(
        page_tokens=spec.page_tokens,
        device_memory=f"{size}B",
        max_running=load.max_running,
        max_model_len=load.max_model_len,
        chunk_tokens=load.chunk_tokens,
        chat_tokens=load.chat_tokens,
        cache=cache,
        host_ratio=host_ratio,
    )


def attach_files(engine: Engine, spec: CacheSpec, host: Sequence[int], url: str) -> None:
    """Open a store for host tiers of ``host`` pages and attach it."""
    engine.attach_storage(open_store(url, spec, host).worker)
