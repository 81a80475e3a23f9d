"""The image: what its instructions name is there; where a container engine runs, it is built and
serves.
"""

import re
import shutil
import subprocess
import tomllib

import httpx
import pytest

from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.fixtures.models import tiny_model
from tests.fixtures.servers import free_port
from tests.meta.source import ROOT
from tests.serving import train_tokenizer

DOCKERFILE = (ROOT / "Dockerfile").read_text()
BUILD_S = 12 * PATIENCE_S


def engine() -> str | None:
    docker = shutil.which("docker") or shutil.which("podman")
    if docker is None:
        return None
    known = subprocess.run([docker, "info"], capture_output=True, timeout=PATIENCE_S, check=False)
    return docker if known.returncode == 0 else None


def test_what_it_copies_and_installs_is_there():
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    paths = " ".join(copied).split()
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert paths
    assert all((ROOT / path).exists() and f"!{path}" in allowed for path in paths)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"'\.\[(.+)\]'", DOCKERFILE)[0].split(",")
    assert set(extras) < project["optional-dependencies"].keys()
    [version] = set(re.findall(r"^FROM python:3\.(\d+)-slim", DOCKERFILE, re.MULTILINE))
    assert int(version) >= int(project["requires-python"].removeprefix(">=3."))


@pytest.mark.long
def test_it_is_built_and_serves(tmp_path):
    docker = engine()
    if docker is None:
        pytest.skip("no container engine runs here: `docker info` fails")
    name = f"stratakv-test-{free_port()}"

    def run(*args: str) -> str:
        return subprocess.run(
            [docker, *args], check=True, capture_output=True, text=True, timeout=BUILD_S
        ).stdout

    run("build", "-t", name, str(ROOT))
    model = train_tokenizer(tmp_path / "model")
    tiny_model("llama").save_pretrained(model)
    port = free_port()
    memory = ("--device-memory", "64MiB", "--host-memory", "64MiB")
    serve = ("serve", "/model", "--host", "0.0.0.0", *memory)
    run("run", "-d", "--name", name, "-p", f"127.0.0.1:{port}:8000", "-v", f"{model}:/model:ro",
        name, *serve)  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            try:
                return httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(ready, "the server in the container")
        body = {"prompt": "hello", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.json()["usage"]["completion_tokens"] == 4
        run("stop", name)  # SIGTERM drains
        code = run("inspect", "-f", "{{.State.ExitCode}}", name).strip()
        assert code == "0"
    finally:
        run("rm", "-f", name)
        run("rmi", "-f", name)
