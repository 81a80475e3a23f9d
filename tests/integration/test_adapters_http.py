"""Adapters over HTTP: named in ``model``, listed, several at once, each with pages of its own."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch

from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.serve import wiring
from stratakv.serve.server import Server, bound_socket
from stratakv.serve.wiring import build_service
from stratakv.testing.patience import PATIENCE_S
from tests.fixtures.lora import peft_oracle, save_adapter
from tests.fixtures.models import random_prompt, reference_greedy, tiny_model
from tests.serving import error_of, train_tokenizer

FAMILY = "llama"
PAGE = 16
OUTPUT = 6
PROMPT = [token % 400 for token in random_prompt(1, 100)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = train_tokenizer(tmp_path_factory.mktemp("model") / "base")
    tiny_model(FAMILY).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters")
    sql, poems = path / "sql", path / "poems"
    return {"sql": save_adapter(sql, FAMILY, 1), "poems": save_adapter(poems, FAMILY, 2, r=2)}


def settings(**lora):
    return EngineConfig(
        page_tokens=PAGE,
        dtype="float32",
        device_memory="4MiB",
        host_memory="4MiB",
        max_running=8,
        step_tokens=256,
        chunk_tokens=64,
        chat_tokens=256,
        lora=tuple(f"{name}={path}" for name, path in lora.items()),
    )


@pytest.fixture(scope="module")
def url(directory, directories):
    torch.set_num_threads(1)
    service, parts = build_service(directory, settings(**directories), ServerConfig())
    listener = bound_socket("127.0.0.1", 0)
    listener.listen(64)
    server = Server(service, drain_s=PATIENCE_S)
    service.driver.start()
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        stopped = service.driver.stop(PATIENCE_S)
        parts.close()
        assert stopped


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def expected(directory, directories):
    """What each name says to a prompt, from Hugging Face and PEFT without a cache."""
    oracles = {name: peft_oracle(FAMILY, path) for name, path in directories.items()}
    oracles["base"] = tiny_model(FAMILY)
    tokenizer = wiring.Tokenizer(directory)

    def answer(name, prompt):
        tokens, _ = reference_greedy(oracles[name], prompt, OUTPUT)
        return [tokenizer.token_text(token) for token in tokens]

    return answer


def ask(client, model, prompt=PROMPT, salt=""):
    return client.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=OUTPUT, logprobs=0,
        extra_body={"ignore_eos": True, "cache_salt": salt},
    )  # fmt: skip


def cached(answer):
    return answer.usage.prompt_tokens_details.cached_tokens


def test_two_adapters_and_the_model_at_once(client, expected):
    names = ("sql", "base", "poems")
    prompts = {name: [[*PROMPT[:-1], i] for i in range(3)] for name in names}
    with ThreadPoolExecutor(9) as pool:
        asked = {
            (name, i): pool.submit(ask, client, name, prompt, "at once")
            for name in names
            for i, prompt in enumerate(prompts[name])
        }
        for (name, i), answer in asked.items():
            found = answer.result(PATIENCE_S)
            assert found.model == name
            assert found.choices[0].logprobs.tokens == expected(name, prompts[name][i]), name
    assert len({tuple(expected(name, PROMPT)) for name in names}) == 3


def test_no_name_and_no_salt_hits_another(client, expected):
    spaces = [(name, salt) for name in ("base", "sql", "poems") for salt in ("", "a", "b")]
    for name, salt in spaces:
        found = ask(client, name, salt=salt)
        assert (cached(found), found.choices[0].logprobs.tokens) == (0, expected(name, PROMPT))
    for name, salt in spaces:
        found = ask(client, name, salt=salt)
        assert (cached(found), found.choices[0].logprobs.tokens) == (96, expected(name, PROMPT))


def test_a_chat_with_an_adapter_says_so(client):
    messages = [{"role": "user", "content": "hello"}]
    answers = {
        name: client.chat.completions.create(
            model=name, messages=messages, temperature=0, max_tokens=OUTPUT
        )
        for name in ("base", "sql")
    }
    assert [answer.model for answer in answers.values()] == ["base", "sql"]
    texts = {answer.choices[0].message.content for answer in answers.values()}
    assert len(texts) == 2


def test_models_lists_the_adapters_under_their_model(client, url):
    listed = client.models.list().data
    assert [(one.id, one.parent) for one in listed] == [
        ("base", None), ("sql", "base"), ("poems", "base"),
    ]  # fmt: skip
    assert client.models.retrieve("poems").id == "poems"
    info = httpx.get(f"{url}/server_info").json()
    assert info["model"] == "base"
    assert {name: len(digest) for name, digest in info["engine"]["lora"].items()} == {
        "sql": 64, "poems": 64,
    }  # fmt: skip


def test_a_name_that_is_neither_is_not_found(url):
    body = {"model": "prose", "prompt": "x"}
    error = error_of(httpx.post(f"{url}/v1/completions", json=body), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'base', 'sql', 'poems'" in error["message"]
    error_of(httpx.get(f"{url}/v1/models/prose"), 404)


def test_an_adapter_may_not_take_the_models_name(directory, directories, monkeypatch):
    monkeypatch.setattr(wiring, "load_model", None)  # no weights are read
    for name, server in (("base", ServerConfig()), ("me", ServerConfig(served_model_name="me"))):
        with pytest.raises(ConfigError, match=rf"^--lora {name}=.*: the model has this name"):
            build_service(directory, settings(**{name: directories["sql"]}), server)
