import json
import re
from dataclasses import asdict, replace

from prometheus_client.parser import text_string_to_metric_families

from scripts.metrics_page import DOCUMENT, document
from stratakv.core.ids import GroupId
from stratakv.disagg.page_leases import PageLeases
from stratakv.disagg.statistics import LinkState, SessionCounts
from stratakv.engine.huggingface.page_selection import Recall
from stratakv.engine.request import CachedTokens
from stratakv.serve.metric_families import FAMILIES
from stratakv.serve.metrics import FOLDED, ServerMetrics
from stratakv.serve.replies import cached_details
from stratakv.tiers.persist import PersistCounters
from stratakv.tiers.statistics import AgeCounts, Counters, PageAgeStats
from tests.meta.source import ROOT
from tests.scraped import scraped
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
    "_phase",
    "_in_flight",
)


def rendered(stats=None):
    metrics = ServerMetrics(GROUPS, "m")
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


def test_counts_add_up_by_tier_and_group():
    found = scraped(rendered())
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
    metrics = ServerMetrics(groups, "m")
    tokens = (3, 0, 2)
    cached = CachedTokens(
        device=3, host=0, storage=0, groups_device=tokens, groups_host=tokens, groups_storage=tokens
    )
    metrics.prompted(9, cached)
    found = scraped(metrics.render(None).decode())
    shown = {key[1:]: n for key, n in found.items() if key[0].endswith("group_tokens_total")}
    tiers = ("device", "host", "storage")
    counts = {"full": 3, "state": 2}
    assert shown == {tuple(sorted((t, g))): n for g, n in counts.items() for t in tiers}
    assert cached_details([cached], groups)["cached_tokens_by_group"] == {
        "full": dict.fromkeys(tiers, 3),
        "state": dict.fromkeys(tiers, 2),
    }


def test_the_engines_figures_are_there_when_it_gives_them():
    found = scraped(rendered(EchoEngine().stats()))
    assert found["stratakv_pool_pages", "device", "free", "full"] == 4
    assert found["stratakv_pool_pages", "device", "full", "in_use"] == 3
    assert found["stratakv_cache_copied_pages_total", "backup"] == 7
    assert found["stratakv_requests_by_phase", "decoding"] == 2
    assert found["stratakv_step_seconds_total", "forward"] == 1.5
    assert found["stratakv_cache_copies_in_flight", "load"] == 1
    assert found["stratakv_known_tokens_total",] == 48
    assert found["stratakv_lost_tokens_total", "device", "evicted"] == 16
    assert found["stratakv_lost_tokens_total", "deadline", "storage"] == 32
    assert "stratakv_requests_waiting" not in rendered()


def test_storages_figures_are_there_while_it_is_attached():
    found = scraped(rendered(with_storage()))
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


def every_family():
    """Of a server that has all there is."""
    ages = PageAgeStats(
        lifetime=(AgeCounts("device", "full", (0, 2, *[0] * 12, 1), 90000.0),),
        idle_before_evict=(AgeCounts("host", "full", (0,) * 15, 0.0),),
        reuse_gap=(AgeCounts("", "full", (0,) * 15, 0.0),),
    )
    stats = replace(with_storage(), counters=Counters().snapshot(), ages=ages)
    links = dict.fromkeys(LinkState, 0)
    sessions = SessionCounts().stats([], PageLeases().counts(), links)
    metrics = ServerMetrics(GROUPS, "m")
    metrics.watch(Recall())
    text = metrics.render(stats, sessions).decode()
    found = list(text_string_to_metric_families(rendered(stats)))
    there = {family.name for family in found}
    found += [one for one in text_string_to_metric_families(text) if one.name not in there]
    return [family for family in found if not family.name.endswith("_created")]


def test_every_metric_is_in_the_list_with_its_labels_and_a_text_and_no_other():
    listed = {family.full_name: family for family in FAMILIES}
    found = {
        family.name + "_total" * (family.type == "counter"): family for family in every_family()
    }
    assert found.keys() == listed.keys()
    for name, family in found.items():
        assert family.type == listed[name].kind
        assert family.documentation == listed[name].help
        assert "`" not in family.documentation
        for sample in family.samples:
            assert sample.labels["model_name"] == "m"
            assert sample.labels.keys() - {"model_name", "le"} == set(listed[name].labels), name


def test_the_page_on_metrics_is_made_of_the_list():
    assert DOCUMENT.read_text("utf-8") == document()
    page = DOCUMENT.read_text("utf-8")
    assert all(f"`{event}`" in page for event in asdict(PersistCounters()))


def test_the_recall_of_selected_pages_is_a_sum_and_a_number():
    metrics, recall = ServerMetrics(GROUPS, "m"), Recall()
    metrics.watch(recall)
    recall.add(0.5)
    recall.add(0.75)
    found = scraped(metrics.render(None).decode())
    name = "stratakv_page_selection_{}_total"
    assert [found[(name.format(one),)] for one in ("queries", "recall")] == [2, 1.25]


def test_ages_that_are_not_measured_are_not_there():
    assert "stratakv_page_" not in rendered(replace(with_storage(), ages=None))


def test_ages_are_counted_up_to_each_bound():
    found = [family for family in every_family() if family.name == "stratakv_page_lifetime_seconds"]
    buckets = {
        sample.labels.get("le"): sample.value for family in found for sample in family.samples
    }
    assert (buckets["0.1"], buckets["0.5"], buckets["86400.0"], buckets["+Inf"]) == (0, 2, 2, 3)


DASHBOARD = json.loads((ROOT / "docs" / "grafana.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_metrics_that_are_there_by_labels_that_they_have():
    labels = {s.name: s.labels.keys() for family in every_family() for s in family.samples}
    for expression in EXPRESSIONS:
        names = re.findall(r"stratakv_\w+", expression)
        assert names, expression
        assert labels.keys() >= set(names), expression
        used = re.findall(r'(\w+)=~?"', expression)
        for grouped in re.findall(r"by \(([\w, ]+)\)", expression):
            used += grouped.split(", ")
        assert set.intersection(*(set(labels[name]) for name in names)) | {"tier", "state"} >= set(
            used
        ), expression
        assert set().union(*(labels[name] for name in names)) >= set(used), expression
    (model,) = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "model"]
    assert model["query"] == "label_values(stratakv_engine_steps_total, model_name)"


def test_the_panels_of_the_dashboard_have_ids_of_their_own_and_words():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["title"] and panel["description"] for panel in DASHBOARD["panels"])


def test_two_servers_in_a_process_do_not_share_a_registry():
    one, other = ServerMetrics(GROUPS, "one"), ServerMetrics(GROUPS, "other")
    one.finished("stop", 5)
    assert "stratakv_requests_total{" in one.render(None).decode()
    assert "stratakv_requests_total{" not in other.render(None).decode()


def test_durations_that_wait_are_counted_when_they_are_read():
    metrics = ServerMetrics(GROUPS, "m")
    for count in (3, FOLDED, 1):
        before = metrics.tokens().generated
        for _ in range(count):
            metrics.between_tokens_s.observe(0.02)
        assert metrics.tokens().generated == before + count
    metrics.between_tokens_s.observe(0.3)
    text = metrics.render(None).decode()
    assert f'inter_token_latency_seconds_count{{model_name="m"}} {FOLDED + 5}.0' in text
    assert f'inter_token_latency_seconds_bucket{{le="0.25",model_name="m"}} {FOLDED + 4}.0' in text
