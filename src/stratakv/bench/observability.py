"""``stratakv bench observability``: what it costs a step that a server is watched: its metrics, the
split of a step's time, its log. Takes two minutes.

Owns the two contenders, which are one server in turn: as it is shipped, and with all that watches
it left out. What is left out is named here, and nothing else differs. Must not know how a server
works.
"""

import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from starlette.types import ASGIApp, Message, Scope
from transformers import PreTrainedModel

from stratakv.bench.rig import errors_alone, one_thread
from stratakv.bench.saved_model import save
from stratakv.bench.shapes import HYBRID, build
from stratakv.core.clock import ManualClock
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.logs import JsonLines
from stratakv.engine.step_times import StepTimes
from stratakv.serve.connection_limits import LIMITS, Crowd
from stratakv.serve.driver import EngineDriver
from stratakv.serve.http_api import build_app
from stratakv.serve.metrics import Durations, ServerMetrics
from stratakv.serve.service import Service
from stratakv.serve.throughput import PERIOD_S, ThroughputLog
from stratakv.serve.wiring import build_service
from stratakv.tiers.page_ages import PageAges

TARGET: Final = 1.01
LAPS: Final = 60
"""And one before that does not count."""
TURNS: Final = 8
"""Of each contender in a lap."""
TURN_STEPS: Final = 16
"""As many as one answer ends in, on average; short, so that whatever else the machine does meets
both alike."""
RUNNING: Final = 4
CLIENTS: Final = 8
"""More than run at once: there is always somebody waiting, and no turn without a step."""
PROMPT_TOKENS: Final = 16
NEW_TOKENS: Final = (32, 97)
"""Answers end at no time that turns could fall into step with; nor has a turn a fixed place."""
SCRAPES: Final = 10
STOP_S: Final = 30.0
WATCHERS: Final[Sequence[tuple[type, str]]] = (
    (StepTimes, "enter"),
    (StepTimes, "pause"),
    (PageAges, "moved"),
    (PageAges, "used"),
    (ServerMetrics, "responded"),
    (ServerMetrics, "prompted"),
    (ServerMetrics, "finished"),
    (Durations, "observe"),
)
"""What is called while steps go on, and does nothing in a lap of the bare server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observability:
    """Processor time of a step, all threads of the process: of the watched server, of the bare one,
    and their ratio, each the median of laps. ``shown_ms``: of a scrape and a line of throughput, of
    which a watched server has one in ten seconds. ``log_lines``: all that were written."""

    watched_us: float
    bare_us: float
    observability_ratio: float
    shown_ms: float
    log_lines: int


@dataclass(slots=True)
class _Watch:
    on: bool = True

    def turn(self, *, on: bool) -> None:
        self.on = on
        logging.disable(logging.NOTSET if on else logging.CRITICAL)

    def asked(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        """``verb``, where this is on. That it is asked costs both contenders the same."""

        @wraps(verb)
        def only_on(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of whatever verb it is
            return verb(*args, **kwargs) if self.on else None

        return only_on


@contextmanager
def _watch() -> Generator[_Watch]:
    """Before a server is made: some verbs are looked up once."""
    watch = _Watch()
    with ExitStack() as undo:
        for owner, name in WATCHERS:
            verb = vars(owner)[name]
            undo.callback(setattr, owner, name, verb)
            setattr(owner, name, watch.asked(verb))
        yield watch


@contextmanager
def _log(path: Path) -> Generator[None]:
    """All lines as JSON, in a file."""
    logger, handler = logging.getLogger("stratakv"), logging.FileHandler(path)
    handler.setFormatter(JsonLines())
    level, passes_on = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = passes_on
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()


def run() -> dict[str, object]:
    """Measure, and print what has come of it."""
    with one_thread(), errors_alone("transformers"):
        found = observability(build(HYBRID))
    print(
        "a step of a server with metrics, the split of its time and JSON log lines, to one of the "
        f"same without:\nobservability_ratio {found.observability_ratio:.3f} (at most {TARGET}), "
        f"{found.watched_us:.0f} to {found.bare_us:.0f} us of processor time\n"
        f"a scrape and a line of throughput: {found.shown_ms:.1f} ms; "
        f"{found.log_lines} lines logged"
    )
    return asdict(found)


def observability(model: PreTrainedModel) -> Observability:
    """Serve traffic with and without what watches, in turn, and time steps."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        watch = stack.enter_context(_watch())
        save(model, directory)
        config = EngineConfig(
            page_tokens=16, max_running=RUNNING, device_memory="32MiB", kv_cache_metrics=True
        )
        service, parts = build_service(directory, config, ServerConfig())
        stack.callback(parts.transfer.close)
        path = directory / "log"
        stack.enter_context(_log(path))
        service.driver.start()
        stack.callback(service.driver.stop, STOP_S)
        spent, shown_s = asyncio.run(_measure(service, watch, LAPS))
        lines = len(path.read_bytes().splitlines())
    watched = [one * (1 + shown_s / PERIOD_S) for one in spent[True]]
    pairs = zip(watched, spent[False], strict=True)
    return Observability(
        watched_us=1e6 * median(watched),
        bare_us=1e6 * median(spent[False]),
        observability_ratio=median(one / other for one, other in pairs),
        shown_ms=1e3 * shown_s,
        log_lines=lines,
    )


