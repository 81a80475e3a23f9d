"""Log-probabilities of a prompt's own tokens are those of one forward over all of it: in chunks,
beside others, over a cache that has the prompt, and where the request was retracted on the way.
"""

import json
from dataclasses import replace

import httpx
import pytest
import torch

from stratakv.cache.records import CacheUse
from stratakv.core.config import EngineConfig
from stratakv.core.errors import RequestError
from stratakv.engine.huggingface.model import wrap
from stratakv.engine.prompt_logprobs import SCORED_TOKENS
from stratakv.spec.derive import spec_of
from stratakv.testing.patience import PATIENCE_S
from tests.engines import RecordingRunner, drain, greedy, run, small_engine
from tests.fixtures.bounds import bound_of
from tests.fixtures.models import model_to_give_away, random_prompt, tiny_model, uncached
from tests.real_server import COMPLETIONS, SMALL_POOLS, real_server, tokens
from tests.serving import EOS

FAMILIES = ("gemma3", "qwen3_next", "jamba", "mamba2", "deepseek_v3", "deepseek_v32")
CONFIG = EngineConfig(
    page_tokens=16, max_running=6, max_model_len=512, chunk_tokens=40, step_tokens=88
)


def scored(name, tokens, top=3, use=CacheUse.STORE):
    plain = greedy(name, tokens, 3)
    sampling = replace(plain.sampling, prompt_logprobs=top)
    return replace(plain, sampling=sampling, use=use)


def check(family, tokens, outputs):
    """``outputs``: of one request over ``tokens``."""
    first, *rest = outputs
    assert all(one.prompt_logprobs is None for one in rest)
    found = first.prompt_logprobs
    assert found is not None
    assert len(found) == len(tokens) - 1
    wanted = uncached(tiny_model(family), list(tokens))[:-1].log_softmax(-1)
    bound = bound_of(family)
    chosen = wanted.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert torch.allclose(torch.tensor([one.chosen for one in found]), chosen, rtol=0, atol=bound)
    best = wanted.topk(3, -1)
    tops = torch.tensor([[value for _, value in one.top] for one in found]).view(-1, 3)
    assert torch.allclose(tops, best.values, rtol=0, atol=bound)
    at = torch.tensor([[token for token, _ in one.top] for one in found]).view(-1, 3).long()
    assert torch.allclose(wanted.gather(1, at), best.values, rtol=0, atol=bound)


def pages(model):
    groups = len(spec_of(model.config, page_tokens=16, dtype=model.dtype).groups)
    return (64,) * groups, (64,) * groups


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_one_forward(family):
    model = wrap(model_to_give_away(family))
    prompts = [random_prompt(seed, length) for seed, length in ((1, 150), (2, 97), (3, 2), (4, 1))]
    with small_engine(model, CONFIG, *pages(model)) as parts:
        run(parts, greedy("before", prompts[0], 3))
        asked = [scored(str(at), tokens) for at, tokens in enumerate(prompts)]
        recorder = RecordingRunner(parts)
        outputs = run(parts, *asked, greedy("other", random_prompt(9, 120), 3))
        assert recorder.computed_tokens >= sum(map(len, prompts)), "a page was reused"
        for at, tokens in enumerate(prompts):
            check(family, tokens, outputs[str(at)])
        assert outputs["0"][0].cached.total == 0
        again = run(parts, greedy("after", prompts[0], 3))["after"]
        assert [one.token for one in again] == [one.token for one in outputs["0"]]
        assert again[0].prompt_logprobs is None


def test_a_request_that_is_retracted_reports_each_token_once():
    model = wrap(model_to_give_away("gemma3"))
    asked_for = random_prompt(5, 200)
    with small_engine(model, CONFIG, *pages(model)) as parts:
        for after in (0, 2, 4, 5, 6):  # in the middle of its prompt, and of its answer
            asked = scored(f"r{after}", asked_for)
            parts.engine.submit(asked)
            outputs = [one for _ in range(after) for one in parts.engine.step()]
            parts.engine.retract(asked.id)
            outputs += drain(parts)
            check("gemma3", asked_for, outputs)
            assert parts.engine.flush()


