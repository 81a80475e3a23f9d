"""The HTTP API over a real uvicorn on the loopback, the engine scripted (``tests.serving``)."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from stratakv.serve.decoding import CACHE_WORDS
from stratakv.serve.tokenizer import Tokenizer
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.doc_blocks import python_of
from tests.scraped import scraped
from tests.serving import (
    EOS,
    FOX,
    MAX_MODEL_LEN,
    EchoEngine,
    error_of,
    make_service,
    running,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def shared(tokenizer):
    engine = EchoEngine()
    with running(make_service(tokenizer, engine), engine) as server:
        yield server


@pytest.fixture
def live(shared):
    """The shared server, idle, its engine as new."""
    yield shared
    shared.engine.gate.set()
    wait_until(lambda: shared.service.driver.open_requests == 0 and not shared.engine.requests)
    shared.engine.forget()


@pytest.fixture
def fresh(tokenizer):
    engine = EchoEngine()
    with running(make_service(tokenizer, engine), engine) as server:
        yield server


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def http(live):
    with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as found:
        yield found


def complete(client, prompt=FOX, **extra):
    return client.completions.create(model="echo", prompt=prompt, temperature=0, **extra)


def chat(client, text="hello", **extra):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="echo", messages=messages, temperature=0, **extra)


# -- answers ---------------------------------------------------------------------------------------


def test_a_completion(client, tokenizer):
    answer = complete(client, max_tokens=7)
    tokens = tokenizer.encode(FOX).tolist()
    assert answer.choices[0].text == tokenizer.decode(tokens[:7])
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(tokens)
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == len(tokens) + 7
    assert (answer.object, answer.model) == ("text_completion", "echo")


def test_the_documents_client_gets_an_answer(live, capsys):
    (code,) = python_of("docs/serve.md")
    for shown, here in (("http://127.0.0.1:8000", live.url), ('"demo"', '"echo"')):
        assert shown in code
        code = code.replace(shown, here)
    found: dict[str, object] = {}
    exec(code, found)
    found["client"].close()
    assert found["answer"].choices[0].message.content in capsys.readouterr().out


def test_the_default_of_completions_is_16_tokens(client):
    assert complete(client).usage.completion_tokens == 16


def test_every_form_of_a_prompt_gives_the_same_answer(client, tokenizer):
    tokens = tokenizer.encode(FOX).tolist()
    text = complete(client, FOX).choices[0].text
    assert complete(client, tokens).choices[0].text == text
    for several in ([FOX, "another prompt"], [tokens, tokenizer.encode("another prompt").tolist()]):
        choices = complete(client, several).choices
        assert [choice.index for choice in choices] == [0, 1]
        assert choices[0].text == text
        assert choices[1].text == complete(client, "another prompt").choices[0].text


def test_a_chat_fills_what_is_left_of_the_model(client, tokenizer):
    answer = chat(client, "hello")
    assert answer.usage.total_tokens == MAX_MODEL_LEN
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content.startswith("<user>hello<assistant><user>")


def test_the_end_token_ends_an_answer_unless_it_is_ignored(client):
    prompt = f"one two{EOS}three"
    answer = complete(client, prompt, max_tokens=20)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one two", "stop")
    answer = complete(client, prompt, max_tokens=20, extra_body={"ignore_eos": True})
    assert answer.choices[0].text.startswith("one twothree")
    assert answer.choices[0].finish_reason == "length"


def test_a_stop_string_across_tokens_ends_an_answer_and_the_engines_work(client, live, tokenizer):
    prompt = "one two ###END### three"
    assert len(tokenizer.encode("###END###")) > 1
    answer = complete(client, prompt, max_tokens=200, stop=["nope", "###END###"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one two ", "stop")
    assert answer.usage.completion_tokens < len(tokenizer.encode(prompt))
    wait_until(lambda: not live.engine.requests)


def test_choices_differ_by_seed_and_a_seed_repeats_them(client):
    def texts(seed):
        answer = client.completions.create(
            model="echo", prompt=FOX, temperature=1.0, n=3, seed=seed, max_tokens=12
        )
        return [choice.text for choice in answer.choices]

    assert len(set(texts(7))) == 3
    assert texts(7) == texts(7)
    assert texts(7) != texts(8)
    assert texts(None) != texts(None)


def test_usage_counts_a_prompt_once_and_says_where_it_was_cached(client, tokenizer):
    complete(client, FOX)
    answer = complete(client, [FOX, "never seen"], n=2)
    hit = len(tokenizer.encode(FOX)) - 1
    assert answer.usage.prompt_tokens == hit + 1 + len(tokenizer.encode("never seen"))
    assert answer.usage.completion_tokens == 4 * 16
    details = answer.usage.prompt_tokens_details
    assert details.cached_tokens == hit
    tiers = {"device": hit // 2, "host": hit - hit // 2 - hit // 8, "storage": hit // 8}
    assert details.cached_tokens_by_tier == tiers
    assert details.cached_tokens_by_group == {
        "full": tiers,
        "swa": {"device": 2, "host": 4, "storage": 6},
    }


def test_a_salt_reaches_the_engine(client, live):
    complete(client, FOX, extra_body={"cache_salt": "tenant"})
    assert live.engine.submitted[-1].salt == "tenant"
    assert complete(client, FOX).usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("word", ["default", "no-store", "bypass", "off"])
def test_a_use_of_the_cache_reaches_the_engine_and_usage_says_it(client, live, word):
    extra = {"extra_body": {"cache": word}}
    for answer in (complete(client, FOX, n=2, **extra), chat(client, FOX, **extra)):
        assert live.engine.submitted[-1].use is CACHE_WORDS[word]
        assert answer.usage.prompt_tokens_details.cache == word
    stream = complete(client, FOX, stream=True, stream_options={"include_usage": True}, **extra)
    assert list(stream)[-1].usage.prompt_tokens_details.cache == word
    assert complete(client, FOX).usage.prompt_tokens_details.cache == "default"


def test_each_part_of_a_stream_says_what_was_used_so_far_where_that_is_asked_for(client, live):
    live.engine.pause_s = 0.002
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = complete(client, FOX, stream=True, max_tokens=20, stream_options=options)
    counts = [part.usage.completion_tokens for part in parts]
    assert counts == sorted(counts)
    assert 0 < counts[0] <= counts[-1] == last.usage.completion_tokens
    assert {part.usage.prompt_tokens for part in parts} == {last.usage.prompt_tokens}
    alone = {"continuous_usage_stats": True, "include_obfuscation": False}
    parts = complete(client, FOX, stream=True, max_tokens=3, stream_options=alone)
    assert {part.usage for part in parts} == {None}


@pytest.mark.parametrize("word", ["no-cache", "", ["bypass"], {"no-store": True}, True])
def test_another_word_is_refused_by_name(client, word):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, FOX, extra_body={"cache": word})
    assert caught.value.param == "cache"
    if isinstance(word, str):
        assert '"default", "no-store", "bypass", "off"' in caught.value.message


def test_a_priority_reaches_the_engine(client, live):
    complete(client, FOX, extra_body={"priority": 9})
    chat(client, max_tokens=2)
    assert [prompt.priority for prompt in live.engine.submitted] == [9, 0]
    assert [prompt.adapter for prompt in live.engine.submitted] == ["", ""]


def test_sampling_reaches_the_engine(client, live):
    client.completions.create(
        model="echo", prompt="x", temperature=0.5, top_p=0.25, seed=9, max_tokens=3,
        extra_body={"top_k": 4},
    )  # fmt: skip
    found = live.engine.submitted[-1].sampling
    assert (found.temperature, found.top_p, found.top_k) == (0.5, 0.25, 4)
    assert (found.seed, found.max_tokens, found.logprobs) == (9, 3, None)


def test_what_changes_logits_reaches_the_engine(client, live, tokenizer):
    extra = {"repetition_penalty": 1.5, "min_p": 0.25, "min_tokens": 2, "stop_token_ids": [7]}
    complete(
        client,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"5": 3},
        max_tokens=9,
        extra_body=extra,
    )
    sampling = live.engine.submitted[0].sampling
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.min_p, sampling.min_tokens) == (1.5, 0.25, 2)
    assert sampling.logit_bias == ((5, 3.0),)
    assert sampling.stop_tokens == (*tokenizer.encode(EOS).tolist(), 7)
    complete(client, max_tokens=9, extra_body={"stop_token_ids": [7], "ignore_eos": True})
    assert live.engine.submitted[1].sampling.stop_tokens == (7,)


def test_a_clients_own_id_is_the_answers_and_may_come_twice(client, live):
    answers = [complete(client, extra_body={"rid": "mine"}, n=2) for _ in range(2)]
    assert {answer.id for answer in answers} == {"cmpl-mine"}
    assert chat(client, extra_body={"request_id": "yours"}).id == "chatcmpl-yours"
    ids = [prompt.id for prompt in live.engine.submitted]
    assert len(set(ids)) == 5
    assert all(id_.startswith("mine-") for id_ in ids[:4])


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_beside_the_text(http, tokenizer, stream):
    prompt = tokenizer.encode(FOX).tolist()
    body = {"prompt": FOX, "max_tokens": 5, "temperature": 0, "n": 2, "return_token_ids": True}
    if not stream:
        choices = http.post("/v1/completions", json=body).json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [prompt, prompt]
        assert [choice["token_ids"] for choice in choices] == [prompt[:5], prompt[:5]]
        body = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}
        whole = http.post("/v1/chat/completions", json={**body, "max_tokens": 3}).json()
        assert tokenizer.decode(whole["prompt_token_ids"]) == "<user>hi<assistant>"
        assert len(whole["choices"][0]["token_ids"]) == 3
        return
    found, prompts = {0: [], 1: []}, []
    for chunk in http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n"):
        if chunk and "[DONE]" not in chunk:
            for choice in json.loads(chunk.removeprefix("data: "))["choices"]:
                found[choice["index"]] += choice["token_ids"]
                prompts += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    assert found == {0: prompt[:5], 1: prompt[:5]}
    assert prompts == [prompt, prompt]


def test_a_prompt_is_cut_to_its_last_tokens(client, http, live, tokenizer):
    tokens = tokenizer.encode(FOX * 40).tolist()
    for most, kept in ((7, 7), (-1, MAX_MODEL_LEN - 150)):
        extra = {"truncate_prompt_tokens": most}
        complete(client, prompt=FOX * 40, max_tokens=150, extra_body=extra)
        complete(client, prompt=tokens, max_tokens=150, extra_body=extra)
        assert [p.tokens.tolist() for p in live.engine.submitted[-2:]] == [tokens[-kept:]] * 2
    body = {"prompt": FOX, "truncate_prompt_tokens": MAX_MODEL_LEN + 1}
    error = error_of(http.post("/v1/completions", json=body), 400)
    assert error["param"] == "truncate_prompt_tokens"


def test_how_a_chat_is_spelled_is_the_clients(http, live, tokenizer):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for extra, text in (
        ({"add_generation_prompt": False}, "<user>hi"),
        ({"continue_final_message": True}, "<user>hi"),
        ({"chat_template_kwargs": {"mood": "dry"}}, "<dry><user>hi<assistant>"),
    ):
        assert http.post("/v1/chat/completions", json=body | extra).status_code == 200
        assert tokenizer.decode(live.engine.submitted[-1].tokens.tolist()) == text


def test_log_probabilities_of_a_completion(client, tokenizer):
    found = complete(client, FOX, logprobs=2, max_tokens=9).choices[0]
    tokens = tokenizer.encode(FOX).tolist()[:9]
    assert found.logprobs.tokens == [tokenizer.token_text(token) for token in tokens]
    assert found.logprobs.token_logprobs == [-0.25] * 9
    assert all(2 <= len(top) <= 3 for top in found.logprobs.top_logprobs)
    assert found.logprobs.text_offset[:2] == [0, len(tokenizer.token_text(tokens[0]))]


def test_log_probabilities_of_a_chat(client):
    found = chat(client, "Ü", logprobs=True, top_logprobs=2, max_tokens=12).choices[0]
    assert len(found.logprobs.content) == 12
    joined = b"".join(bytes(token.bytes) for token in found.logprobs.content)
    assert joined.decode() == found.message.content
    assert [len(token.top_logprobs) for token in found.logprobs.content] == [2] * 12
    assert chat(client, max_tokens=2).choices[0].logprobs is None


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        {"max_tokens": 40},
        {"max_tokens": 40, "stop": "fox"},
        {"max_tokens": 40, "logprobs": 1},
        {"max_tokens": 20, "n": 3},
    ],
)
def test_a_streamed_completion_is_the_whole_one(client, live, extra):
    whole = complete(client, [FOX, "another prompt"], **extra)
    live.engine.pause_s = 0.002
    chunks = list(
        complete(client, [FOX, "another prompt"], stream=True, **extra,
                 stream_options={"include_usage": True})
    )  # fmt: skip
    *parts, last = chunks
    assert len(parts) > 3
    assert all(chunk.usage is None for chunk in parts)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        mine = [c for part in parts for c in part.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == choice.finish_reason
        if choice.logprobs is not None:
            offsets = [offset for c in mine for offset in c.logprobs.text_offset]
            assert offsets == choice.logprobs.text_offset


def test_a_streamed_chat_is_the_whole_one(client, live):
    whole = chat(client, FOX, max_tokens=60, n=2)
    live.engine.pause_s = 0.002
    chunks = list(chat(client, FOX, max_tokens=60, n=2, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole.choices:
        mine = [c for part in chunks for c in part.choices if c.index == choice.index]
        assert len(mine) > 3
        assert mine[0].delta.role == "assistant"
        assert [c.delta.role for c in mine[1:]] == [None] * (len(mine) - 1)
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content


def test_tokens_come_as_they_are_made(http, live):
    live.engine.shuts_after = live.engine.steps + 1
    body = {"prompt": FOX, "stream": True, "max_tokens": 20, "temperature": 0}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
        assert live.engine.requests  # still running
        live.engine.gate.set()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"


# -- the rest of the surface -----------------------------------------------------------------------


def test_models_health_version_and_info(http, client):
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").id == "echo"
    assert http.get("/health").json() == {"status": "ready"}
    assert http.get("/version").json() == {"version": "0.0.test"}
    info = http.get("/server_info").json()
    assert (info["model"], info["state"]) == ("echo", "ready")
    assert info["spec"] == {"groups": ["full", "swa"]}


def test_tokenize_and_back(http, tokenizer):
    found = http.post("/tokenize", json={"prompt": FOX}).json()
    assert found["tokens"] == tokenizer.encode(FOX).tolist()
    assert found["count"] == len(found["tokens"])
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": FOX}
    chatted = http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert tokenizer.decode(chatted["tokens"]) == "<user>a<assistant>"
    assert error_of(http.post("/tokenize", json={}), 400)["param"] == "prompt"
    assert error_of(http.post("/detokenize", json={"tokens": ["a"]}), 400)["param"] == "tokens"


def test_flush_is_refused_while_busy(http, live):
    live.engine.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        running_one = pool.submit(http.post, "/v1/completions", json={"prompt": FOX})
        wait_until(lambda: live.engine.requests)
        live.engine.batch = 0  # nothing advances, so that the request is still there
        flushing = threading.Timer(0.05, live.engine.gate.set)
        flushing.start()
        assert (
            error_of(httpx.post(f"{live.url}/flush_cache", timeout=PATIENCE_S), 409)["code"]
            == "busy"
        )
        live.engine.batch = 32
        assert running_one.result(PATIENCE_S).status_code == 200
        flushing.join()
    assert live.engine.seen
    assert http.post("/flush_cache").json() == {"flushed": True}
    assert not live.engine.seen


def test_metrics_count_what_happened(fresh):
    with openai.OpenAI(base_url=f"{fresh.url}/v1", api_key="none", max_retries=0) as client:
        complete(client, FOX)
        complete(client, FOX)
        list(chat(client, "x", stream=True, max_tokens=3))
    httpx.get(f"{fresh.url}/no/such/path")
    text = httpx.get(f"{fresh.url}/metrics").text
    found = scraped(text)
    assert found["stratakv_requests_total", "length"] == 3
    assert found["stratakv_generated_tokens_total",] == 35
    assert found["stratakv_time_to_first_token_seconds_count",] == 3
    assert found["stratakv_inter_token_latency_seconds_count",] == 32
    assert found["stratakv_e2e_request_latency_seconds_count",] == 3
    assert found["stratakv_http_responses_total", "404", "other"] == 1
    assert 'stratakv_http_responses_total{model_name="echo",path="other",status="404"} 1.0' in text
    for tier in ("device", "host", "storage"):
        assert found["stratakv_cached_prompt_tokens_total", tier] >= 1
    assert "cmpl-" not in text
    assert "no/such" not in text
