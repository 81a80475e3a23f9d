"""The page at ``/``: what it may load, what it asks for, and what a browser shows of it."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import httpx
import pytest

from stratakv.serve.metric_families import FAMILIES, PREFIX
from stratakv.serve.tokenizer import Tokenizer
from stratakv.testing.patience import PATIENCE_S
from tests.meta.source import ROOT
from tests.serving import EchoEngine, make_service, running, train_tokenizer

PAGE = (ROOT / "src" / "stratakv" / "serve" / "dashboard.html").read_text("utf-8")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    tokenizer = Tokenizer(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    engine = EchoEngine()
    with running(make_service(tokenizer, engine, api_key="secret"), engine) as found:
        yield found


def test_it_is_served_without_a_key_and_loads_nothing_from_elsewhere(live):
    answer = httpx.get(f"{live.url}/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == PAGE
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert not re.findall(r"https?://|@import|url\(", PAGE)


def test_every_metric_that_it_draws_is_one_of_the_servers():
    there = {family.name: family for family in FAMILIES}
    asked = re.findall(r'(?:sum|of|rate)\(\w+, "(\w+)"', PAGE)
    assert len(asked) >= 12
    assert {re.sub(r"_(sum|count)$", "", name) for name in asked} <= there.keys()
    for name, label in re.findall(r'(?:sum|rate)\(\w+, "(\w+)", \{(\w+)', PAGE):
        assert label in there[name].labels, name
    assert f"^{PREFIX}" in PAGE


class Words(HTMLParser):
    """Texts of a page as a browser has left it, by the id of what they are in."""

    def __init__(self):
        super().__init__()
        self.by_id, self._open = {}, []

    def handle_starttag(self, tag, attributes):
        if tag not in {"meta", "link", "br"}:
            self._open.append(dict(attributes).get("id"))

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        for name in filter(None, self._open):
            self.by_id[name] = f"{self.by_id.get(name, '')} {data.strip()}".strip()


@pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium")
def test_a_browser_draws_what_the_server_counts(live, tmp_path):
    line = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-breakpad",
        "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=9000", "--dump-dom", f"{live.url}/",
    ]  # fmt: skip
    headers = {"Authorization": "Bearer secret"}
    body = {"prompt": "The quick brown fox", "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{live.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    with (tmp_path / "dom.html").open("w+") as dom:  # no pipe: a helper of it may outlive it
        quiet = subprocess.DEVNULL
        subprocess.run(line, stdout=dom, stderr=quiet, timeout=PATIENCE_S, check=True)
        dom.seek(0)
        shown = dom.read()
    words = Words()
    words.feed(shown)
    assert words.by_id["model"] == "echo"
    assert words.by_id["state"] == "ready"
    assert "decoding 2" in words.by_id["phases-legend"]
    pools = words.by_id["pools"]
    assert all(f"{tier}: {group} 6 of 10" in pools for tier in ("device", "host")
               for group in ("full", "swa"))  # fmt: skip
    assert words.by_id["lost"].split("tokens")[0].strip() == "storage: deadline 32"
    assert "to the device 1, 0 B/s" in words.by_id["copies"]
    assert "<polygon" in shown
    assert "NaN" not in shown.partition("<script>")[0]
