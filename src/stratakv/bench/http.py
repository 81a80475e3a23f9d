"""How long others wait while a server works on a body that is cheap to send and dear to answer.

Owns the bodies and the clocks. The server is a process of its own, as ``stratakv serve`` starts it.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Final

from transformers import LlamaConfig, LlamaForCausalLM

from stratakv.bench.saved_model import save
from stratakv.bench.shapes import VOCABULARY

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
MIB: Final = 1 << 20
TARGET_MS: Final = 100.0
PROBE: Final = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """``answered_ms``: the attack itself, with ``status``. ``health_ms`` and ``prompt_ms``: longest
    wait meanwhile for ``/health``, and for the one token after a prompt of three."""

    attack: str
    bytes: int
    status: int
    answered_ms: float
    health_ms: float
    prompt_ms: float


def attacks(size: int) -> Mapping[str, tuple[str, bytes]]:
    """Path and body, of about ``size`` bytes each."""
    room = size - 100
    message = b'{"role":"user","content":""}'
    words = b"word " * (room // 60)
    return {
        "nothing": ("/tokenize", b'{"prompt": "a"}'),
        "one-token prompts": (COMPLETIONS, b'{"prompt": [' + b"[1]," * (room // 4) + b"[1]]}"),
        "empty messages": (
            CHAT, b'{"messages": [' + (message + b",") * (room // 29) + message + b"]}",
        ),
        "a long text": ("/tokenize", b'{"prompt": "%s"}' % (b"x" * room)),
        "twelve long texts": (COMPLETIONS, b'{"prompt": [' + (b'"%s",' % words) * 11
                              + b'"%s"]}' % words),
        "many short texts": (
            COMPLETIONS,
            b'{"prompt": [' + b'"%s",' % (b"word " * 400) * (room // 4008)
            + b'"%s"]}' % (b"word " * (room // 10)),
        ),
        "many token ids": (COMPLETIONS, b'{"prompt": [' + b"1," * (room // 2) + b"1]}"),
    }  # fmt: skip


def measure(
    host: str, port: int, bodies: Mapping[str, tuple[str, bytes]], rounds: int
) -> list[Wait]:
    """Send each body ``rounds`` times, and ask for the two small things until it is answered."""
    found: list[Wait] = []
    with ThreadPoolExecutor(1) as pool:
        for name, (path, body) in bodies.items():
            health_ms = prompt_ms = answered_ms = 0.0
            status = 0
            for _ in range(rounds):
                attack = pool.submit(_timed, host, port, path, body)
                while True:
                    health_ms = max(health_ms, _timed(host, port, "/health", None)[1])
                    prompt_ms = max(prompt_ms, _timed(host, port, COMPLETIONS, PROBE)[1])
                    if attack.done():
                        break
                status, taken_ms = attack.result()
                answered_ms = max(answered_ms, taken_ms)
            found.append(
                Wait(
                    attack=name, bytes=len(body), status=status, answered_ms=answered_ms,
                    health_ms=health_ms, prompt_ms=prompt_ms,
                )
            )  # fmt: skip
    return found


def _timed(host: str, port: int, path: str, body: bytes | None) -> tuple[int, float]:
    """Status and milliseconds of one request on a connection of its own."""
    connection = HTTPConnection(host, port)
    begin_s = time.perf_counter()
    connection.request("GET" if body is None else "POST", path, body)
    answer = connection.getresponse()
    answer.read()
    taken_ms = 1e3 * (time.perf_counter() - begin_s)
    connection.close()
    return answer.status, taken_ms


def run(*, model: str | None, size: int = 8 * MIB, rounds: int = 3) -> dict[str, object]:
    """Measure, and print a table. ``model``: a directory; None: a small one."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made if model is None else model)
        if model is None:
            save(_small_model(), path)
        with _server(path) as (host, port):
            waits = measure(host, port, attacks(size), rounds)
    print(_table(waits))
    return {"target_ms": TARGET_MS, "waits": [asdict(wait) for wait in waits]}


def _table(waits: Sequence[Wait]) -> str:
    lines = ["longest wait, ms, while        MiB  status  answered   /health   a token"]
    lines += [
        f"{wait.attack:24} {wait.bytes / MIB:9.1f} {wait.status:7} {wait.answered_ms:9.0f} "
        f"{wait.health_ms:9.1f} {wait.prompt_ms:9.1f}"
        for wait in waits
    ]
    return "\n".join([*lines, f"target on two quiet cores: {TARGET_MS:g} ms"])


@contextmanager
def _server(path: Path) -> Generator[tuple[str, int], None, None]:
    words = ("serve", str(path), "--port", "0", "--device-memory", "64MiB", "--host-ratio", "1")
    command = [sys.executable, "-m", "stratakv", *words, "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        addresses = (line.partition("listening on http://")[2].strip() for line in process.stdout)
        host, _, port = next(filter(None, addresses)).rpartition(":")
        yield host, int(port)
    finally:
        process.terminate()
        process.communicate()


def _small_model() -> LlamaForCausalLM:
    """A Llama of random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
        )
    )  # fmt: skip
