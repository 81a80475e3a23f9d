"""``stratakv bench load``: what it says, on a small model."""

from stratakv.bench import load


def test_the_report_has_the_figures_of_a_cold_and_a_warm_start(
    tmp_path, monkeypatch, capsys, caplog
):
    for name, value in {"LAYERS": 1, "HIDDEN": 64, "VOCAB": 100, "REPEATS": 1}.items():
        monkeypatch.setattr(load, name, value)
    caplog.set_level("INFO")
    report = load.run(tmp_path)
    cold, warm = report["cases"]
    assert (cold["page_cache"], warm["page_cache"]) == ("cold", "warm")
    for name in ("read_gb_s", "theirs_s", "ours_s", "wall_ratio", "cpu_ratio"):
        assert cold[name] > 0
        assert warm[name] > 0
    assert "cold" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    *_, before, first, again = [line for line in caplog.messages if line.startswith("identity of")]
    assert " 0 B known from before" in before
    assert " 0 B known from before" in first
    assert " 0 B hashed here" in again
