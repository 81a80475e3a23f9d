"""The bench of what an import costs."""

import json

from stratakv.bench import imports


def test_every_part_is_measured_and_written(monkeypatch, capsys):
    monkeypatch.setattr(imports, "REPEATS", 1)
    report = imports.run()
    assert json.loads(json.dumps(report)) == report
    assert report["added_ms"].keys() == imports.PARTS.keys()
    assert report["numpy_ms"] > 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in imports.PARTS)
