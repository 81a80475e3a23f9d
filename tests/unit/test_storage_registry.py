"""From a URL's record to a backend, with real entry points of a package made for the test."""

import re
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from stratakv.core.errors import ConfigError, StorageError
from stratakv.storage.backend import StoreFormat, WriteStatus
from stratakv.storage.memory import MemoryBackend
from stratakv.storage.registry import open_storage, plugin_schemes
from stratakv.storage.urls import PluginUrl, parse_storage_url
from stratakv.testing import storage_conformance
from stratakv.testing.storage_conformance import keys_of, store

FORM = StoreFormat(spec_digest=bytes(16), page_bytes=(4096,))
STORE = """
from stratakv.storage.memory import MemoryBackend

asked = []

def open_store(url, form):
    asked.append((url, form))
    return MemoryBackend(form)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a distribution on the path: its name, its modules, its entry points."""

    def installed(name: str, modules: dict[str, str], points: dict[str, str]) -> None:
        place = tmp_path / name
        metadata = place / f"{name}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{scheme} = {value}" for scheme, value in points.items()]
        (metadata / "entry_points.txt").write_text("\n".join(["[stratakv.storage]", *lines, ""]))
        for module, text in modules.items():
            (place / f"{module}.py").write_text(text)
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(str(place))

    return installed


def test_a_package_adds_a_scheme(install):
    install("acme_kv", {"acme_store": STORE}, {"acme": "acme_store:open_store"})
    assert "acme" in plugin_schemes()
    url = parse_storage_url("acme://anything?goes=here", plugin_schemes())
    store = open_storage(url, FORM)
    assert isinstance(store, MemoryBackend)
    assert sys.modules["acme_store"].asked == [(url, FORM)]


def test_schemes_are_known_without_importing_the_package(install):
    install("acme_kv", {"acme_broken": "raise OSError"}, {"acme": "acme_broken:open_store"})
    assert "acme" in plugin_schemes()
    assert "acme_broken" not in sys.modules


@pytest.mark.parametrize("value", ["acme_absent:open_store", "acme_store:no_such"])
def test_a_package_that_cannot_be_imported_is_named(install, value):
    install("acme_kv", {"acme_store": STORE}, {"acme": value})
    with pytest.raises(ConfigError, match="acme_kv"):
        open_storage(PluginUrl(scheme="acme", url="acme://x"), FORM)


def test_two_packages_with_one_scheme_are_both_named(install):
    install("acme_kv", {"acme_store": STORE}, {"acme": "acme_store:open_store"})
    install("other_kv", {"other_store": STORE}, {"acme": "other_store:open_store"})
    with pytest.raises(ConfigError, match="acme_kv, other_kv"):
        open_storage(PluginUrl(scheme="acme", url="acme://x"), FORM)


def test_a_built_in_scheme_is_not_taken_over(install):
    install("acme_kv", {"acme_store": STORE}, {"memory": "acme_store:open_store"})
    assert "memory" not in plugin_schemes()


@pytest.mark.parametrize(
    ("url", "library", "extra"),
    [
        ("redis://127.0.0.1:1/0", "redis", "redis"),
        ("s3://bucket/prefix", "obstore", "s3"),
        ("mooncake://127.0.0.1:1", "mooncake", "mooncake"),
    ],
)
def test_a_missing_library_names_the_extra(monkeypatch, url, library, extra):
    for name in [library, *[n for n in sys.modules if n.startswith(f"{library}.")]]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'stratakv\[{extra}\]'"):
        open_storage(parse_storage_url(url), FORM)


def test_the_registry_imports_no_client_library_and_no_torch():
    code = (
        "import sys; import stratakv.storage.registry; "
        "print({'redis', 'obstore', 'mooncake', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert done.stdout.strip() == "set()"


def test_the_time_out_of_a_url_reaches_the_client(monkeypatch):
    limits_s = []

    def recorded(sock, limit_s):
        limits_s.append(limit_s)
        socket.SocketType.settimeout(sock, limit_s)

    monkeypatch.setattr(socket.socket, "settimeout", recorded)
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    with silent, pytest.raises(StorageError):
        open_storage(parse_storage_url(f"redis://127.0.0.1:{port}/0?timeout=0.3s"), FORM)
    assert 0 < limits_s[-1] <= 0.3


@pytest.mark.parametrize("url", ["memory://?quota=1KiB", "file://{}/store?quota=1KiB"])
def test_a_quota_that_can_never_hold_anything_is_refused_with_what_is_needed(url, tmp_path):
    text, form = url.format(tmp_path), storage_conformance.FORM
    with pytest.raises(
        ConfigError, match=r"--storage with quota=1024: .* allowed for quota is \d+"
    ) as caught:
        open_storage(parse_storage_url(text), form)
    assert not list(tmp_path.iterdir())
    found = re.search(r"allowed for quota is (\d+)", str(caught.value))
    assert found is not None
    enough = text.replace("1KiB", found[1])
    with closing(open_storage(parse_storage_url(enough), form)) as backend:
        for group in range(len(form.page_bytes)):
            keys = keys_of("a", 1, group=group)
            assert store(backend, keys) == [WriteStatus.STORED]
    with pytest.raises(ConfigError, match=f"allowed for quota is {found[1]} "):
        open_storage(parse_storage_url(text.replace("1KiB", str(int(found[1]) - 1))), form)
