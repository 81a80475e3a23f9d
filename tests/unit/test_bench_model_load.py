"""``stratakv bench load``: what it says, on a small model."""

import json

from stratakv.bench import model_load


def test_the_report_has_the_figures_of_a_cold_and_a_warm_start(
    tmp_path, monkeypatch, capsys, caplog
):
    for name, value in {"_LAYERS": 1, "_HIDDEN": 64, "_VOCAB": 100, "_REPEATS": 1}.items():
        monkeypatch.setattr(model_load, name, value)
    caplog.set_level("INFO")
    model_load.run(str(tmp_path / "out.json"), tmp_path)
    report = json.loads((tmp_path / "out.json").read_text())
    cold, warm = report["cases"]
    assert (cold["page_cache"], warm["page_cache"]) == ("cold", "warm")
    for name in ("read_gb_s", "theirs_s", "ours_s", "wall_ratio", "cpu_ratio"):
        assert cold[name] > 0
        assert warm[name] > 0
    assert "cold" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    *_, before, first, again = [line for line in caplog.messages if line.startswith("identity of")]
    assert " 0 B known from before" in before
    assert " 0 B known from before" in first
    assert " 0 B hashed here" in again
