"""Support for tests of ``serve``: a tokenizer trained on the spot, a scripted engine, a server.

The engine says a prompt again, token by token, so that a test writes the answer it wants to get.
It runs on the driver's real thread, behind a real uvicorn.
"""

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from stratakv.core.clock import MonotonicClock
from stratakv.core.errors import RequestError
from stratakv.core.ids import RequestId
from stratakv.engine.request import CachedTokens, FinishReason, Output, Prompt, TokenLogprob
from stratakv.serve.driver import EngineDriver
from stratakv.serve.metrics import ServerMetrics
from stratakv.serve.server import Server, bound_socket, serve_forever
from stratakv.serve.service import Limits, Service
from stratakv.serve.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. ",
    "Grüße aus Köln! Ça va très bien, merci. 東京は大きい。 👍🏽 👩‍👩‍👧 🇩🇪 😀😃 emoji ",
    "stop STOP ###END### one two three four five six seven eight nine ten\n\n",
]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' and not message.content %}"
    "{{ raise_exception('an empty turn') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EOS = "<|eos|>"
FOX = "The quick brown fox, Grüße 👍🏽 东京! "
MAX_MODEL_LEN = 512
POOL_TOKENS = 400  # prompts above this are refused by the engine, not by the server
GROUPS = ("full", "swa")


