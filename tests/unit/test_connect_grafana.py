"""The dashboard of docs/ shows the metrics that the connector has, and no other."""

import json
import re

import pytest

from stratakv.connect.page_counts import EVENTS
from stratakv.connect.sglang_metrics import OFF, PAGES
from tests.fixtures import fake_vllm
from tests.meta.source import ROOT

DASHBOARD = json.loads((ROOT / "docs" / "grafana-engines.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.fixture
def exposed(monkeypatch):
    """Names as Prometheus has them: a counter's ends with ``_total``."""
    adapter = fake_vllm.install(monkeypatch)
    defined = adapter.StrataTier.build_metric_definitions({})
    assert set(defined) == {adapter.PAGES, adapter.OFF} == {PAGES, OFF}
    return {f"{adapter.PAGES}_total", adapter.OFF}


def test_every_metric_is_shown_and_none_that_is_not_there(exposed):
    shown = {name for text in EXPRESSIONS for name in re.findall(r"[a-z_]+:[a-z_]+", text)}
    assert shown == exposed


def test_events_that_are_picked_are_those_that_are_counted():
    picked = [events for text in EXPRESSIONS for events in re.findall(r'event=~?"([^"]+)"', text)]
    named = {event for events in picked for event in events.split("|")}
    assert named
    assert named <= set(EVENTS)


def test_no_two_panels_have_one_id_and_each_has_its_words():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["title"] and panel["description"] for panel in DASHBOARD["panels"])
