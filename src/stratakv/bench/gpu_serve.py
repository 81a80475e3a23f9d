"""``stratakv bench serve --device cuda``: a model of 8B's shape, random, on a GPU.

Owns the measurement: the first token of a long prompt that is computed, found on the device and
loaded from the host, decoding beside transformers with its fastest attention and beside a device
that replays no CUDA graphs. Directly on the engine, without HTTP.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from stratakv.assembly.device import Device
from stratakv.assembly.engine_plan import EnginePlan
from stratakv.assembly.models import EngineParts, assemble, build_engine
from stratakv.assembly.sizing import Sizes
from stratakv.bench.rig import Laps, first_token_s, greedy
from stratakv.core.config import EngineConfig
from stratakv.core.ids import RequestId, TokenIds
from stratakv.engine.huggingface.model import HuggingFaceModel, wrap
from stratakv.policy.checkpoints import last_end
from stratakv.spec.derive import spec_of
from stratakv.spec.groups import CacheSpec
from stratakv.transfer.copy_plan import CopyPlan, Direction, GroupCopy

HIT_TARGET: Final = 0.1
"""A host hit to a recompute, at most."""
DECODE_TARGET: Final = 3.0
"""Tokens a second to transformers', at least."""
GRAPH_TARGET: Final = 1.0
"""Tokens a second to those without CUDA graphs, at least."""
TRAFFIC_TARGET: Final = 1.05
"""A decode step beside copies to one without, at most."""
ROUNDS: Final = 3
TRAFFIC_PAGES: Final = 32
"""Of a plan, each way."""
TRAFFIC_LAPS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShape:
    """Of the model and of what is asked: ``prompt_tokens`` of the long prompt, ``batch`` requests
    that decode ``new_tokens`` each behind ``short_tokens``."""

    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    key_heads: int = 8
    inner: int = 14336
    vocabulary: int = 128256
    dtype: torch.dtype = torch.bfloat16
    prompt_tokens: int = 32768
    batch: int = 32
    short_tokens: int = 256
    new_tokens: int = 128
    page_tokens: int = 64
    chunk_tokens: int = 2048

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            max_position_embeddings=2 * self.prompt_tokens,
            eos_token_id=None,
        )

    @property
    def token_bytes(self) -> int:
        head_bytes = self.hidden // self.heads * self.dtype.itemsize
        return 2 * self.layers * self.key_heads * head_bytes


EIGHT_B: Final = GpuShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuServeFigures:
    """Medians, but for the recompute, which is one. ``*_ratio`` of a hit: to the recompute; of
    decoding: to transformers' tokens a second; of graphs: to those of an engine without CUDA
    graphs; of traffic: a decode step beside copies both ways
    to one without."""

    recompute_ms: float
    device_hit_ratio: float
    host_hit_ratio: float
    decode_tok_s: float
    transformers_tok_s: float
    decode_ratio: float
    graph_ratio: float
    traffic_ratio: float


def run_on(device: Device[Any], eager: Device[Any], shape: GpuShape = EIGHT_B) -> dict[str, object]:
    """Measure, and print the figures; minutes on a GPU. ``eager``: the same device, that replays no
    CUDA graphs."""
    print(f"llama of {shape.layers} layers x {shape.hidden}, {shape.dtype}, random, on {device.at}")
    theirs_s = _transformers_s(_module(device.at, shape), shape)
    model = wrap(_module(device.at, shape))
    laps = _first_tokens(device, model, shape)
    ours_s, eager_s = (_decode_s(one, model, shape) for one in (device, eager))
    recompute_s, output = laps.median_s("recompute"), shape.batch * shape.new_tokens
    found = GpuServeFigures(
        recompute_ms=recompute_s * 1000,
        device_hit_ratio=laps.median_s("device") / recompute_s,
        host_hit_ratio=laps.median_s("host") / recompute_s,
        decode_tok_s=output / ours_s,
        transformers_tok_s=output / theirs_s,
        decode_ratio=theirs_s / ours_s,
        graph_ratio=eager_s / ours_s,
        traffic_ratio=_beside_traffic(device, model, shape),
    )
    print(
        f"first token of {shape.prompt_tokens:,}: computed {found.recompute_ms:.0f} ms, on the "
        f"device {found.device_hit_ratio:.3f}, from the host {found.host_hit_ratio:.3f} of that "
        f"(at most {HIT_TARGET})"
    )
    print(
        f"{shape.batch} x {shape.new_tokens} tokens: {found.decode_tok_s:.0f} a second, "
        f"transformers {found.transformers_tok_s:.0f}: {found.decode_ratio:.2f} (at least "
        f"{DECODE_TARGET}), without CUDA graphs {output / eager_s:.0f}: {found.graph_ratio:.2f} "
        f"(at least {GRAPH_TARGET})"
    )
    print(f"a step beside copies: {found.traffic_ratio:.3f} (at most {TRAFFIC_TARGET})")
    return {"device": str(device.at), **asdict(found)}


