import re
from dataclasses import asdict, replace

from prometheus_client.parser import text_string_to_metric_families

from stratakv.core.ids import GroupId
from stratakv.disagg.page_leases import PageLeases
from stratakv.disagg.statistics import SessionCounts
from stratakv.engine.request import CachedTokens
from stratakv.serve.metrics import ServerMetrics
from stratakv.serve.replies import cached_details
from stratakv.tiers.persist import PersistCounters
from stratakv.tiers.statistics import Counters
from tests.meta.source import ROOT
from tests.serving import GROUPS, STORAGE_STATS, EchoEngine

UNITS = (
    "_seconds",
    "_total",
    "_pages",
    "_tokens",
    "_running",
    "_waiting",
    "_retracted",
    "_off",
    "_created",
)


def rendered(stats=None):
    metrics = ServerMetrics(GROUPS)
    metrics.responded("/health", 200)
    cached = CachedTokens(
        device=3,
        host=2,
        storage=4,
        groups_device=(3, 1),
        groups_host=(2, 0),
        groups_storage=(4, 3),
    )
    metrics.prompted(9, cached)
    metrics.prompted(4, None)
    metrics.finished("stop", 5)
    metrics.aborted(2)
    metrics.first_token_s.observe(0.2)
    return metrics.render(stats).decode()


def with_storage():
    return replace(EchoEngine().stats(), storage=STORAGE_STATS)


def values(text):
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counts_add_up_by_tier_and_group():
    found = values(rendered())
    assert found["stratakv_prompt_tokens_total",] == 13
    assert found["stratakv_generated_tokens_total",] == 7
    assert found["stratakv_cached_prompt_tokens_total", "device"] == 3
    assert found["stratakv_cached_prompt_tokens_total", "host"] == 2
    assert found["stratakv_cached_prompt_tokens_total", "storage"] == 4
    assert found["stratakv_cached_group_tokens_total", "device", "swa"] == 1
    assert found["stratakv_cached_group_tokens_total", "storage", "swa"] == 3
    assert found["stratakv_requests_total", "stop"] == 1
    assert found["stratakv_time_to_first_token_seconds_count",] == 1


def test_a_group_that_nothing_is_cached_of_is_left_out_wherever_it_stands():
    groups = {GroupId(0): "full", GroupId(2): "state"}
    metrics = ServerMetrics(groups)
    tokens = (3, 0, 2)
    cached = CachedTokens(
        device=3, host=0, storage=0, groups_device=tokens, groups_host=tokens, groups_storage=tokens
    )
    metrics.prompted(9, cached)
    found = values(metrics.render(None).decode())
    shown = {key[1:]: n for key, n in found.items() if key[0].endswith("group_tokens_total")}
    tiers = ("device", "host", "storage")
    counts = {"full": 3, "state": 2}
    assert shown == {tuple(sorted((t, g))): n for g, n in counts.items() for t in tiers}
    assert cached_details([cached], groups)["cached_tokens_by_group"] == {
        "full": dict.fromkeys(tiers, 3),
        "state": dict.fromkeys(tiers, 2),
    }


def test_the_engines_figures_are_there_when_it_gives_them():
    found = values(rendered(EchoEngine().stats()))
    assert found["stratakv_pool_pages", "device", "free", "full"] == 4
    assert found["stratakv_pool_pages", "device", "full", "in_use"] == 3
    assert found["stratakv_cache_backup_pages_total",] == 7
    assert found["stratakv_known_tokens_total",] == 48
    assert found["stratakv_lost_tokens_total", "device", "evicted"] == 16
    assert found["stratakv_lost_tokens_total", "deadline", "storage"] == 32
    assert "stratakv_requests_waiting" not in rendered()


def test_storages_figures_are_there_while_it_is_attached():
    found = values(rendered(with_storage()))
    assert found["stratakv_storage_pages_total", "written"] == 5
    assert found["stratakv_storage_tokens_total", "hits"] == 64
    assert found["stratakv_storage_lost_tokens_total", "deadline"] == 32
    assert found["stratakv_storage_abandoned_prefetches_total", "io_error"] == 2
    assert found["stratakv_storage_off", "reading"] == 0
    assert found["stratakv_storage_off", "writing"] == 1
    assert "stratakv_storage" not in rendered(EchoEngine().stats())


def test_names_follow_the_conventions():
    for family in text_string_to_metric_families(rendered(with_storage())):
        assert re.fullmatch(r"stratakv_[a-z0-9_]+", family.name)
        assert (family.name + ("_total" if family.type == "counter" else "")).endswith(UNITS)


def test_the_page_on_metrics_has_every_metric_and_no_other():
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*)\|", page, re.MULTILINE)
    stats = replace(with_storage(), counters=Counters().snapshot())
    sessions = SessionCounts().stats([], PageLeases().counts())
    text = ServerMetrics(GROUPS).render(stats, sessions).decode()
    families = list(text_string_to_metric_families(rendered(stats)))
    handed = text_string_to_metric_families(text)
    families += [family for family in handed if "_transfer_" in family.name]
    documented = {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in families
        if not family.name.endswith("_created")
    }
    assert {name: kind for name, kind, _ in rows} == documented
    labels = {name: set(re.findall(r"\w+", named)) for name, _, named in rows}
    for sample in (sample for family in families for sample in family.samples):
        if sample.name in labels:
            assert labels[sample.name] == sample.labels.keys(), sample.name
    assert all(f"`{event}`" in page for event in asdict(PersistCounters()))


def test_two_servers_in_a_process_do_not_share_a_registry():
    assert ServerMetrics(GROUPS).registry is not ServerMetrics(GROUPS).registry
