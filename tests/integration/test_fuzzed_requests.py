"""Requests of ``tests.request_fuzzer`` against a real server, other clients beside them.

The rule: every answer is well-formed and never a 5xx, ``/health`` is answered before a request of
the attack can end, the others' greedy answers stay what they were, and at the end everything is
accounted for.
"""

import gc
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.real_server import Bystanders, RealServer, real_server, tokens
from tests.request_fuzzer import Attempt, judge, mixed

CONFIG = EngineConfig(
    page_tokens=16,
    dtype="float32",
    device_memory="2MiB",
    host_memory="2MiB",
    max_running=16,
    max_model_len=512,
    step_tokens=256,
    chunk_tokens=64,
    chat_tokens=4,
)
AT_ONCE = 30
LONG = 10_000


@pytest.fixture
def live(directory):
    torch.set_num_threads(1)
    with real_server(directory, CONFIG, ServerConfig(max_waiting=8192)) as found:
        yield found


def attack(live: RealServer, attempts: Sequence[Attempt]) -> None:
    """All of them at once, while the engine is held: none that it must answer can have ended when
    ``/health`` is answered."""
    gate = threading.Event()
    with (
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http,
        ThreadPoolExecutor(len(attempts)) as pool,
    ):
        held = live.driver.ask(lambda: gate.wait(PATIENCE_S))
        asked = [pool.submit(http.post, one.path, content=one.body()) for one in attempts]
        try:
            assert http.get("/health").json() == {"status": "ready"}
        finally:
            gate.set()
        for one, answer in zip(attempts, asked, strict=True):
            judge(one, answer.result(PATIENCE_S))
        assert held.result(PATIENCE_S)


def play(live: RealServer, attempts: Sequence[Attempt]) -> None:
    with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http:
        bystanders = Bystanders(http, [tokens(20 + 17 * i, 50 + i) for i in range(2)])
        for at in range(0, len(attempts), AT_ONCE):
            with bystanders.running():
                attack(live, attempts[at : at + AT_ONCE])
    live.settled()


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_three_hundred_requests(live):
    tried = mixed(1, 700)
    play(live, tried[:150])
    before = handles()
    play(live, tried[150:])
    wait_until(lambda: handles() <= before)


@pytest.mark.long
def test_ten_thousand_requests_in_three_rounds(live):
    tried = mixed(2, LONG)
    sizes = []
    for part in range(3):
        play(live, tried[part::3])
        sizes.append((resident_bytes(), threading.active_count(), handles()))
    (_, second, third) = sizes
    assert third[0] <= 1.05 * second[0], sizes
    assert third[1] <= second[1], sizes
    wait_until(lambda: handles() <= second[2])  # the server closes its end a moment later
