"""What fails over one request fails that request, with an error that says so; the others go on.

Faults are put into a running server, while other clients are in the middle of their answers.
"""

import logging
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from stratakv.cache.admit import Admitter
from stratakv.cache.commits import Committer
from stratakv.core.config import EngineConfig
from stratakv.core.page_keys import PageHasher
from stratakv.engine import sampling
from stratakv.engine.namespaces import Namespaces
from stratakv.engine.rows import Rows
from stratakv.serve.log_throttle import LOGGERS, quieten
from stratakv.serve.tokenizer import Tokenizer
from stratakv.testing.patience import PATIENCE_S
from stratakv.tree.nodes import TIERS
from tests.engines import computing
from tests.fixtures.models import changed_model
from tests.real_server import (
    CHAT,
    COMPLETIONS,
    Bystanders,
    RealServer,
    completion,
    pages_read_as,
    real_server,
    tokens,
)
from tests.scraped import scraped
from tests.serving import error_of, train_tokenizer

PAGE = 16
CONFIG = EngineConfig(
    page_tokens=PAGE,
    dtype="float32",
    device_memory="2MiB",
    host_memory="2MiB",
    max_running=16,
    step_tokens=256,
    chunk_tokens=32,
)
OVERFLOWS = 397
"""A token whose embedding is infinite: a checkpoint that overflows."""
FAULT_SEED = 13
SALT = "a fault"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = train_tokenizer(tmp_path_factory.mktemp("model"))
    model = changed_model("gemma3", tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[OVERFLOWS] = torch.inf
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def shared(directory):
    torch.set_num_threads(1)
    with real_server(directory, CONFIG) as live:
        yield live


@pytest.fixture
def live(shared):
    yield shared
    shared.settled()


@pytest.fixture
def http(live):
    with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as found:
        yield found


@pytest.fixture(scope="module")
def bystanders(shared):
    with httpx.Client(base_url=shared.url, timeout=PATIENCE_S) as http:
        yield Bystanders(http, [tokens(20 + 17 * i, 50 + i) for i in range(3)])


def failures(http: httpx.Client, cause: str) -> int:
    found = scraped(http.get("/metrics").text)
    return int(found["stratakv_requests_failed_total", cause])


BEYOND = [
    ("top_k", 1 << 31), ("top_k", 1 << 63), ("top_k", 10**400), ("max_tokens", 1 << 31),
    ("max_tokens", 1 << 64), ("seed", 1 << 63), ("temperature", 2.0000001), ("top_p", -0.0),
    ("top_p", 5e-324 - 1), ("n", 1 << 31),
]  # fmt: skip
AT_THE_BOUND = [
    {"top_k": (1 << 31) - 1, "temperature": 1},
    {"top_k": 1, "temperature": 5e-324},
    {"temperature": 1e-45, "top_p": 1e-45},
    {"temperature": -0.0},
    {"temperature": 2, "top_p": 5e-324},
    {"temperature": 1e-38, "top_p": 0.9999999999},
    {"seed": -(1 << 63), "temperature": 2},
    {"seed": (1 << 63) - 1, "temperature": 2},
]


# -- at the door -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_number_beyond_its_bound_is_refused_by_name(http, bystanders, path):
    asked = {"prompt": "x"} if path == COMPLETIONS else {}
    if path == CHAT:
        asked = {"messages": [{"role": "user", "content": "x"}]}
    with bystanders.running():
        for field, value in BEYOND:
            error = error_of(http.post(path, json=asked | {"max_tokens": 2, field: value}), 400)
            assert error["param"] == field
            assert field in error["message"]


def test_numbers_at_their_bounds_are_served(http, bystanders):
    with bystanders.running():
        for extra in AT_THE_BOUND:
            answer = http.post(COMPLETIONS, json=completion(tokens(9, 1), 3) | extra)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 3


def test_a_name_that_is_no_text_is_named_in_the_answer(http):
    body = b'{"prompt": "x", "\\ud800": 1}'
    assert error_of(http.post(COMPLETIONS, content=body), 400)["code"] == "unknown_parameter"


# -- one request's exception -----------------------------------------------------------------------


def is_fault(prefix) -> bool:
    return prefix.namespace.salt == SALT


def raises_if(plain, condition):
    def wrapped(*arguments, **more):
        if condition(*arguments, **more):
            raise OverflowError("a seeded fault")
        return plain(*arguments, **more)

    return wrapped


def fault_while_taken(patch) -> None:
    wrong = raises_if(Namespaces.of, lambda _spaces, _adapter, salt: salt == SALT)
    patch.setattr(Namespaces, "of", wrong)


def fault_while_asked(patch) -> None:
    wrong = raises_if(Admitter.match, lambda _admitter, prefix, _tokens: is_fault(prefix))
    patch.setattr(Admitter, "match", wrong)


def fault_while_admitted(patch) -> None:
    wrong = raises_if(Rows.open, lambda _rows, request, _tokens: request.prompt.salt == SALT)
    patch.setattr(Rows, "open", wrong)


def fault_while_planned(patch) -> None:
    wrong = raises_if(Committer.cut, lambda _committer, sequence: is_fault(sequence.prefix))
    patch.setattr(Committer, "cut", wrong)


def fault_while_sampled(patch) -> None:
    def wrong(_logits, params) -> bool:
        return bool((params.seeds == FAULT_SEED).any())

    chosen = raises_if(sampling.chosen_tokens, wrong)
    patch.setattr(sampling, "chosen_tokens", chosen)


FAULTS = [
    fault_while_taken, fault_while_asked, fault_while_admitted, fault_while_planned,
    fault_while_sampled,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_an_exception_over_one_request_ends_that_request_alone(
    live, http, bystanders, monkeypatch, fault
):
    before = failures(http, "internal")
    wrong = completion(tokens(70, 5), 8, cache_salt=SALT, seed=FAULT_SEED, temperature=1)
    with bystanders.running():
        with monkeypatch.context() as patch:
            fault(patch)
            error = error_of(http.post(COMPLETIONS, json=wrong), 500)
            streamed = http.post(COMPLETIONS, json=wrong | {"stream": True})
        assert http.get("/health").json() == {"status": "ready"}
    assert error["code"] == "request_failed_internal"
    assert "request_failed_internal" in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert failures(http, "internal") == before + 2
    live.settled()
    answer = http.post(COMPLETIONS, json=wrong)  # and nothing is left of it
    assert answer.status_code == 200, answer.text


def test_an_exception_while_one_is_answered_ends_that_answer_alone(
    live, http, bystanders, monkeypatch
):
    """Its tokens are made; what fails is to spell them."""
    wrong = completion(tokens(70, 6), 8, logprobs=1)
    unspelled = raises_if(Tokenizer.token_text, lambda *_: True)
    with bystanders.running():
        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "token_text", unspelled)
            answer = http.post(COMPLETIONS, json=wrong)
            streamed = http.post(COMPLETIONS, json=wrong | {"stream": True})
        assert http.get("/health").json() == {"status": "ready"}
    assert error_of(answer, 500)["code"] == "internal_error"
    assert answer.headers["connection"] == "close"  # which it is, and who reuses it reads nothing
    assert "internal_error" in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    live.settled()
    assert http.post(COMPLETIONS, json=wrong).status_code == 200


@pytest.fixture
def quiet():
    quieten()
    yield
    for name in LOGGERS:
        logger = logging.getLogger(name)
        for one in list(logger.filters):
            logger.removeFilter(one)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("fault", [None, fault_while_admitted])
def test_what_fails_again_and_again_is_logged_once(live, http, monkeypatch, caplog, fault):
    prompt = tokens(9, 8) + [OVERFLOWS] * (fault is None)
    with monkeypatch.context() as patch:
        if fault is not None:
            fault(patch)
        for _ in range(5):
            wrong = completion(prompt, 2, cache_salt=SALT)
            assert http.post(COMPLETIONS, json=wrong).status_code == 500
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1


# -- what is not finite ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "place", [69, 5, 40], ids=["in the last chunk", "in the first chunk", "in the middle"]
)
def test_a_model_that_overflows_ends_that_request_alone(live, http, bystanders, temperature, place):
    before = failures(http, "not_finite")
    prompt = tokens(70, 300 + 2 * place + temperature)
    prompt[place] = OVERFLOWS
    wrong = completion(prompt, 8, temperature=temperature)
    with bystanders.running():
        error = error_of(http.post(COMPLETIONS, json=wrong), 500)
    assert error["code"] == "request_failed_not_finite"
    assert "NaN or infinity" in error["message"]
    assert failures(http, "not_finite") == before + 1
    # What it had computed before is no worse than anybody's; from there on nothing was kept.
    assert cached_tokens(live, prompt) <= place // PAGE * PAGE
    live.settled()


