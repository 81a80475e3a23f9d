"""A real engine over a small model behind a real server, for what clients, weights and stores do.

Beside the server stands ``Bystanders``: other clients' requests, which are running when something
is done to the server, and whose greedy answers must be what they are without it.
"""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from stratakv.assembly.models import EngineParts
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.engine.stats import EngineStats
from stratakv.serve.driver import EngineDriver
from stratakv.serve.server import Server, bound_socket
from stratakv.serve.wiring import build_service
from stratakv.storage.backend import ReadStatus
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.patience import PATIENCE_S, wait_until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ANSWER_TOKENS = 40
SMALL_POOLS = EngineConfig(
    page_tokens=16, dtype="float32", device_memory="584KiB", host_memory="1280KiB", max_running=16,
    step_tokens=256, chunk_tokens=64, chat_tokens=256,
)  # fmt: skip
"""Of the fixture ``directory``: 512 tokens on the device, so that a few requests fill it."""
SMALL_FLAGS = (
    "--page-tokens", "16", "--dtype", "float32", "--device-memory", "584KiB",
    "--host-memory", "1280KiB", "--max-running", "16",
    "--step-tokens", "256", "--chunk-tokens", "64", "--chat-tokens", "256", "--threads", "1",
)  # fmt: skip
"""The same on a command line."""


@dataclass
class RealServer:
    driver: EngineDriver
    parts: EngineParts
    url: str
    port: int
    thread: threading.Thread

    def stats(self) -> EngineStats:
        return asyncio.run(self.driver.stats())

    def quiet(self) -> bool:
        stats = self.stats()
        return not (stats.waiting or stats.running or self.driver.open_requests)

    def settled(self) -> None:
        """Every client is gone, the server lives, and ``Engine.check`` holds."""
        wait_until(self.quiet)
        self.driver.ask(self.parts.engine.check).result(PATIENCE_S)
        assert httpx.get(f"{self.url}/health", timeout=PATIENCE_S).json() == {"status": "ready"}


@contextmanager
def real_server(
    directory: Path, config: EngineConfig, server_config: ServerConfig | None = None
) -> Iterator[RealServer]:
    service, parts = build_service(directory, config, server_config or ServerConfig())
    listener = bound_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.listen(128)
    server = Server(service, drain_s=PATIENCE_S)
    service.driver.start()
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield RealServer(service.driver, parts, f"http://127.0.0.1:{port}", port, thread)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        stopped = service.driver.stop(PATIENCE_S)
        parts.close()
        assert stopped
        assert not thread.is_alive()


def tokens(length: int, seed: int) -> list[int]:
    """A prompt like no other of another seed, from its first token on; below 390."""
    return [(seed * 7919 + i * i * 31 + i) % 390 for i in range(length)]


def completion(prompt: Sequence[int], count: int, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True} | more


@dataclass
class Bystanders:
    """``prompts``: of the clients, each of which streams. ``alone``: what they were told before."""

    http: httpx.Client
    prompts: Sequence[Sequence[int]]
    alone: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for prompt in self.prompts:
            answer = self.http.post(COMPLETIONS, json=completion(prompt, ANSWER_TOKENS))
            assert answer.status_code == 200, answer.text
            self.alone.append(answer.json()["choices"][0]["text"])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block all of them are in the middle of their answers, or their pages are."""
        with ExitStack() as stack:
            streams = []
            for prompt in self.prompts:
                body = completion(prompt, ANSWER_TOKENS, stream=True)
                answer = stack.enter_context(self.http.stream("POST", COMPLETIONS, json=body))
                assert answer.status_code == 200
                lines = answer.iter_lines()
                streams.append((next(lines), lines))
            yield
            texts = [_text([first, *rest]) for first, rest in streams]
        assert texts == self.alone


def _text(lines: Sequence[str]) -> str:
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]", events[-2:]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def pages_read_as(patch: pytest.MonkeyPatch, byte: bytes) -> None:
    """From now on every page that a memory store has is ``byte`` throughout, and its checksum is
    right: what somebody can do who may write there."""
    plain = MemoryBackend.read

    def read(self, keys, into):
        found = plain(self, keys, into)
        for status, page in zip(found, into, strict=True):
            if status is ReadStatus.HIT:
                page[:] = byte * len(page)
        return found

    patch.setattr(MemoryBackend, "read", read)
