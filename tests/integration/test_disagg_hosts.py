"""A prompt is computed on one host and decoded on another one: network namespaces of this machine,
each with an address of its own and a loopback that nobody else reaches, and a bridge between them.
"""

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from stratakv.testing.patience import PATIENCE_S
from tests.disagg_servers import FLAGS, Fleet, ready
from tests.fixtures.models import tiny_model
from tests.fixtures.servers import free_port
from tests.fixtures.transports import mooncake_is_here, nixl_is_here
from tests.real_server import COMPLETIONS, completion, tokens
from tests.serving import train_tokenizer

PORT, JOIN_PORT = 8000, 8998


def ip(*line: str) -> None:
    done = subprocess.run(("ip", *line), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr)


@contextmanager
def hosts(count):
    """Names of ``count`` hosts, and their addresses. Skips where they cannot be made."""
    if not shutil.which("ip"):
        pytest.skip("network namespaces need ip: apt install iproute2")
    mine = f"skv{os.getpid()}"
    network = f"198.18.{os.getpid() % 250}"
    with ExitStack() as undo:
        try:
            ip("link", "add", mine, "type", "bridge")
            undo.callback(ip, "link", "del", mine)
            ip("address", "add", f"{network}.1/24", "dev", mine)
            ip("link", "set", mine, "up")
            found = []
            for at in range(count):
                name, address = f"{mine}{'abc'[at]}", f"{network}.{at + 2}"
                ip("netns", "add", name)
                undo.callback(ip, "netns", "del", name)
                ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("link", "set", name, "master", mine, "up")
                ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                for device in ("eth0", "lo"):
                    ip("-n", name, "link", "set", device, "up")
                found.append((name, address))
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield found


@pytest.mark.parametrize(
    ("transport", "is_here"), [("nixl", nixl_is_here), ("mooncake", mooncake_is_here)]
)
def test_two_hosts_behind_a_router_answer_as_one_server_does(transport, is_here, tmp_path):
    """As docs/disaggregation.md starts them: ``--host 0.0.0.0 --advertise-host ADDRESS``."""
    is_here()
    model: Path = train_tokenizer(tmp_path / "model")
    tiny_model("gemma3").save_pretrained(model)
    with hosts(2) as (prefills, decodes), ExitStack() as undo:
        fleet = Fleet(tmp_path, undo)

        def server(host, *role):
            name, address = host
            where = ("--host", "0.0.0.0", "--advertise-host", address, "--transport", transport)
            line = ("serve", str(model), *FLAGS, *where, *role)
            return fleet.stratakv(PORT, *line, host=address, inside=name)

        prefill = server(prefills, "--role", "prefill", "--bootstrap-port", str(JOIN_PORT))
        decode = server(decodes, "--role", "decode")
        unified = fleet.server(model)
        route = ("route", "--prefill", prefill.url, "--decode", decode.url)
        router = fleet.stratakv(free_port(), *route)
        ready(prefill, decode, unified, router)
        for seed in range(2):
            asked = completion(tokens(150, seed), 12)
            answers = [
                httpx.post(one.url + COMPLETIONS, json=asked, timeout=PATIENCE_S)
                for one in (unified, router)
            ]
            assert [one.status_code for one in answers] == [200, 200], [one.text for one in answers]
            expected, got = (one.json()["choices"][0]["text"] for one in answers)
            assert got == expected
            assert "prefill" in answers[1].json()["usage"]["prompt_tokens_details"]
