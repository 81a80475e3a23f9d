"""``stratakv serve --storage file://``: what a server has stored the next one on the same directory
serves, whether the first one ended well or was killed; and it is told in ``usage``.
"""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from stratakv.storage.file.fsck import fsck
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.rank_processes import Launched, launched

PAGE = 16
FLAGS = (
    "--port", "0", "--page-tokens", str(PAGE), "--dtype", "float32", "--device-memory", "640KiB",
    "--host-memory", "1280KiB", "--max-running", "8", "--step-tokens", "256",
    "--chunk-tokens", "64", "--threads", "1", "--prefetch-threshold", str(PAGE),
    "--prefetch-policy", "wait-complete",
)  # fmt: skip
PROMPTS = [[(seed * 7919 + i * i * 31 + i) % 400 for i in range(200)] for seed in range(3)]
UNSEEN = PROMPTS[0][::-1]
END = 192


@dataclass
class Serving:
    server: Launched
    http: httpx.Client

    def ask(self, prompt: list[int], **extra: str) -> tuple[str, dict]:
        """What it said, and where the prompt's cached tokens came from."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **extra}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        return whole["choices"][0]["text"], whole["usage"]["prompt_tokens_details"]

    def turn(self, messages: list[dict]) -> tuple[dict, dict]:
        body = {"messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        return whole["choices"][0]["message"], whole["usage"]

    def ends(self, number: int) -> int:
        """Its exit code after that signal."""
        os.kill(self.server.processes[0].pid, number)
        return self.server.ends(0)

    def stored(self) -> bool:
        """Whether nothing is on its way to be written any more."""
        found = self.http.get("/cache/storage").json()
        return found["pages"]["stored"] > 0 and not found["busy"]


@contextmanager
def serving(model: Path, store: Path, folder: Path) -> Iterator[Serving]:
    folder.mkdir()
    more = ("--storage", f"file://{store}?quota=32MiB", "--admin-key", "k")
    with launched([["serve", model, *FLAGS, *more]], folder) as server:
        url, headers = server.listen().url, {"Authorization": "Bearer k"}
        with httpx.Client(base_url=url, timeout=PATIENCE_S, headers=headers) as http:
            yield Serving(server, http)


def nothing_cached(details: dict) -> bool:
    return details["cached_tokens"] == 0


def from_storage(details: dict, tokens: int) -> bool:
    by_tier = details["cached_tokens_by_tier"]
    groups = details["cached_tokens_by_group"].values()
    return by_tier == {"device": 0, "host": 0, "storage": tokens} and all(
        group["storage"] > 0 == group["device"] == group["host"] for group in groups
    )


@pytest.mark.parametrize(
    "ended_by", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_server_goes_on_from_what_the_last_one_stored(ended_by, directory, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    system = {"role": "system", "content": "Answer in rhymes, and never in prose. " * 6}
    chat = [system, {"role": "user", "content": "What is a cache?"}]

    with serving(directory, store, tmp_path / "first") as first:
        answers = [first.ask(prompt) for prompt in PROMPTS]
        assert all(nothing_cached(details) for _, details in answers)
        reply, _ = first.turn(chat)
        if ended_by == signal.SIGKILL:  # a server that ends well stores all by itself
            wait_until(first.stored)
        assert first.ends(ended_by) == (-ended_by if ended_by == signal.SIGKILL else 0)
    assert fsck(store).clean

    chat += [reply, {"role": "user", "content": "And of what use is it to me?"}]
    with serving(directory, store, tmp_path / "second") as second:
        for prompt, (text, _) in zip(PROMPTS, answers, strict=True):
            again, details = second.ask(prompt)
            assert again == text
            assert from_storage(details, END), details
        for prompt, (text, _) in zip(
            PROMPTS, answers, strict=True
        ):  # of what lies in all three tiers
            again, details = second.ask(prompt, cache="bypass")
            assert again == text
            assert (details["cache"], details["cached_tokens"]) == ("bypass", 0)
        for _ in range(2):
            _, details = second.ask(UNSEEN, cache="no-store")
            assert (details["cache"], details["cached_tokens"]) == ("no-store", 0)
        _, details = second.ask(PROMPTS[2])
        assert details["cached_tokens_by_tier"] == {"device": END, "host": 0, "storage": 0}
        _, usage = second.turn(chat)
        tiers = usage["prompt_tokens_details"]["cached_tokens_by_tier"]
        assert tiers["storage"] >= usage["prompt_tokens"] // 2
        figures = second.http.get("/cache/storage").json()
        found = figures["tokens"]
        assert found["hits"] + sum(figures["lost_tokens"].values()) == found["found"]
        metrics = second.http.get("/metrics").text
        assert re.search(r'stratakv_\w*cached\w*\{[^}]*tier="storage"[^}]*\} [1-9]', metrics)
        assert second.ends(signal.SIGINT) == 0, second.server.all_logged()
    assert "Traceback" not in first.server.all_logged() + second.server.all_logged()
    assert fsck(store).clean