def train_tokenizer(path: Path, vocab: int = 400) -> Path:
    """Write a byte-level BPE tokenizer directory; most characters beyond ASCII take several
    tokens."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(TEXTS, trainer)
    path.mkdir(parents=True, exist_ok=True)
    fast.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@dataclass(frozen=True)
class FakePool:
    group: str
    tier: str
    total: int = 10
    free: int = 4
    evictable: int = 3


@dataclass(frozen=True)
class FakeStats:
    waiting: int
    retracted: int
    running: int
    steps: int
    pages: tuple[FakePool, ...]
    counters: dict[str, int]


@dataclass
class Running:
    prompt: Prompt
    made: int = 0


@dataclass
class EchoEngine:
    """Answers with the prompt's own tokens, again and again; with a temperature, each is drawn by
    the request's seed. At most ``batch`` requests run. A second look at a prompt is a cache hit.

    ``gate``: steps wait until it is set. ``pause_s``: what a step takes, so that clients see tokens
    one by one. ``failure``: raised by the next step.
    """

    batch: int = 32
    gate: threading.Event = field(default_factory=threading.Event)
    pause_s: float = 0.0
    failure: Exception | None = None
    requests: dict[RequestId, Running] = field(default_factory=dict)
    seen: set[bytes] = field(default_factory=set)
    submitted: list[Prompt] = field(default_factory=list)
    aborted: list[RequestId] = field(default_factory=list)
    abort_seen: threading.Event = field(default_factory=threading.Event)
    steps: int = 0
    threads: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.gate.set()

    def submit(self, prompt: Prompt) -> None:
        self.threads.add(threading.get_ident())
        if len(prompt.tokens) > POOL_TOKENS:
            raise RequestError(f"the prompt needs more than {POOL_TOKENS} tokens of pages")
        assert prompt.id not in self.requests
        self.submitted.append(prompt)
        self.requests[prompt.id] = Running(prompt)

    def abort(self, request: RequestId) -> None:
        self.threads.add(threading.get_ident())
        self.requests.pop(request, None)
        self.aborted.append(request)
        self.abort_seen.set()

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Output]:
        self.threads.add(threading.get_ident())
        assert self.gate.wait(20)
        if self.failure is not None:
            raise self.failure
        time.sleep(self.pause_s)
        self.steps += 1
        running = list(self.requests.values())[: self.batch]
        return [self._advance(one) for one in running]

    def flush(self) -> bool:
        if self.requests:
            return False
        self.seen.clear()
        return True

    def stats(self) -> FakeStats:
        running = min(self.batch, len(self.requests))
        pools = tuple(FakePool(group, tier) for group in GROUPS for tier in ("device", "host"))
        counters = {"backup_pages": 7}
        return FakeStats(len(self.requests) - running, 0, running, self.steps, pools, counters)

    def forget(self) -> None:
        """Be as new; only while idle."""
        assert not self.requests
        self.seen.clear()
        self.submitted.clear()
        self.aborted.clear()
        self.abort_seen.clear()
        self.batch = 32
        self.pause_s = 0.0

    def _advance(self, one: Running) -> Output:
        prompt, sampling = one.prompt, one.prompt.sampling
        at = one.made
        if sampling.temperature > 0:
            rng = np.random.default_rng((sampling.seed, at))
            at = int(rng.integers(len(prompt.tokens)))
        token = int(prompt.tokens[at % len(prompt.tokens)])
        first = one.made == 0
        one.made += 1
        finish = None
        if token in sampling.stop_tokens:
            finish = FinishReason.STOP
        elif one.made == sampling.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            del self.requests[prompt.id]
        return Output(
            request=prompt.id,
            token=token,
            logprob=self._logprob(token, sampling.logprobs),
            cached=self._cached(prompt) if first else None,
            finish=finish,
        )

    def _logprob(self, token: int, wanted: int | None) -> TokenLogprob | None:
        if wanted is None:
            return None
        top = tuple(((token + i) % 256 + 1, -0.5 * (i + 1)) for i in range(wanted))
        return TokenLogprob(chosen=-0.25, top=top)

    def _cached(self, prompt: Prompt) -> CachedTokens:
        key = prompt.salt.encode() + prompt.tokens.tobytes()
        hit = len(prompt.tokens) - 1 if key in self.seen else 0
        self.seen.add(key)
        device = hit // 2
        host = hit - device
        return CachedTokens(
            device=device, host=host, groups_device=(device, 1), groups_host=(host, 2)
        )


def make_service(
    tokenizer: Tokenizer,
    engine: EchoEngine,
    *,
    max_waiting: int = 64,
    api_key: str | None = None,
    body_bytes: int = 1 << 16,
) -> Service:
    vocab = 400
    clock = MonotonicClock()
    return Service(
        driver=EngineDriver(engine, max_waiting=max_waiting, clock=clock),
        tokenizer=tokenizer,
        metrics=ServerMetrics(GROUPS),
        clock=clock,
        version="0.0.test",
        model="echo",
        limits=Limits(max_model_len=MAX_MODEL_LEN, vocab=vocab, body_bytes=body_bytes),
        groups=GROUPS,
        stop_tokens=(int(tokenizer.encode(EOS)[0]),),
        info={"spec": {"groups": list(GROUPS)}},
        api_key=api_key,
    )


@dataclass
class LiveServer:
    """A live server; ``url`` without a trailing slash."""

    service: Service
    engine: EchoEngine
    server: Server
    thread: threading.Thread
    url: str


@contextmanager
def running(service: Service, engine: EchoEngine, *, drain_s: float = 5.0) -> Iterator[LiveServer]:
    """Serve on a free port of the loopback until the block ends."""
    listener: socket.socket = bound_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.listen()  # connections wait in its queue until uvicorn takes them
    server = Server(service, drain_s=drain_s)
    service.driver.start()
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield LiveServer(service, engine, server, thread, url)
    finally:
        engine.gate.set()
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
        assert service.driver.stop(10)


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def wait_until(condition):
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def main() -> int:
    """Serve for a test of a whole process: DIRECTORY of a tokenizer, then what should happen."""
    engine = EchoEngine()
    if "fail" in sys.argv:
        engine.failure = ValueError("a seeded failure")
    service = make_service(Tokenizer(Path(sys.argv[1])), engine)
    return serve_forever(service, host="127.0.0.1", port=0, drain_s=5.0)


if __name__ == "__main__":
    sys.exit(main())