def test_it_is_refused_where_a_cached_page_may_be_read():
    model = wrap(model_to_give_away("gemma3"))
    with small_engine(model, CONFIG, *pages(model)) as parts:
        for use in (CacheUse.ALL, CacheUse.READ):
            with pytest.raises(RequestError, match="reads no cache"):
                parts.engine.submit(scored("r", [1, 2, 3], use=use))


def test_a_step_scores_no_more_tokens_than_there_is_room_for():
    model = wrap(model_to_give_away("gemma3"))
    config = replace(CONFIG, chunk_tokens=300, step_tokens=2048)
    prompts = [random_prompt(seed, 300) for seed in range(3)]
    with small_engine(model, config, *((128, 128),) * 2) as parts:
        recorder = RecordingRunner(parts)
        asked = [scored(str(at), tokens) for at, tokens in enumerate(prompts)]
        outputs = run(parts, *asked)
        marks = [one.scored for one in recorder.batches if one.scored is not None]
        assert max(int(one.sum()) for one in marks) <= SCORED_TOKENS < 3 * 299
        for at, tokens in enumerate(prompts):
            check("gemma3", tokens, outputs[str(at)])


@pytest.fixture(scope="module")
def http(directory):
    with real_server(directory, SMALL_POOLS) as live:
        with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as found:
            yield found
        live.settled()


def answer(http, **body):
    found = http.post(COMPLETIONS, json={"temperature": 0, "echo": True} | body)
    assert found.status_code == 200, found.text
    return found.json()


def test_a_completion_that_echoes_its_prompt_has_the_log_probabilities_of_both(http):
    """In the form in which lm-eval asks, over a cache that has the prompt."""
    asked = tokens(200, 1)
    answer(http, prompt=asked, echo=False, max_tokens=4)
    for most in (0, 1, 3):
        whole = answer(http, prompt=asked, max_tokens=most, logprobs=2)
        (choice,) = whole["choices"]
        assert whole["usage"]["completion_tokens"] == most
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert whole["usage"]["prompt_tokens_details"]["cache"] == "bypass"
        found = choice["logprobs"]
        assert {len(part) for part in found.values()} == {len(asked) + most}
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        wanted = uncached(tiny_model("gemma3"), asked)[:-1].log_softmax(-1)
        chosen = wanted.gather(1, torch.tensor(asked[1:])[:, None])[:, 0]
        got = torch.tensor(found["token_logprobs"][1 : len(asked)])
        assert torch.allclose(got, chosen, rtol=0, atol=bound_of("gemma3"))
        text, shown = choice["text"], [*zip(found["text_offset"], found["tokens"], strict=True)]
        plain = [(at, one) for at, one in shown if "\ufffd" not in one and one != EOS]
        assert len(plain) > 50
        assert [one for at, one in plain if not text[at:].lstrip("\ufffd").startswith(one)] == []
        assert choice["finish_reason"] == "length"


def test_an_echo_without_log_probabilities_uses_the_cache(http):
    asked = tokens(200, 2)
    prompt = http.post("/detokenize", json={"tokens": asked}).json()["prompt"]
    plain = answer(http, prompt=asked, echo=False, max_tokens=5)["choices"][0]["text"]
    again = answer(http, prompt=[asked, asked], max_tokens=5, n=2)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert [one["text"] for one in again["choices"]] == [prompt + plain] * 4
    assert answer(http, prompt=asked, max_tokens=0)["choices"][0]["text"] == prompt
    body = {"prompt": asked, "echo": True, "stream": True, "temperature": 0, "max_tokens": 5}
    lines = http.post(COMPLETIONS, json=body).text.split("\n\n")
    events = [json.loads(one.removeprefix("data: ")) for one in lines if "{" in one]
    assert "".join(one["choices"][0]["text"] for one in events) == prompt + plain


@pytest.mark.parametrize(
    "body",
    [
        {"echo": True, "logprobs": 1, "stream": True},
        {"max_tokens": 0},
        {"echo": "yes"},
        {"echo": True, "logprobs": 1, "kv_transfer_params": {"do_remote_decode": True}},
    ],
    ids=str,
)
def test_what_cannot_be_echoed_is_refused_by_name(http, body):
    answer = http.post(COMPLETIONS, json={"prompt": "a"} | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("echo", "max_tokens")