class _Laps:
    """Seconds of processor time of a step, by lap, watched and not. ``begin`` puts it between any
    two steps, on the engine's thread."""

    def __init__(self, driver: EngineDriver, watch: _Watch, laps: int) -> None:
        self.spent_s: Final[dict[bool, list[float]]] = {True: [], False: []}
        self.ended: Final[Future[None]] = Future()
        self._driver, self._watch, self._laps = driver, watch, laps
        self._lap_s = dict.fromkeys((True, False), 0.0)
        self._turn = self._step = 0
        self._since_s = 0.0
        self._rng, self._first_one = np.random.default_rng(0), True

    def begin(self) -> None:
        self._driver.ask(self._first)

    def _first(self) -> None:
        if self._driver.open_requests < CLIENTS:
            self._driver.ask(self._first)
            return
        self._since_s = time.process_time()
        self._driver.ask(self._next)

    def _next(self) -> None:
        """A step has ended."""
        self._step += 1
        if self._step == TURN_STEPS:
            self._lap_s[self._watch.on] += time.process_time() - self._since_s
            self._step, self._turn = 0, self._turn + 1
            if self._turn == 2 * TURNS:
                self._turn = 0
                self._end_lap()
            self._watch.turn(on=self._next_one())
            self._since_s = time.process_time()
        if len(self.spent_s[True]) < self._laps:
            self._driver.ask(self._next)
        else:
            self._watch.turn(on=True)
            self.ended.set_result(None)

    def _next_one(self) -> bool:
        """Of two turns the first is anybody's."""
        self._first_one = self._first_one if self._turn % 2 else bool(self._rng.integers(2))
        return self._first_one != bool(self._turn % 2)

    def _end_lap(self) -> None:
        for watched, taken_s in self._lap_s.items():
            self.spent_s[watched].append(taken_s / (TURNS * TURN_STEPS))
            self._lap_s[watched] = 0.0


@dataclass(slots=True, eq=False)
class _Traffic:
    """Streamed answers of one server, asked where its sockets would ask."""

    service: Service
    app: ASGIApp
    rng: np.random.Generator
    ended: bool = False

    async def go_on(self) -> None:
        """One client, who asks again as soon as he is answered."""
        while not self.ended:
            prompt = self.rng.integers(0, self.service.limits.vocab, PROMPT_TOKENS)
            new_tokens = int(self.rng.integers(*NEW_TOKENS))
            await self.ask("POST", "/v1/completions", _body(prompt, new_tokens))

    async def ask(self, method: str, path: str, body: bytes) -> None:
        scope: Scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": path, "headers": [],
            "query_string": b"", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
        }  # fmt: skip
        coming = [{"type": "http.request", "body": body, "more_body": False}]
        statuses: list[int] = []

        async def receive() -> Message:
            while not coming:  # the client stays
                await asyncio.Event().wait()
            return coming.pop()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await self.app(scope, receive, send)
        assert statuses == [200], f"{path} was answered with {statuses}"


def _body(prompt: npt.NDArray[np.int64], new_tokens: int) -> bytes:
    return json.dumps({
        "prompt": prompt.tolist(), "max_tokens": new_tokens, "temperature": 0, "stream": True,
        "ignore_eos": True,
    }).encode()  # fmt: skip


async def _measure(
    service: Service, watch: _Watch, laps: int
) -> tuple[Mapping[bool, list[float]], float]:
    """Seconds of a step by lap, watched and not, and of what is shown."""
    traffic = _Traffic(service, build_app(service, Crowd(LIMITS)), np.random.default_rng(0))
    clients = [asyncio.create_task(traffic.go_on()) for _ in range(CLIENTS)]
    measured = _Laps(service.driver, watch, laps + 1)
    before = await service.driver.stats()
    measured.begin()
    await asyncio.wrap_future(measured.ended)
    after = await service.driver.stats()
    traffic.ended = True
    await asyncio.gather(*clients)
    turns, steps = 2 * TURNS * TURN_STEPS * (laps + 1), after.steps - before.steps
    assert turns <= steps, f"only {steps} steps in {turns} turns"
    spent_s = {watched: taken[1:] for watched, taken in measured.spent_s.items()}
    return spent_s, median([await _shown_s(service, traffic) for _ in range(SCRAPES)])


async def _shown_s(service: Service, traffic: _Traffic) -> float:
    """Processor time of a scrape and of a line of throughput."""
    clock = ManualClock()
    throughput = ThroughputLog(service.driver, service.metrics, clock)
    throughput.tick()
    await traffic.ask("POST", "/v1/completions", _body(np.arange(PROMPT_TOKENS), 1))
    clock.advance(PERIOD_S)
    begin_s = time.process_time()
    throughput.tick()
    await traffic.ask("GET", "/metrics", b"")
    return time.process_time() - begin_s
