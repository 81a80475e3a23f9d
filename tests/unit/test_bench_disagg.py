"""``stratakv bench disagg``: its figures are of what it says, on small pools."""

from dataclasses import replace

import pytest

from stratakv.bench import disagg, token_gaps
from stratakv.bench.hand_offs import HandOffs
from stratakv.bench.transports import TRANSPORTS
from stratakv.core.errors import ConfigError
from stratakv.policy.preallocation import whole_prompts
from stratakv.spec.retention import KeepAll, KeepWindow
from tests.fixtures.transports import nixl_is_here

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch):
    few = {"LAYERS": 4, "LONG_PROMPT": 512, "SHORT_PROMPT": 256, "LAP_BYTES": 8 * MIB}
    for name, value in (few | {"LAPS": 3, "DECISIONS": 50}).items():
        monkeypatch.setattr(disagg, name, value)


def test_the_model_of_the_table_has_windows_in_every_other_layer():
    spec = disagg.gpt_oss_spec(24)
    assert [group.retention for group in spec.groups] == [KeepAll(), KeepWindow(128)]
    # Keys and values of 12 layers, 8 heads of 64 in bfloat16, pages of 256 tokens.
    assert [group.page_bytes for group in spec.groups] == [12 * 2 * 8 * 64 * 2 * 256] * 2
    assert [group.retention for group in whole_prompts(spec).groups] == [KeepAll()] * 2


def test_who_takes_pages_by_group_admits_more_of_every_length():
    table, pages = disagg.admissions(disagg.gpt_oss_spec(24))
    assert [row.prompt for row in table] == list(disagg.PROMPTS)
    assert sum(pages) * 6 * MIB <= disagg.POOL_BYTES
    for row in table:
        assert row.per_group > row.whole_prompt > 0
        assert row.per_group_fixed_split > 0


GAPS = token_gaps.TokenGaps(
    ratio=0.25, ratios=(0.25,), unified_ms=40.0, split_ms=10.0,
    unified_prompts_s=0.2, split_prompts_s=0.1,
)  # fmt: skip


def test_the_report_has_every_transport_that_is_here(monkeypatch, capsys):
    monkeypatch.setattr(token_gaps, "run", lambda: GAPS)
    report = disagg.run()
    assert report["itl_p99_ratio"] == 0.25
    assert report["admit_us"] > 0
    names = [row["name"] for row in report["transport"]]
    assert names[0] == "loopback"
    for row in report["transport"]:
        assert min(row["ratio"], row["short_ratio"], row["processor_ratio"]) > 0
        assert row["gb_s"] > 0
        assert min(row["alone_ms"], row["alone_library_ms"]) > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in TRANSPORTS)


def test_a_transport_that_is_not_installed_is_left_out(monkeypatch, capsys):
    def missing():
        raise ConfigError("nowhere: its library cannot be imported")

    nowhere = replace(TRANSPORTS["loopback"], wire=missing)
    monkeypatch.setitem(TRANSPORTS, "nowhere", nowhere)
    assert disagg.throughput("nowhere") is None
    assert "nowhere: left out: nowhere: its library" in capsys.readouterr().out


def test_a_hand_off_that_brings_other_bytes_is_no_figure(monkeypatch):
    monkeypatch.setattr(HandOffs, "sums", lambda *_: (1, 2))
    with pytest.raises(AssertionError, match="what is there is not what was handed over"):
        disagg.throughput("loopback")


@pytest.mark.long  # three servers for one figure
def test_gaps_are_those_of_servers_of_their_own(monkeypatch, capsys):
    """One that does both, and two that share the work; no speed is asked for."""
    nixl_is_here()
    small = {"STREAMS": 2, "STREAM_PROMPT": 8, "STREAM_TOKENS": 12, "LONG_PROMPT": 600}
    for name, value in small.items():
        monkeypatch.setattr(token_gaps, name, value)
    found = token_gaps.run(rounds=1)
    if found is None:
        assert "two cores needed" in capsys.readouterr().out
        return
    assert len(found.ratios) == 1
    assert found.ratio == found.ratios[0] > 0
    assert min(found.unified_ms, found.split_ms) > 0
    assert min(found.unified_prompts_s, found.split_prompts_s) > 0
    assert f"ratio {found.ratio:.2f}" in found.text()
