"""Grafana's panels, asked of a real Prometheus that scrapes a real server: each expression is one
that it takes, and those of what the server has done have a value.

There is no package of Grafana itself to be had from PyPI, npm or Debian.
"""

import json
import shutil
import subprocess

import httpx
import pytest
import torch

from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.fixtures.servers import free_port
from tests.meta.source import ROOT
from tests.real_server import COMPLETIONS, SMALL_POOLS, completion, real_server, tokens

PROMETHEUS = shutil.which("prometheus")
DASHBOARD = json.loads((ROOT / "docs" / "grafana.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
SILENT = ("stratakv_storage_", "stratakv_page_", "stratakv_requests_failed", "rate(stratakv_time_")
"""Of what this server has not: a store, ages, failures; and of a histogram, two scrapes apart."""
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
scrape_configs:
  - {{job_name: stratakv, static_configs: [{{targets: ["{target}"]}}]}}
"""


@pytest.fixture(scope="module")
def asked(directory, tmp_path_factory):
    """Of a Prometheus that has seen a server work: what it says to an expression."""
    if PROMETHEUS is None:
        pytest.skip("no Prometheus on this machine: apt-get install prometheus")
    torch.set_num_threads(1)
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    url = f"http://127.0.0.1:{port}"
    with real_server(directory, SMALL_POOLS) as live, (folder / "log").open("wb") as log:
        (folder / "config.yml").write_text(CONFIG.format(target=live.url.partition("//")[2]))
        process = subprocess.Popen(
            [
                PROMETHEUS, f"--config.file={folder / 'config.yml'}",
                f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:

            def query(expression: str) -> list[dict]:
                filled = expression.replace("$model", ".*").replace("$__rate_interval", "1h")
                answer = httpx.get(
                    f"{url}/api/v1/query", params={"query": filled}, timeout=PATIENCE_S
                )
                assert answer.status_code == 200, (filled, answer.text)
                return answer.json()["data"]["result"]

            def ready() -> bool:
                try:
                    return httpx.get(f"{url}/-/ready", timeout=PATIENCE_S).status_code == 200
                except httpx.TransportError:
                    return False

            def scraped() -> bool:
                found = query("count_over_time(stratakv_engine_steps_total[10m])")
                return bool(found) and int(found[0]["value"][1]) >= 2

            wait_until(ready)
            wait_until(scraped)
            before = int(query("stratakv_engine_steps_total")[0]["value"][1])
            for _ in range(2):
                body = completion(tokens(100, 1), 5)
                done = httpx.post(live.url + COMPLETIONS, json=body, timeout=PATIENCE_S)
                assert done.status_code == 200

            def seen() -> bool:
                """All of both requests, and each series twice: a rate needs two scrapes."""
                steps = int(query("stratakv_engine_steps_total")[0]["value"][1])
                cached = query("sum(stratakv_cached_prompt_tokens_total)")
                scrapes = query("min(count_over_time(stratakv_cached_prompt_tokens_total[1h]))")
                return (
                    steps >= before + 10
                    and bool(cached and scrapes)
                    and int(cached[0]["value"][1]) == 96
                    and int(scrapes[0]["value"][1]) >= 2
                )

            wait_until(seen)
            yield query
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_prometheus_takes_an_expression_of_the_dashboard_and_has_a_value(asked, expression):
    found = asked(expression)
    if not any(name in expression for name in SILENT):
        assert found, expression


def test_the_hit_rate_is_that_of_the_requests(asked):
    (found,) = asked(
        'sum(stratakv_cached_prompt_tokens_total{model_name=~"$model"})'
        ' / sum(stratakv_prompt_tokens_total{model_name=~"$model"})'
    )
    assert float(found["value"][1]) == 96 / 200


def test_the_models_are_what_the_variable_lists(asked, directory):
    """As Grafana asks for ``label_values``."""
    found = asked("group by (model_name) (stratakv_engine_steps_total)")
    assert [one["metric"]["model_name"] for one in found] == [directory.name]
