"""Penalties, biases and least tokens of requests that share a real model, are retracted and come
back: the tokens are those of one forward over everything for each token, token by token.
"""

import numpy as np
import pytest
import torch

from stratakv.core.ids import RequestId
from stratakv.engine.request import Prompt, SamplingParams
from tests.engines import run, tokens_of
from tests.fixtures.models import random_prompt
from tests.hit_cases import lab
from tests.sampling_rows import penalised

PAGE, OUTPUT = 16, 30
ASKED = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.5},
    "output": {"frequency_penalty": -3.0, "presence_penalty": 1.0},
    "bias": {"logit_bias": ((3, 4.0), (5, -100.0))},
    "all": {"repetition_penalty": 1.2, "frequency_penalty": 1.1, "presence_penalty": -0.3},
}


def oracle(model, prompt, asks):
    """Greedy, without a cache."""
    output = []
    while len(output) < asks.max_tokens:
        tokens = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            logits = model(tokens, use_cache=False).logits[0, -1]
        output.append(int(penalised(logits, prompt, output, asks).argmax()))
        if output[-1] in asks.stop_tokens:
            break
    return output


def asked(name, prompt, **asks):
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0, **asks)
    return Prompt(id=RequestId(name), tokens=np.array(prompt, np.int32), sampling=sampling)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_each_gets_its_own_also_after_a_retraction(family):
    tight = {"device": (9, 24), "host": (60, 60)} if family == "qwen3_next" else {"device": (9,)}
    with lab(family, PAGE, **tight, reserve_tokens=1, snapshot_tokens=PAGE) as this:
        prompts = {name: random_prompt(at, 40) for at, name in enumerate(ASKED)}
        found = run(this.parts, *(asked(name, prompts[name], **ASKED[name]) for name in ASKED))
        assert this.parts.cache.tiers.pools.counters.retracted > 0
        answers = {name: tokens_of(outputs) for name, outputs in found.items()}
        for name, asks in ASKED.items():
            params = asked(name, prompts[name], **asks).sampling
            assert answers[name] == oracle(this.model, prompts[name], params), name
        plain = run(this.parts, *(asked(f"{name} plain", prompts[name]) for name in ASKED))
        same = [name for name in ASKED if tokens_of(plain[f"{name} plain"]) == answers[name]]
        assert same == ["plain"], "these penalties change nothing"


def test_no_stop_token_comes_before_the_least_tokens():
    with lab("llama", PAGE) as this:
        prompt = random_prompt(7, 40)
        (free,) = run(this.parts, asked("free", prompt)).values()
        stops = (tokens_of(free)[2], tokens_of(free)[4])
        for least in (0, 3, 20):
            asks = {"stop_tokens": stops, "min_tokens": least}
            request = asked(f"least {least}", prompt, **asks)
            (outputs,) = run(this.parts, request).values()
            tokens = tokens_of(outputs)
            assert tokens == oracle(this.model, prompt, request.sampling)
            assert len(tokens) > least
            assert not set(tokens[:least]) & set(stops)
            assert least or len(tokens) == 3