def cached_tokens(live: RealServer, prompt: list[int]) -> int:
    """What a request for ``prompt`` would not compute."""
    hasher = PageHasher(live.parts.plan.namespaces.of("", ""), PAGE)
    hasher.extend(np.array(prompt, np.int32))
    found = live.driver.ask(lambda: live.parts.cache.admission.match(hasher, len(prompt)))
    return found.result(PATIENCE_S).end * PAGE


def test_a_damaged_page_ends_who_reads_it_and_nobody_else(live, http, bystanders):
    """It decodes beside others, longer than they and before them: what pads theirs is not its."""
    wrong = completion(tokens(90, 78), 1500, stream=True)  # it is still there when it is hurt
    with http.stream("POST", COMPLETIONS, json=wrong) as stream:
        lines = stream.iter_lines()
        next(lines)
        with bystanders.running():
            live.driver.ask(lambda: damage(live, 90)).result(PATIENCE_S)
            rest = "".join(lines)
    assert "request_failed_not_finite" in rest
    live.settled()


def damage(live: RealServer, prompt_tokens: int) -> None:
    """Put NaN into the first page of a running request, on the engine's thread."""
    running = computing(live.parts)
    row = next(one.row for one in running if len(one.prompt.tokens) == prompt_tokens)
    tables, _ = live.parts.cache.beside
    for group in live.parts.spec.groups:
        pages = tables.pages(group.id)[row]
        live.parts.pools.poison(group.id, pages[pages >= 0][:1])


