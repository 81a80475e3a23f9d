"""A server that computes prompts, one that decodes and ``stratakv route`` before them, for tests.

Owns their start, over any transport; processes of the fork server, so that nobody imports again.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.fixtures.models import tiny_model
from tests.fixtures.servers import free_port
from tests.fixtures.transports import mooncake_is_here, nixl_is_here
from tests.rank_processes import COMPLETIONS, Launched, launched
from tests.scraped import scraped
from tests.serving import train_tokenizer

HERE = {"nixl": nixl_is_here, "mooncake": mooncake_is_here}
FLAGS = (
    "--page-tokens", "16", "--dtype", "float32", "--device-memory", "3MiB", "--host-memory", "4MiB",
    "--max-running", "16", "--max-model-len", "512", "--step-tokens", "256", "--chunk-tokens", "64",
    "--chat-tokens", "4", "--threads", "1",
)  # fmt: skip
UNDER_WAY = ("bootstrapping", "waiting_for_input", "transferring")


@dataclass
class SplitServers:
    """``lines``: what prefill was started with, for another start."""

    prefill: Launched
    decode: Launched
    router: Launched
    line: list[object]

    def ask(self, prompt: list[int], count: int) -> dict:
        """The answer of both, by the router."""
        body = {
            "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        answer = httpx.post(self.router.url + COMPLETIONS, json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def settled(self) -> None:
        """No session is left on either side, nor a page: all of the cache can be given up."""

        def over() -> bool:
            return not any(map(_under_way, (self.prefill.url, self.decode.url)))

        wait_until(over, "the end of every session")
        for url in (self.prefill.url, self.decode.url):
            wait_until(lambda url=url: _flushed(url), f"a flush of {url}")
            assert httpx.get(f"{url}/health", timeout=PATIENCE_S).json() == {"status": "ready"}


def _under_way(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    names = [("stratakv_transfer_sessions", state) for state in UNDER_WAY]
    names += [("stratakv_requests_waiting",), ("stratakv_requests_running",)]
    names += [("stratakv_transfer_pages", state) for state in ("leased", "quarantined")]
    samples = scraped(text)
    found = [samples[name] for name in names if name in samples]
    assert len(found) >= len(UNDER_WAY) + 2, text
    return sum(found)


def _flushed(url: str) -> bool:
    return httpx.post(f"{url}/flush_cache", timeout=PATIENCE_S).json() == {"flushed": True}


def model_directory(family: str, path: Path) -> Path:
    train_tokenizer(path)
    tiny_model(family).save_pretrained(path)
    return path


@contextmanager
def split_servers(model: Path, transport: str, logs: Path, *more: object) -> Iterator[SplitServers]:
    HERE[transport]()
    serve = ["serve", model, *FLAGS, "--transport", transport, *more]
    line = [*serve, "--port", free_port(), "--role", "prefill", "--bootstrap-port", free_port()]
    with ExitStack() as undo:
        prefill = begun(line, logs / "prefill", undo)
        decodes = [*serve, "--port", "0", "--role", "decode", "--prefill-hosts", "127.0.0.1"]
        decode = begun(decodes, logs / "decode", undo)
        urls = ["--prefill", prefill.listen().url, "--decode", decode.listen().url]
        router = begun(["route", *urls, "--port", "0"], logs / "router", undo).listen()
        yield SplitServers(prefill, decode, router, line)


def begun(line: list[object], folder: Path, undo: ExitStack) -> Launched:
    folder.mkdir(parents=True)
    return undo.enter_context(launched([line], folder))
