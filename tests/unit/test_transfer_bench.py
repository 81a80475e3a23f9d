import json

from stratakv.bench import transfer


def test_the_report_has_a_case_per_shape_and_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(transfer, "_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(transfer, "_TIER_BYTES", 4 << 20)
    monkeypatch.setattr(transfer, "_PLAN_BYTES", 2 << 20)
    monkeypatch.setattr(transfer, "_REPEATS", 1)
    path = tmp_path / "transfer.json"
    report = transfer.run(str(path))
    assert json.loads(path.read_text()) == report
    shapes = [(c["page_tokens"], c["page_bytes"], c["segment_bytes"]) for c in report["cases"]]
    assert shapes == [
        (16, 256 << 10, 2 << 10), (16, 256 << 10, 8 << 10), (16, 256 << 10, 32 << 10),
        (64, 1 << 20, 2 << 10), (64, 1 << 20, 8 << 10), (64, 1 << 20, 32 << 10),
    ]  # fmt: skip
    for case in report["cases"]:
        assert case["d2h_ratio"] == case["d2h_gb_s"] / case["copy_gb_s"] > 0
        assert case["h2d_ratio"] == case["h2d_gb_s"] / case["copy_gb_s"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(shapes)
