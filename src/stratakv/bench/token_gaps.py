"""How long those that decode wait for their next token while others bring long prompts.

Owns the servers, the load and the clocks. One server that does both, on two cores, beside one that
computes prompts and one that decodes, on one of these cores each. All are processes of their own,
as ``stratakv serve`` starts them, and get the same requests in turns. The client takes its time
from the same cores. Needs the extra ``serve`` and a transport; imports neither.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

TARGET: Final = 0.5
STREAMS: Final = 4
STREAM_PROMPT: Final = 32
STREAM_TOKENS: Final = 96
LONG_PROMPT: Final = 2048
ROUNDS: Final = 3
VOCABULARY: Final = 512
TRANSPORTS: Final = (("nixl", "nixl"), ("nixl", "nixl_cu12"), ("mooncake", "mooncake"))
"""By the modules that bring them, the first one that is there."""
COMPLETIONS: Final = "/v1/completions"
FLAGS: Final = ("--device-memory", "512MiB", "--host-ratio", "0", "--dtype", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGaps:
    """Medians over the rounds. ``*_ms``: 99th percentile of the time between two tokens of one
    answer; ``ratio``: of the split servers' to the unified one's in the same round, ``ratios``: of
    each. ``*_prompts_s``: long prompts that were answered meanwhile, in a second."""

    ratio: float
    ratios: tuple[float, ...]
    unified_ms: float
    split_ms: float
    unified_prompts_s: float
    split_prompts_s: float

    def text(self) -> str:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in self.ratios)
        return (
            f"{STREAMS} streams beside prompts of {LONG_PROMPT:,} tokens, p99 between two tokens: "
            f"one server {self.unified_ms:.1f} ms, two {self.split_ms:.1f} ms; "
            f"ratio {self.ratio:.2f} (at most {TARGET}; by round {ratios}); long prompts in a "
            f"second {self.unified_prompts_s:.2f} and {self.split_prompts_s:.2f}"
        )


@dataclass(frozen=True, slots=True)
class Address:
    """Where a request goes: one address, or two, which find each other by ``join_port``."""

    addresses: Sequence[tuple[str, int]]
    join_port: int | None = None

    def body(self, tokens: npt.NDArray[np.int64], count: int, number: int) -> bytes:
        fields: dict[str, object] = {
            "prompt": tokens.tolist(), "max_tokens": count, "temperature": 0, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        if self.join_port is not None:
            fields |= {
                "bootstrap_host": "127.0.0.1", "bootstrap_port": self.join_port,
                "bootstrap_room": number, "cache_salt": "",
            }  # fmt: skip
        return json.dumps(fields).encode()


@dataclass(slots=True, eq=False)
class TokenClient:
    """Asks one target. ``numbers`` are of rooms and of prompts, none of which comes twice."""

    target: Address
    pool: ThreadPoolExecutor
    number: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, length: int, count: int, begun: threading.Barrier | None = None) -> list[float]:
        """When each token came; of those that came together, one time."""
        with self.lock:
            self.number += 1
            number = self.number
        tokens = np.random.default_rng(number).integers(0, VOCABULARY, length)
        body = self.target.body(tokens, count, number)
        *prefill, decode = self.target.addresses
        beside = [self.pool.submit(_stream, address, body, None) for address in prefill]
        found = _stream(decode, body, begun)
        for one in beside:
            one.result()
        return found


def measure(unified: Address, split: Address, rounds: int) -> TokenGaps:
    """In turns, after a round that is thrown away: connections are made, and memory is touched."""
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with ThreadPoolExecutor(4 * STREAMS + 4) as pool:
        clients = {False: TokenClient(unified, pool), True: TokenClient(split, pool)}
        for turn in range(rounds + 1):
            for is_split in (False, True) if turn % 2 else (True, False):
                gaps = _round(clients[is_split])
                if turn:
                    found[is_split].append(gaps)
    ours, theirs = np.array(found[True]), np.array(found[False])
    ratios = tuple(round(float(ratio), 3) for ratio in ours[:, 0] / theirs[:, 0])
    return TokenGaps(
        ratio=median(ratios),
        ratios=ratios,
        unified_ms=round(float(np.median(theirs[:, 0])), 2),
        split_ms=round(float(np.median(ours[:, 0])), 2),
        unified_prompts_s=round(float(np.median(theirs[:, 1])), 3),
        split_prompts_s=round(float(np.median(ours[:, 1])), 3),
    )


def _round(client: TokenClient) -> tuple[float, float]:
    """The 99th percentile, ms, and long prompts in a second. One long prompt comes after another
    from when all streams have begun until the last one ends."""
    begun, ended = threading.Barrier(STREAMS + 1), threading.Event()
    streams = [
        client.pool.submit(client.ask, STREAM_PROMPT, STREAM_TOKENS, begun) for _ in range(STREAMS)
    ]
    begun.wait()
    background = client.pool.submit(_background, client, ended)
    gaps = np.concatenate([np.diff(stream.result()) for stream in streams])
    ended.set()
    return float(np.percentile(gaps, 99)) * 1e3, background.result()


def _background(client: TokenClient, ended: threading.Event) -> float:
    begin_s, count = time.perf_counter(), 0
    while not ended.is_set():
        client.ask(LONG_PROMPT, 1)
        count += 1
    return count / (time.perf_counter() - begin_s)


def _stream(address: tuple[str, int], body: bytes, begun: threading.Barrier | None) -> list[float]:
    """When each token of an answer came. ``begun``: waited at behind the first one."""
    connection = HTTPConnection(*address)
    connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    found: list[float] = []
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        assert "error" not in event, event
        if event.get("choices"):
            found.append(time.perf_counter())
            if begun is not None and len(found) == 1:
                begun.wait()
    connection.close()
    return found


def run(rounds: int = ROUNDS) -> TokenGaps | None:
    """Measure; a few minutes. None, with the reason printed, where that cannot be."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    there = [name for name, module in TRANSPORTS if find_spec(module) is not None]
    missing = [] if there else ["a transport"]
    missing += [] if find_spec("transformers") is not None else ["transformers"]
    if len(cores) < 2 or missing:
        print(f"gaps between tokens: left out: {', '.join(missing) or 'two cores'} needed")
        return None
    with tempfile.TemporaryDirectory() as made, ExitStack() as undo:
        path = Path(made)
        subprocess.run([sys.executable, "-m", "stratakv.bench.token_gaps_model", made], check=True)
        with_ = "--transport", there[0]
        roles: Mapping[str, tuple[Sequence[int], Sequence[str]]] = {
            "unified": (cores, ("--threads", "2")),
            "prefill": (
                cores[:1],
                ("--threads", "1", "--role", "prefill", "--bootstrap-port", "0", *with_),
            ),
            "decode": (cores[1:], ("--threads", "1", "--role", "decode", *with_)),
        }
        started = {
            name: undo.enter_context(_server(path, cores_, flags))
            for name, (cores_, flags) in roles.items()
        }
        at = {name: _address(process, "listening on") for name, process in started.items()}
        _, join_port = _address(started["prefill"], "decode join")
        split = Address([at["prefill"], at["decode"]], join_port)
        return measure(Address([at["unified"]]), split, rounds)


@contextmanager
def _server(
    path: Path, cores: Sequence[int], flags: Sequence[str]
) -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "stratakv", "serve", str(path), "--port", "0", *FLAGS, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        os.sched_setaffinity(process.pid, cores)  # before it has any thread but its first
        yield process
    finally:
        process.terminate()
        process.communicate()


def _address(process: subprocess.Popen[str], words: str) -> tuple[str, int]:
    """What it prints behind ``words`` once it listens; in the order in which it says so."""
    assert process.stdout is not None
    addresses = (line.partition(f"{words} http://")[2].strip() for line in process.stdout)
    host, _, port = next(filter(None, addresses)).rpartition(":")
    return host, int(port)
