import json
from pathlib import Path

import pytest

from stratakv.bench import storage


def test_the_report_has_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(storage, "_RUN_BYTES", 4 << 20)
    monkeypatch.setattr(storage, "_BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(storage, "_REPEATS", 1)
    monkeypatch.setattr(storage, "PAGE_KIB", (256,))
    storage.run(str(tmp_path / "out.json"), tmp_path)
    report = json.loads((tmp_path / "out.json").read_text())
    (case,) = report["cases"]
    assert (case["backend"], case["page_bytes"]) == ("file", 256 << 10)
    for name in ("write_ratio", "read_warm_ratio", "read_cold_ratio", "write_gb_s", "read_gb_s"):
        assert case[name] > 0
    assert report["contains_10k_ms"] > 0
    assert "256" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
