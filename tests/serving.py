"""Support for tests of ``serve``: a tokenizer trained on the spot, a scripted engine, a server.

The engine says a prompt again, token by token, so that a test writes the answer it wants to get.
It runs on the driver's real thread, behind a real uvicorn.
"""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from stratakv.core.clock import MonotonicClock
from stratakv.core.config import ServerConfig
from stratakv.core.errors import RequestError
from stratakv.core.ids import GroupId, PageKey, RequestId, TicketId
from stratakv.engine.attachment import BESIDE_STEPS, AttachmentReport, StorageCall, Verb
from stratakv.engine.grammars import NO_GRAMMARS
from stratakv.engine.request import CachedTokens, FinishReason, Output, Prompt, TokenLogprob
from stratakv.engine.storage_control import (
    BackgroundStores,
    Openable,
    StorageControl,
    StoreOpener,
    no_store,
)
from stratakv.serve.admin import StorageAdmin
from stratakv.serve.bodies import TOGETHER_BYTES, BodyMemory
from stratakv.serve.connection_limits import LIMITS, ConnectionLimits, connection_limits
from stratakv.serve.driver import EngineDriver
from stratakv.serve.metrics import ServerMetrics
from stratakv.serve.server import Server, bound_socket, serve_forever
from stratakv.serve.service import Limits, Service, WebOptions
from stratakv.serve.tokenizer import Tokenizer
from stratakv.serve.tool_parsers import FORMATS
from stratakv.storage.backend import Everything, ObjectKey, StoreFormat
from stratakv.storage.io_jobs import Job, Kind, Remove, Store, kind_of
from stratakv.storage.io_worker import IoWorker
from stratakv.testing.patience import PATIENCE_S
from stratakv.tiers.statistics import PageAgeStats, StorageStats
from stratakv.transfer.copy_plan import Direction

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. ",
    "Grüße aus Köln! Ça va très bien, merci. 東京は大きい。 👍🏽 👩‍👩‍👧 🇩🇪 😀😃 emoji ",
    "stop STOP ###END### one two three four five six seven eight nine ten\n\n",
]
TEMPLATE = (
    "{% if mood %}<{{ mood }}>{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and not (message.content or message.tool_calls) %}"
    "{{ raise_exception('an empty turn') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}"
    "{% endfor %}{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EOS = "<|eos|>"
FOX = "The quick brown fox, Grüße 👍🏽 东京! "
MAX_MODEL_LEN = 512
POOL_TOKENS = 400  # prompts above this are refused by the engine, not by the server
GROUPS = {GroupId(0): "full", GroupId(1): "swa"}


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
    known_tokens: int
    lost_tokens: dict[tuple[str, str], int]
    counters: dict[str, int]
    failures: dict[str, int]
    storage: StorageStats | None
    phases: dict[str, int] = field(default_factory=lambda: {"waiting": 0, "decoding": 2})
    step_s: dict[str, float] = field(default_factory=lambda: {"forward": 1.5})
    copies: dict[Direction, int] = field(default_factory=lambda: {Direction.LOAD: 1})
    ages: PageAgeStats = field(default_factory=PageAgeStats)


STORAGE_STATS = StorageStats(
    pages={"written": 5, "dropped": 1},
    tokens={"found": 96, "hits": 64},
    lost_tokens={"deadline": 32},
    abandoned={"io_error": 2},
    reading_off=False,
    writing_off=True,
    busy=False,
)
STORE_FORM = StoreFormat(spec_digest=b"s" * 16, page_bytes=(64,))


@dataclass
class FakeStorage:
    """What an engine does with a worker: a ``Tier``. ``jobs``: submitted and not yet taken, by
    kind."""

    worker: IoWorker | None = None
    detaching: bool = False
    asked: int = 0
    jobs: dict[TicketId, Kind] = field(default_factory=dict)

    def submit(self, job: Job) -> None:
        assert self.worker is not None
        assert not self.detaching
        ticket = self.worker.submit(job)
        assert ticket is not None
        self.jobs[ticket] = kind_of(job)

    def store(self, *names: int) -> None:
        """Queue a write of one page for each name."""
        keys = [ObjectKey(PageKey(bytes([name]) * 32), GroupId(0)) for name in names]
        self.submit(Store(keys, [memoryview(bytes([name]) * 64) for name in names]))

    def take(self) -> None:
        assert self.worker is not None
        for kind in set(self.jobs.values()):
            for answer in self.worker.take(kind, self.worker.ready(kind)):
                del self.jobs[answer.ticket]

    def cancel(self) -> None:
        assert self.worker is not None
        for ticket in self.jobs:
            self.worker.cancel(ticket)

    def attach(self, worker: IoWorker) -> None:
        assert self.worker is None
        self.worker = worker
        self.detaching = False

    def detach(self, *, force: bool = False) -> IoWorker | None:
        self.asked += 1
        self.detaching = True
        if force:
            self.cancel()
        self.take()
        if self.jobs:
            return None
        worker, self.worker = self.worker, None
        return worker

    def keep(self) -> None:
        self.detaching = False

    def clear(self) -> bool:
        self.submit(Remove(Everything.EVERYTHING))
        return True


@dataclass
class Running:
    prompt: Prompt
    made: int = 0


@dataclass
class EchoEngine:
    """Answers with the prompt's own tokens, again and again; with a temperature, each is drawn by
    the request's seed. At most ``batch`` requests run. A second look at a prompt is a cache hit.

    ``gate``: steps wait until it is set; ``shuts_after``: steps after which it is cleared, from 1
    up. ``pause_s``: what a step takes, so that clients see tokens one by one. ``failure``: raised
    by the next step.
    """

    batch: int = 32
    gate: threading.Event = field(default_factory=threading.Event)
    shuts_after: int = 0
    pause_s: float = 0.0
    failure: Exception | None = None
    requests: dict[RequestId, Running] = field(default_factory=dict)
    seen: set[bytes] = field(default_factory=set)
    submitted: list[Prompt] = field(default_factory=list)
    aborted: list[RequestId] = field(default_factory=list)
    abort_seen: threading.Event = field(default_factory=threading.Event)
    steps: int = 0
    threads: set[int] = field(default_factory=set)
    storage: FakeStorage = field(default_factory=FakeStorage)
    opener: StoreOpener = no_store

    def __post_init__(self) -> None:
        self.gate.set()
        self._control = StorageControl(self.storage, BackgroundStores(self.opener))

    @property
    def beside_steps(self) -> frozenset[Verb]:
        return BESIDE_STEPS

    def call_storage(self, call: StorageCall) -> Sequence[AttachmentReport]:
        if call.verb not in BESIDE_STEPS:
            self.threads.add(threading.get_ident())
        return (self._control.call(call),)

    @property
    def store(self) -> Openable | None:
        return self._control.store

    def storage_stats(self) -> StorageStats | None:
        self.threads.add(threading.get_ident())
        return None if self.storage.worker is None else STORAGE_STATS

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
        assert self.gate.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        time.sleep(self.pause_s)
        self.steps += 1
        if self.steps == self.shuts_after:
            self.gate.clear()
        running = list(self.requests.values())[: self.batch]
        return [self._advance(one) for one in running]

    def flush(self) -> bool:
        if self.requests:
            return False
        self.seen.clear()
        return True

    def stats(self) -> FakeStats:
        running = min(self.batch, len(self.requests))
        pools = tuple(
            FakePool(group, tier) for group in GROUPS.values() for tier in ("device", "host")
        )
        counters = {"backup_pages": 7}
        return FakeStats(
            len(self.requests) - running,
            0,
            running,
            self.steps,
            pools,
            48,
            {("device", "evicted"): 16, ("storage", "deadline"): 32},
            counters,
            {"internal": 3},
            self.storage_stats(),
        )

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
        device, storage = hit // 2, hit // 8
        host = hit - device - storage
        return CachedTokens(
            device=device,
            host=host,
            storage=storage,
            groups_device=(device, 1),
            groups_host=(host, 2),
            groups_storage=(storage, 3),
            use=prompt.use,
        )


def make_service(
    tokenizer: Tokenizer,
    engine: EchoEngine,
    *,
    max_waiting: int = 64,
    api_key: str | None = None,
    admin_key: str | None = None,
    check: Callable[[str], None] | str = "there is no host tier",
    body_bytes: int = 1 << 16,
    bodies_bytes: int = TOGETHER_BYTES,
    web: WebOptions | None = None,
) -> Service:
    vocab = 400
    clock = MonotonicClock()
    driver = EngineDriver(engine, max_waiting=max_waiting, clock=clock)
    return Service(
        driver=driver,
        storage=StorageAdmin(driver, engine, clock, check),
        tokenizer=tokenizer,
        grammars=NO_GRAMMARS,
        metrics=ServerMetrics(GROUPS, "echo"),
        clock=clock,
        version="0.0.test",
        model="echo",
        limits=Limits(max_model_len=MAX_MODEL_LEN, vocab=vocab, body_bytes=body_bytes),
        groups=GROUPS,
        stop_tokens=tokenizer.eos,
        grammar_stops=tokenizer.eos,
        info={"spec": {"groups": list(GROUPS.values())}},
        api_keys={} if api_key is None else {"default": api_key},
        admin_key=admin_key,
        bodies=BodyMemory(bodies_bytes),
        web=web or WebOptions(),
        tool_format=FORMATS["hermes"],
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
def running(
    service: Service,
    engine: EchoEngine,
    *,
    drain_s: float = PATIENCE_S,
    limits: ConnectionLimits = LIMITS,
) -> Iterator[LiveServer]:
    """Serve on a free port of the loopback until the block ends."""
    listener: socket.socket = bound_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.listen()  # connections wait in its queue until uvicorn takes them
    server = Server(service, drain_s=drain_s, limits=limits)
    service.driver.start()
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield LiveServer(service, engine, server, thread, url)
    finally:
        engine.gate.set()
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        service.storage.settle(PATIENCE_S)
        assert service.driver.stop(PATIENCE_S)
        service.storage.close()


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@contextmanager
def process(
    directory: Path, log: Path, *, soft: int, hard: int
) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server that answers no completion, under limits of open files."""
    root = Path(__file__).parents[1]
    paths = f"{root / 'src'}{os.pathsep}{root}"
    limits = f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"'
    server = [sys.executable, "-m", "tests.serving", str(directory), "hold"]
    with log.open("wb") as errors:
        found = subprocess.Popen(
            ["sh", "-c", limits, "sh", *server],
            cwd=root,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        line = found.stdout.readline()
        url = re.fullmatch(r"stratakv: listening on (http://\S+)\n", line)
        assert url is not None, log.read_text()
        yield found, url[1]
    finally:
        found.kill()
        found.communicate()


@dataclass(frozen=True)
class ProcessSize:
    """``handles``: open files and sockets."""

    resident_bytes: int
    threads: int
    handles: int


def size_of(pid: int) -> ProcessSize:
    """Of a running process, as Linux tells it."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"(VmRSS|Threads):\s+(\d+)", status))
    handles = len(os.listdir(f"/proc/{pid}/fd"))
    return ProcessSize(int(found["VmRSS"]) << 10, int(found["Threads"]), handles)


def main() -> int:
    """Serve for a test of a whole process: DIRECTORY of a tokenizer, then what should happen: fail,
    or hold, which answers nothing."""
    engine = EchoEngine()
    if "fail" in sys.argv:
        engine.failure = ValueError("a seeded failure")
    if "hold" in sys.argv:
        engine.gate.clear()
    service = make_service(
        Tokenizer(Path(sys.argv[1])), engine, max_waiting=4096, body_bytes=8 << 20
    )
    limits = connection_limits(ServerConfig())
    return serve_forever(service, host="127.0.0.1", port=0, drain_s=PATIENCE_S, limits=limits)


if __name__ == "__main__":
    sys.exit(main())