# -- a store that says NaN -------------------------------------------------------------------------


def failure_of(http: httpx.Client, prompt: list[int]) -> tuple[str, int]:
    answer = http.post(COMPLETIONS, json=completion(prompt, 8))
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]["prompt_tokens_details"]
    return answer.json()["choices"][0]["text"], usage["cached_tokens"]


@contextmanager
def stored_prompt(directory):
    """A server, a client, a prompt whose pages lie in storage alone, and its answer."""
    config = replace(CONFIG, storage="memory://?quota=32MiB", prefetch_threshold=PAGE)
    prompt = tokens(100, 400)
    with (
        real_server(directory, config) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http,
    ):
        alone, _ = failure_of(http, prompt)
        live.settled()
        for tier in TIERS:
            live.driver.ask(partial(live.parts.cache.progress.push_out, tier)).result(PATIENCE_S)
        yield live, http, prompt, alone


def test_a_resealed_page_is_a_hit_for_one_request_and_for_no_other(directory, monkeypatch):
    with stored_prompt(directory) as (live, http, prompt, alone):
        bystanders = Bystanders(http, [tokens(30 + 17 * i, 50 + i) for i in range(3)])
        pages_read_as(monkeypatch, b"\xff")
        with bystanders.running():
            error = error_of(http.post(COMPLETIONS, json=completion(prompt, 8)), 500)
            assert error["code"] == "request_failed_not_finite"
            assert failure_of(http, prompt) == (alone, 0)  # computed again
            assert failure_of(http, prompt) == (alone, 96)  # and cached again
        assert live.stats().storage.pages["distrusted"] == 6
        live.settled()


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_leaves_no_token_harms_no_page_that_it_was_read_with(directory, stream):
    """It is the request's own fault: what storage gave stays there, for it and for others."""
    with stored_prompt(directory) as (live, http, prompt, alone):
        wrong = completion(prompt, 8, regex="a{1000000}", stream=stream, ignore_eos=False)
        answer = http.post(COMPLETIONS, json=wrong)
        if stream:
            assert "request_failed_no_token" in answer.text
        else:
            error = error_of(answer, 400)
            assert error["code"] == "request_failed_no_token"
            assert "too complex" in error["message"]
        assert failure_of(http, prompt) == (alone, 96)
        assert live.stats().storage.pages["distrusted"] == 0
        assert failures(http, "no_token") == 1
        assert failures(http, "not_finite") == 0
        live.settled()
