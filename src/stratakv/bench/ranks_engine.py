"""What one rank of ``stratakv bench ranks`` does: chat traffic on an engine without a model.

Owns that engine and its clients. Everything but the model's forward is the production's, the host
tier too: what the model says to its own shards is not the question.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from stratakv.agreement.agreement import Agreement
from stratakv.agreement.ballot import Ballot, BallotResult
from stratakv.agreement.ranks import nothing
from stratakv.agreement.torch_ranks import TorchRanks
from stratakv.assembly.build import MappedMemory, Sockets, build
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.rank_context import RankContext
from stratakv.assembly.sizing import Sizes
from stratakv.bench.ranks_meter import Meter, MeterRecord
from stratakv.bench.rig import greedy
from stratakv.bench.workload import Chat, TimedPrompt
from stratakv.core.config import EngineConfig
from stratakv.core.ids import LayerId, RequestId
from stratakv.engine.loop import Engine
from stratakv.engine.ranks.ranked import RankedEngine
from stratakv.engine.request import Output
from stratakv.memory.device_pools import DevicePools
from stratakv.sim.accelerator import VOCABULARY, Accelerator
from stratakv.spec.budget import ExpectedLoad, pages_beside
from stratakv.spec.derive import spec_of
from stratakv.tiers.progress import Progress
from stratakv.transfer.cpu import CpuTransferEngine

MODEL: Final[dict[str, object]] = {
    "model_type": "gemma3_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 256,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
PAGE_TOKENS: Final = 16
MAX_RUNNING: Final = 8
CHUNK_TOKENS: Final = 512
DEVICE_LONGEST: Final = 10
"""The device holds this many of the longest requests: the running ones and little beside them, so
that the pages of a chat that pauses come back from the host."""
HOST_RATIO: Final = 8
LIVE: Final = 10
"""Requests at once; some wait."""
PAUSE: Final = 20
"""Requests of others between two of one user."""
STEPS_PER_USER: Final = 8
"""More users than that would not come up within a run."""


class MeteredAgreement(Agreement):
    """An agreement that is timed, digests and all."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(meter)
        self._meter = meter

    def agree(self, ballot: Ballot, meanwhile: Callable[[], None] = nothing) -> BallotResult:
        begin_s = time.perf_counter()
        result = super().agree(ballot, meanwhile)
        self._meter.agreed(time.perf_counter() - begin_s)
        return result


def _metered(meter: Meter) -> type[Progress]:
    """Progress whose ticks are timed."""

    class Metered(Progress):
        def tick(self, head: RequestId | None = None) -> None:
            meter.tick(lambda: super(Metered, self).tick(head))

        def wait(self) -> bool:
            meter.waits()
            return super().wait()

    return Metered


def chat_of(steps: int) -> Chat:
    """Users for that many steps."""
    return Chat(users=LIVE + PAUSE + steps // STEPS_PER_USER, vocabulary=VOCABULARY)


def take_part(ranks: TorchRanks, steps: int) -> MeterRecord:
    """Serve chats for ``steps`` steps; what this rank has measured."""
    meter = Meter(ranks)
    port, engine, transfer = _engine(meter, chat_of(steps))
    try:
        if ranks.rank == 0:
            _serve(port, chat_of(steps), steps)
            assert meter.record.steps == steps, "a step that did not end with one tick"
            port.close()
        else:
            port.follow()
    finally:
        transfer.close()
    stats = engine.stats()
    ranks.close()
    return replace(
        meter.record,
        cached_device_tokens=stats.cached_device_tokens,
        cached_host_tokens=stats.cached_host_tokens,
    )


def _serve(port: RankedEngine, chat: Chat, steps: int) -> None:
    """One request comes a step, if at all: users do not ask in chorus. Who has been answered asks
    again when others have."""
    coming: deque[TimedPrompt] = deque(chat.opening())
    live: dict[RequestId, tuple[TimedPrompt, list[int]]] = {}
    for _ in range(steps):
        if coming and len(live) < LIVE:
            ask = coming.popleft()
            live[ask.id] = (ask, [])
            port.submit(greedy(ask.id, ask.tokens, ask.new_tokens))
        for output in port.step():
            _note(output, live, coming, chat)


def _note(
    output: Output,
    live: dict[RequestId, tuple[TimedPrompt, list[int]]],
    coming: deque[TimedPrompt],
    chat: Chat,
) -> None:
    ask, answer = live[output.request]
    assert output.token is not None, "nobody aborts"
    answer.append(output.token)
    if output.finish is None:
        return
    del live[output.request]
    more = chat.next_turn(ask, torch.tensor(answer, dtype=torch.int32).numpy(), 0.0)
    if more is not None:
        coming.insert(PAUSE, more)


def _engine(meter: Meter, chat: Chat) -> tuple[RankedEngine, Engine, CpuTransferEngine]:
    spec = spec_of(MODEL, page_tokens=PAGE_TOKENS, dtype="float32")
    longest = chat.longest + 1
    load = ExpectedLoad(
        max_running=MAX_RUNNING,
        max_model_len=longest,
        chunk_tokens=CHUNK_TOKENS,
        chat_tokens=longest,
    )
    device = pages_beside(spec, DEVICE_LONGEST * -(-longest // PAGE_TOKENS), load)
    host = [HOST_RATIO * pages for pages in device]
    config = EngineConfig(
        page_tokens=PAGE_TOKENS,
        max_running=MAX_RUNNING,
        chunk_tokens=CHUNK_TOKENS,
        step_tokens=CHUNK_TOKENS + MAX_RUNNING,
        reserve_tokens=chat.answer_tokens,
        load_back_threshold=PAGE_TOKENS,
        load_back_budget=8 * longest,
    )
    plan = EnginePlan.of(config, Sizes.of(spec, device, host, longest), b"bench")
    memory = MappedMemory.of(plan, DevicePools, CpuTransferEngine)
    layers = {layer for group in spec.groups for buffer in group.buffers for layer in buffer.layers}
    runner = Accelerator([LayerId(layer) for layer in sorted(layers)], 0.0, CHUNK_TOKENS)
    ranks = RankContext.of(meter, agreement=MeteredAgreement(meter))
    sockets = Sockets(ranks=ranks, progress=_metered(meter))
    engine, _ = build(plan, memory, lambda _: runner, sockets)
    return RankedEngine(engine, ranks.sync), engine, memory.transfer
