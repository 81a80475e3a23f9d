from pathlib import Path

import pytest
import redis

from stratakv.bench import storage, storage_steps, storage_yardsticks
from stratakv.bench.storage_yardsticks import Extent, Pipelines, Slab, redis_opener
from stratakv.storage.backend import ReadStatus
from stratakv.storage.memory import MemoryBackend
from tests.fixtures.servers import redis_server


def test_the_report_has_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    extent = Extent(run_bytes=4 << 20, batch_bytes=1 << 20, repeats=1)
    monkeypatch.setattr(storage, "FILES", extent)
    monkeypatch.setattr(storage_yardsticks, "FILES", extent)
    monkeypatch.setattr(storage.Slab, "extent", extent)
    monkeypatch.setattr(storage, "PAGE_KIB", (256,))
    ratios = {"step_time_ratio": 1.25, "scheduler_time_ratio": 1.5}
    monkeypatch.setattr(storage, "step_time_ratios", lambda directory: ratios)
    report = storage.run(tmp_path)
    assert [case["backend"] for case in report["cases"]] == ["file", "file+key"]
    for case in report["cases"]:
        assert case["page_bytes"] == 256 << 10
        for name in ("write_ratio", "read_warm_ratio", "read_cold_ratio", "write_gb_s"):
            assert case[name] > 0
    assert report["contains_10k_ms"] > 0
    assert report["step_time_ratio"] == 1.25
    assert "256" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_steps_of_an_engine_with_a_store_and_without(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_steps, "PAIRS", 4)
    monkeypatch.setattr(storage_steps, "REPEATS", 1)
    monkeypatch.setattr(storage_steps, "PROMPT_TOKENS", 192)
    monkeypatch.setattr(storage_steps, "OUTPUT_TOKENS", 70)
    ratios = storage_steps.step_time_ratios(tmp_path)
    assert set(ratios) == {"step_time_ratio", "scheduler_time_ratio"}
    assert min(ratios.values()) > 0
    written = [path for path in tmp_path.rglob("*.seg") if path.stat().st_blocks]
    assert written, "nothing was stored meanwhile"


def test_redis_beside_its_own_client(tmp_path, monkeypatch):
    extent = Extent(run_bytes=2 << 20, batch_bytes=1 << 20, repeats=1)
    monkeypatch.setattr(storage_yardsticks, "SERVERS", extent)
    monkeypatch.setattr(Pipelines, "extent", extent)
    with redis_server() as server:
        url = f"redis://127.0.0.1:{server.port}"
        raw = Pipelines.of(url, 256 << 10)
        case = storage.measure("redis", redis_opener(url), raw, tmp_path)
        assert not redis.Redis.from_url(url).dbsize(), "something was left behind"
    assert case.backend == "redis"
    assert min(case.write_ratio, case.read_warm_ratio) > 0


class ReadsNothing(MemoryBackend):
    """It reports hits, and leaves the buffers as they were."""

    def read(self, keys, into):
        return [ReadStatus.HIT] * len(keys)


def test_a_store_that_reads_nothing_is_seen_though_the_buffers_were_filled_before(
    tmp_path, monkeypatch
):
    extent = Extent(run_bytes=1 << 20, batch_bytes=1 << 20, repeats=1)
    monkeypatch.setattr(Slab, "extent", extent)
    raw = Slab(tmp_path, extent.pages(64 << 10))
    with pytest.raises(AssertionError, match="store warm: bytes differ"):
        storage.measure("memory", ReadsNothing, raw, tmp_path)
