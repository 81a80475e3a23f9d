import json
from pathlib import Path

import pytest

from stratakv.bench import storage, storage_redis, storage_steps
from tests.fixtures.servers import redis_server


def test_the_report_has_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(storage, "_RUN_BYTES", 4 << 20)
    monkeypatch.setattr(storage, "_BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(storage, "_REPEATS", 1)
    monkeypatch.setattr(storage, "PAGE_KIB", (256,))
    ratios = {"step_time_ratio": 1.25, "scheduler_time_ratio": 1.5}
    monkeypatch.setattr(storage, "step_time_ratios", lambda directory: ratios)
    storage.run(str(tmp_path / "out.json"), tmp_path)
    report = json.loads((tmp_path / "out.json").read_text())
    assert [case["backend"] for case in report["cases"]] == ["file", "file+key"]
    for case in report["cases"]:
        assert case["page_bytes"] == 256 << 10
        for name in ("write_ratio", "read_warm_ratio", "read_cold_ratio", "write_gb_s"):
            assert case[name] > 0
    assert report["contains_10k_ms"] > 0
    assert report["step_time_ratio"] == 1.25
    assert "256" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


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


def test_redis_beside_its_own_client(monkeypatch):
    monkeypatch.setattr(storage_redis, "_RUN_BYTES", 2 << 20)
    monkeypatch.setattr(storage_redis, "_BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(storage_redis, "_REPEATS", 1)
    with redis_server() as server:
        case = storage_redis.measure_redis(f"redis://127.0.0.1:{server.port}", 256 << 10)
    assert case.backend == "redis"
    assert min(case.write_ratio, case.read_warm_ratio) > 0
