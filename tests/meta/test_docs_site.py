"""The documents as a site: it builds, every link of it leads somewhere, and every page is shown."""

import os
import re
import subprocess
import sys

import pytest

from tests.meta.source import ROOT


def build(where, *, documents=ROOT) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mkdocs", reason="`make check` installs it")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", where],
        cwd=documents, capture_output=True, text=True, check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    where = tmp_path_factory.mktemp("site")
    built = build(where)
    assert not built.returncode, built.stderr
    return where


def test_every_page_is_built_with_its_pictures(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    assert pages | {"index"} <= {path.stem for path in site.glob("*.html")}
    assert {path.name for path in (ROOT / "docs/pictures").iterdir()} == {
        path.name for path in (site / "pictures").iterdir()
    }


def test_links_to_documents_of_the_root_lead_to_their_pages(site):
    index = (site / "index.html").read_text("utf-8")
    assert 'href="project/architecture.html"' in index
    front = (site / "project/readme.html").read_text("utf-8")
    assert 'href="../limits.html"' in front
    assert (site / "project/license.html").is_file()


def test_the_library_s_reference_comes_from_the_code(site):
    reference = (site / "api.html").read_text("utf-8")
    for name in ("TieredCache", "CacheSpec", "KeepWindow", "ForeignPages", "Transport"):
        assert re.search(rf'id="stratakv\.[\w.]+\.{name}"', reference), name


def test_nothing_is_fetched_from_elsewhere(site):
    for page in ("index.html", "one-idea.html", "api.html"):
        text = (site / page).read_text("utf-8")
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?:', text), page


def test_a_broken_link_is_refused(tmp_path):
    for name in ("docs", "scripts", "src"):
        (tmp_path / name).mkdir()
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        (tmp_path / name).write_text("# Title\n")
    (tmp_path / "docs/README.md").write_text("# Title\n\n[gone](nowhere.md)\n")
    (tmp_path / "scripts/docs_site.py").write_bytes((ROOT / "scripts/docs_site.py").read_bytes())
    config = (ROOT / "mkdocs.yml").read_text("utf-8").partition("nav:\n")[0]
    (tmp_path / "mkdocs.yml").write_text(config)
    built = build(tmp_path / "site", documents=tmp_path)
    assert built.returncode
    assert "nowhere.md" in built.stderr
