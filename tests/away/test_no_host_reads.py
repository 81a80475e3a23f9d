"""A step on a GPU that never waits for it, on a device where a wait is an error.

The engine is assembled as for ``--device cuda``, over a driver that is late at random. Kernels are
not computed, for only who waits for what counts here; what they would compute is other tests'.
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from stratakv.assembly.cuda import Gpu, device_over
from stratakv.assembly.models import build_engine
from stratakv.cache.records import CacheUse
from stratakv.core.config import EngineConfig
from stratakv.core.ids import RequestId
from stratakv.engine.attention import triton_kernels
from stratakv.engine.huggingface.adapters import Adapter, LoraWeights
from stratakv.engine.huggingface.lora_hooks import Adapters
from stratakv.engine.huggingface.model import wrap
from stratakv.engine.request import Prompt, SamplingParams
from stratakv.engine.sampling import sample
from stratakv.transfer.cuda import PinOptions
from tests.engines import greedy
from tests.fake_cuda import BOTH_WAYS, FakeCuda
from tests.fixtures.models import model_to_give_away, random_prompt
from tests.host_reads import AWAY, Away, away, no_host_reads
from tests.sampling_rows import logits_of, params


class NoLaunch:
    """In the place of a kernel: what it would write is zero."""

    def __getitem__(self, grid):
        return lambda out, *_, **__: out.zero_()


@contextmanager
def away_engine(family, **settings):
    driver = FakeCuda(0, device=None)
    gpu = Gpu(
        at=AWAY, driver=driver, trials=lambda: BOTH_WAYS, free=lambda: 1 << 30, idle=lambda: None,
        pinned=PinOptions(chunk_bytes=1 << 16),
    )  # fmt: skip
    device = device_over(lambda: gpu, AWAY)

    def transfer(spec, pools, arenas):
        driver.arenas += [(arena.bytes.ctypes.data, arena.size_bytes) for arena in arenas]
        return device.transfer(spec, pools, arenas)

    config = EngineConfig(
        device="cuda", device_memory="3MiB", host_memory="1MiB", max_running=4, step_tokens=64,
        **settings,
    )  # fmt: skip
    model = wrap(model_to_give_away(family))
    away(model.module)
    with (
        mock.patch.object(triton_kernels, "attend_pages", NoLaunch()),
        mock.patch.object(triton_kernels, "attend_rows", NoLaunch()),
        mock.patch.object(triton_kernels, "combine", NoLaunch()),
    ):
        parts = build_engine(
            replace(model, device=AWAY), config, replace(device, transfer=transfer)
        )
        try:
            yield parts
        finally:
            parts.close()
            driver.close()


@pytest.mark.parametrize(
    "family", ["falcon_h1", "gemma3_text", "lfm2", "llama", "mamba2", "olmo_hybrid"]
)
def test_no_step_waits_for_the_device(family):
    """Chunks, decoding, both in one step: each is waited for once, when it is collected."""
    with away_engine(family) as parts, no_host_reads() as reads:
        for at, tokens in enumerate((150, 100, 40)):
            parts.engine.submit(greedy(str(at), random_prompt(at, tokens), 4 + at))
        outputs, waits = [], []
        while parts.engine.has_work():
            before = reads.count
            outputs += parts.engine.step()
            waits.append(reads.count - before)
    assert set(waits[:-1]) <= {0, 1}
    assert reads.count == parts.engine.stats().steps
    assert len(outputs) >= 4 + 5 + 6


KINDS = {
    "greedy": {"temperature": 0.0},
    "all": {},
    "top_p": {"top_p": 0.9},
    "top_k and top_p": {"top_k": 7, "top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "logprobs": {"logprobs": 3},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.2},
    "bias": {"logit_bias": ((3, 2.0), (5, -1.0))},
    "bars": {"min_tokens": 3, "stop_tokens": (1, 2)},
    "prompt": {"prompt_logprobs": 2},
}


FIELDS = {"temperature", "top_p", "top_k", "min_p", "logprobs"}


def test_sampling_waits_once_a_step_whatever_a_request_asks_for():
    """And gives what it gives on a CPU."""
    asked = [
        Prompt(
            id=RequestId(name),
            tokens=np.array(random_prompt(7, 20), np.int32),
            sampling=SamplingParams(**{"max_tokens": 4, "temperature": 0.8, "seed": 5, **fields}),
            use=CacheUse.STORE if name == "prompt" else CacheUse.ALL,
        )
        for name, fields in KINDS.items()
    ]  # fmt: skip
    with away_engine("llama") as parts, no_host_reads() as reads:
        for prompt in asked:
            parts.engine.submit(prompt)
        outputs = []
        while parts.engine.has_work():
            outputs += parts.engine.step()
    assert reads.count == parts.engine.stats().steps
    assert {output.request for output in outputs if output.token is not None} == {*KINDS}
    reported = [output.logprob for output in outputs if output.request == "logprobs"]
    assert all(len(report.top) == 3 for report in reported if report is not None)


def test_tokens_of_several_adapters_wait_for_nothing():
    """And get what they get on a CPU."""
    layers = torch.nn.Sequential(torch.nn.Linear(6, 2, bias=False))
    factors = torch.ones(3, 6), torch.ones(2, 3)
    tokens, x = np.array([0, -1, 0], np.int32), torch.arange(18.0).view(3, 6)

    def adapted(module, bring):
        down, up = map(bring, factors)
        weights = LoraWeights(down=down, up=up, scale=0.5)
        adapters = Adapters(module, [Adapter(name="a", digest=bytes(32), weights={"0": weights})])
        with torch.inference_mode(), adapters.applied(tokens):
            return module(bring(x))

    wanted, plain = adapted(layers, torch.clone), layers(x)
    away(layers)
    with no_host_reads() as reads:
        found = adapted(layers, Away)
    assert reads.count == 0
    assert found.here.equal(wanted)
    assert (wanted != plain).any(1).tolist() == [True, False, True]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_drawn_there_is_what_is_drawn_on_a_cpu(name):
    fields = {key: value for key, value in KINDS[name].items() if key in FIELDS}
    logits, wanted = logits_of(3, 40, vocab=2000), params(40, **fields)
    here = sample(logits, wanted)
    with torch.inference_mode(), no_host_reads() as reads:
        there = sample(Away(logits), wanted)
    assert reads.count == 1
    assert (there.tokens == here.tokens).all()
    assert there.logprobs == here.logprobs
