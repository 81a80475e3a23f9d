"""Somebody else writes to a store that servers share, and his checksums are right: with a key of
the servers his pages are computed again, and without one he says what the model says.
"""

from dataclasses import replace
from functools import partial

import httpx
import pytest
import torch

from stratakv.core.config import EngineConfig
from stratakv.testing.patience import PATIENCE_S
from stratakv.tree.nodes import TIERS
from tests.real_server import (
    COMPLETIONS,
    Bystanders,
    completion,
    pages_read_as,
    real_server,
    tokens,
)

PAGE = 16
CONFIG = EngineConfig(
    page_tokens=PAGE, dtype="float32", device_memory="2MiB", host_memory="2MiB", max_running=16,
    step_tokens=256, chunk_tokens=32, storage="memory://?quota=32MiB", prefetch_threshold=PAGE,
    prefetch_policy="wait-complete",
)  # fmt: skip
PROMPT = tokens(100, 400)


@pytest.mark.parametrize("keyed", [True, False])
def test_forged_pages_are_computed_again_where_servers_have_a_key(
    directory, tmp_path, monkeypatch, keyed
):
    torch.set_num_threads(1)
    config = CONFIG
    if keyed:
        (tmp_path / "key").write_bytes(b"k" * 32)
        (tmp_path / "key").chmod(0o600)
        config = replace(CONFIG, storage_key_file=str(tmp_path / "key"))
    with (
        real_server(directory, config) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http,
    ):

        def ask() -> tuple[str, int]:
            answer = http.post(COMPLETIONS, json=completion(PROMPT, 8)).json()
            tiers = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
            return answer["choices"][0]["text"], tiers["storage"]

        def emptied() -> None:
            live.settled()
            for tier in TIERS:
                live.driver.ask(partial(live.parts.cache.progress.push_out, tier)).result(
                    PATIENCE_S
                )

        alone, _ = ask()
        emptied()
        assert ask() == (alone, 96)
        bystanders = Bystanders(http, [tokens(30 + 17 * i, 50 + i) for i in range(2)])
        emptied()
        with bystanders.running():  # their pages are on the device before anybody forges
            pages_read_as(monkeypatch, b"\x3f")
            answer, hits = ask()
            assert http.get("/health").json() == {"status": "ready"}
        if keyed:
            assert (answer, hits) == (alone, 0)
            assert live.stats().storage.lost_tokens["corrupt"] > 0
        else:
            assert (answer != alone, hits) == (True, 96)
        live.settled()
