"""Models by name, from a stand-in of the hub on the loopback: no test asks the real one."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stratakv.core.config import ServerConfig
from stratakv.serve.hub import HUB_NAME, LocatedModel, locate
from stratakv.testing.patience import PATIENCE_S

NAME, SHA = "some-lab/tiny-1.5B", "a" * 40
WEIGHTS = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": json.dumps(WEIGHTS).encode(),
    "model-1.safetensors": b"1" * 1000,
    "model-2.safetensors": b"2" * 1000,
    "pytorch_model.bin": b"not wanted",
    "original/config.json": b"{}",
}


@dataclass
class Hub:
    """``status``: of what it is asked about a model; ``lost``: files that it breaks off at."""

    url: str
    status: int = 200
    lost: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)


def answering(hub):
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.answer(head=True)

        def do_GET(self):
            self.answer(head=False)

        def answer(self, *, head):
            path = self.path.partition("?")[0]
            hub.asked.append(path)
            if path.startswith("/api/models/"):
                self.about()
                return
            file = path.partition(f"/resolve/{SHA}/")[2]
            if file not in FILES or file in hub.lost:
                self.give(404, b"", {})
                return
            body = FILES[file]
            tags = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": SHA}
            self.give(200, body, tags, head=head)

        def about(self):
            files = [{"rfilename": name, "size": len(body)} for name, body in FILES.items()]
            about = {"id": NAME, "modelId": NAME, "sha": SHA, "siblings": files, "private": False,
                     "tags": [], "downloads": 0, "likes": 0}  # fmt: skip
            if "/tree/" in self.path:
                about = [{"type": "file", "path": name, "size": len(body),
                          "oid": hashlib.sha1(body, usedforsecurity=False).hexdigest()}
                         for name, body in FILES.items()]  # fmt: skip
            kind = {"Content-Type": "application/json"}
            if hub.status == 404:
                kind["X-Error-Code"] = "RepoNotFound"
            self.give(hub.status, json.dumps(about).encode(), kind)

        def give(self, status, body, headers, *, head=False):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not head:
                self.wfile.write(body)

    return Handler


@contextmanager
def serving_hub():
    hub = Hub("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), answering(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join(PATIENCE_S)
        server.server_close()


@pytest.fixture(scope="module")
def hub():
    with serving_hub() as found:
        yield found


ASK = f"""
from pathlib import Path
from stratakv.core.errors import ConfigError
from stratakv.serve.hub import locate
import sys
try:
    found = locate(Path("{NAME}"))
except ConfigError as error:
    sys.exit(str(error))
print(found.path)
assert found.name == "{NAME}"
"""


def ask(home, endpoint, **variables):
    """In a process of its own: Hugging Face reads its variables once."""
    others = ("hf_", "http_proxy", "https_proxy", "all_proxy")
    kept = {k: v for k, v in os.environ.items() if not k.lower().startswith(others)}
    env = kept | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-c", ASK], env=env | variables, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def test_a_name_is_downloaded_once_and_then_comes_from_the_cache(hub, tmp_path):
    hub.lost = {"model-2.safetensors"}
    broken = ask(tmp_path, hub.url)
    assert broken.returncode == 1
    hub.lost = set()
    offline = ask(tmp_path, hub.url, HF_HUB_OFFLINE="1")
    assert "does not have it whole; and " in offline.stderr
    assert "HF_HUB_OFFLINE is set, so that the hub is not asked" in offline.stderr
    first = ask(tmp_path, hub.url)
    assert first.returncode == 0, first.stderr
    path = Path(first.stdout.strip())
    there = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert there == FILES.keys() - {"pytorch_model.bin", "original/config.json"}
    assert (path / "model-2.safetensors").read_bytes() == FILES["model-2.safetensors"]
    hub.asked.clear()
    again = ask(tmp_path, hub.url)
    assert again.stdout == first.stdout
    assert hub.asked == []
    (path / "model-1.safetensors").unlink()
    assert ask(tmp_path, hub.url, HF_HUB_OFFLINE="1").returncode == 1
    assert ask(tmp_path, hub.url).stdout == first.stdout
    assert (path / "model-1.safetensors").read_bytes() == FILES["model-1.safetensors"]


@pytest.mark.parametrize(("status", "why"), [(404, "has no such model, or not for you (HF_TOKEN)"),
                                             (500, "could not be asked: ")])  # fmt: skip
def test_what_can_not_be_had_is_refused_with_what_was_tried(hub, tmp_path, status, why):
    hub.status = status
    try:
        found = ask(tmp_path, hub.url)
    finally:
        hub.status = 200
    assert found.returncode == 1
    for part in (
        f"MODEL {NAME}: allowed is a directory with a Hugging Face config.json, or a name on the",
        "There is no such directory",
        f"the cache in {tmp_path}/hub does not have it whole",
        f"{hub.url} ",
        why,
    ):
        assert part in found.stderr


def test_without_a_network_the_refusal_names_it(tmp_path):
    found = ask(tmp_path, "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 could not be asked: ConnectError" in found.stderr


@pytest.mark.parametrize("name", ["/a/b", "../a", "a", "a/b/c", "a/", "a b/c", "a/.b"])
def test_a_path_is_no_name(name):
    assert not HUB_NAME.fullmatch(name)
    assert locate(Path(name)).name is None


def test_a_directory_that_looks_like_a_name_is_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = Path(NAME)
    directory.mkdir(parents=True)
    assert locate(directory).path == directory


def test_clients_use_the_hubs_name_unless_they_are_given_another():
    plain, called = ServerConfig(), ServerConfig(served_model_name="mine")
    found = LocatedModel(Path("/cache/snapshots/abc"), NAME)
    assert found.named(plain).served_model_name == NAME
    assert found.named(called) is called
    assert LocatedModel(Path("/models/demo"), None).named(plain) is plain