def _module(at: torch.device, shape: GpuShape) -> PreTrainedModel:
    with torch.device(at):
        torch.manual_seed(0)
        config = shape.config()
        module = AutoModelForCausalLM.from_config(
            config, dtype=shape.dtype, attn_implementation="sdpa"
        )
    return module.eval().requires_grad_(requires_grad=False)


def _prompts(shape: GpuShape, count: int, tokens: int) -> Sequence[TokenIds]:
    random = np.random.default_rng(tokens)
    return [random.integers(0, shape.vocabulary, tokens, dtype=np.int32) for _ in range(count)]


def _transformers_s(module: PreTrainedModel, shape: GpuShape) -> float:
    """Of the second of two runs."""
    prompts = np.stack(_prompts(shape, shape.batch, shape.short_tokens)).astype(np.int64)
    ids = torch.from_numpy(prompts).to(module.device)
    taken_s = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        out = module.generate(  # pyright: ignore[reportCallIssue] - as of every causal LM
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=shape.new_tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        out.cpu()
        taken_s = time.perf_counter() - begin
    return taken_s


def _engine(
    device: Device[Any], model: HuggingFaceModel, shape: GpuShape, tokens: int, running: int
) -> EngineParts:
    """Its device holds so many tokens, in whole pages, and some."""
    size = (tokens + 4 * shape.page_tokens * running + shape.chunk_tokens) * shape.token_bytes
    config = EngineConfig(
        device="cpu" if device.at.type == "cpu" else "cuda",
        page_tokens=shape.page_tokens,
        device_memory=f"{size}B",
        host_memory=f"{4 * size}B",
        max_running=running,
        max_model_len=tokens // running + shape.page_tokens,
        chunk_tokens=shape.chunk_tokens,
        step_tokens=shape.chunk_tokens + running,
        chat_tokens=tokens // running,
    )
    return build_engine(model, config, device)


def _exact(device: Device[Any], model: HuggingFaceModel, shape: GpuShape) -> EngineParts:
    """Its device holds one long prompt, and no page more: what is found there is found whole."""
    longest = shape.prompt_tokens + 2
    config = EngineConfig(
        max_running=1,
        max_model_len=longest,
        chunk_tokens=shape.chunk_tokens,
        step_tokens=shape.chunk_tokens + 1,
        load_back_budget=longest,
    )
    spec = spec_of(model.config, page_tokens=shape.page_tokens, dtype=model.dtype)
    pages = -(-longest // shape.page_tokens)
    sizes = Sizes.of(spec, (pages,), (4 * pages,), longest)
    ahead = device.steps_at_once
    plan = EnginePlan.of(config, sizes, model.fingerprint, steps_at_once=ahead)
    return assemble(model, plan, device=device)


def _first_tokens(device: Device[Any], model: HuggingFaceModel, shape: GpuShape) -> Laps:
    """Two prompts, of which the device holds one: each drives the other to the host."""
    laps = Laps()
    parts = _exact(device, model, shape)
    try:
        hit = last_end(shape.prompt_tokens, shape.page_tokens) * shape.page_tokens
        one, other = _prompts(shape, 2, shape.prompt_tokens)
        for prompt in (one, other):  # the first one compiles kernels
            laps.add("recompute", first_token_s(parts.engine, prompt, (0, 0, 0)))
        for _ in range(ROUNDS + 1):
            for prompt, away in ((other, one), (one, other)):
                laps.add("device", first_token_s(parts.engine, prompt, (hit, 0, 0)))
                laps.add("host", first_token_s(parts.engine, away, (0, hit, 0)))
        parts.engine.check()
    finally:
        parts.close()
    return laps


def _decode_s(device: Device[Any], model: HuggingFaceModel, shape: GpuShape) -> float:
    """Of the second of two runs, on other prompts."""
    tokens = shape.batch * (shape.short_tokens + shape.new_tokens)
    parts, taken_s = _engine(device, model, shape, tokens, shape.batch), 0.0
    prompts = _prompts(shape, 2 * shape.batch, shape.short_tokens)
    try:
        for turn in range(2):
            begin = time.perf_counter()
            for at, prompt in enumerate(prompts[turn * shape.batch : (turn + 1) * shape.batch]):
                parts.engine.submit(greedy(f"{turn} {at}", prompt, shape.new_tokens))
            while parts.engine.has_work():
                parts.engine.step()
            taken_s = time.perf_counter() - begin
    finally:
        parts.close()
    return taken_s


class CopyTraffic:
    """Copies of pages that nobody else has, one plan each way at a time, as long as asked."""

    def __init__(self, device: Device[Any], spec: CacheSpec) -> None:
        pages = (TRAFFIC_PAGES,) * len(spec.groups)
        pools = device.pools(spec, pages)
        arenas = [device.arenas(group, TRAFFIC_PAGES) for group in spec.groups]
        self.engine = device.transfer(spec, pools, arenas)
        every = np.arange(TRAFFIC_PAGES, dtype=np.int32)
        self._copies = tuple(GroupCopy(group.id, every, every) for group in spec.groups)
        self._open = dict.fromkeys(Direction, 0)

    def keep_going(self) -> None:
        for direction in Direction:
            self._open[direction] -= len(self.engine.take(direction, self.engine.ready(direction)))
            if not self._open[direction]:
                self.engine.submit(CopyPlan(direction, self._copies))
                self._open[direction] = 1

    def end(self) -> None:
        while any(self._open.values()):
            for direction in Direction:
                ended = self.engine.take(direction, self.engine.ready(direction))
                self._open[direction] -= len(ended)


def _beside_traffic(device: Device[Any], model: HuggingFaceModel, shape: GpuShape) -> float:
    """Laps without and with copies in turn, while the same requests decode."""
    spec = spec_of(model.config, page_tokens=shape.page_tokens, dtype=model.dtype)
    traffic = CopyTraffic(device, spec)
    tokens, laps = shape.batch * (shape.short_tokens + shape.new_tokens), Laps()
    parts = _engine(device, model, shape, tokens, shape.batch)
    steps = (shape.new_tokens - shape.batch // 4) // (2 * TRAFFIC_LAPS + 2)
    try:
        for at, prompt in enumerate(_prompts(shape, shape.batch, shape.short_tokens)):
            parts.engine.submit(greedy(f"{at}", prompt, shape.new_tokens))
        started: set[RequestId] = set()
        while len(started) < shape.batch:
            started |= {output.request for output in parts.engine.step()}
        for lap in range(2 * TRAFFIC_LAPS):
            busy = bool(lap % 2)
            begin = time.perf_counter()
            for _ in range(max(1, steps)):
                if busy:
                    traffic.keep_going()
                parts.engine.step()
            laps.add("beside" if busy else "alone", time.perf_counter() - begin)
            traffic.end()
    finally:
        parts.close()
        traffic.engine.close()
    return laps.ratio("beside", "alone")
