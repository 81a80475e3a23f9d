"""Keys of several clients: from a file, each with a name, and what each opens."""

import asyncio

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from stratakv.core.config import ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.serve.api_keys import api_keys, join_key
from stratakv.serve.middleware import CLIENT, BearerKeys


@pytest.fixture
def file(tmp_path):
    def written(text: str) -> str:
        path = tmp_path / "keys"
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    return written


def test_keys_come_with_their_names_and_the_flags_beside_them(file):
    path = file("# who asks\nalice  k1\n\nbob@site\tk2=\n")
    assert api_keys(ServerConfig(api_key_file=path)) == {"alice": "k1", "bob@site": "k2="}
    both = ServerConfig(api_key="k0", api_key_file=path)
    assert api_keys(both) == {"default": "k0", "alice": "k1", "bob@site": "k2="}
    assert api_keys(ServerConfig(api_key="k0")) == {"default": "k0"}
    assert api_keys(ServerConfig()) == {}


def test_a_server_names_one_of_its_keys_to_the_others(file):
    path = file("alice k1\nbob k2")
    assert join_key(api_keys(ServerConfig(api_key_file=path))) == "k1"
    assert join_key(api_keys(ServerConfig(api_key="k0", api_key_file=path))) == "k0"
    assert join_key(api_keys(ServerConfig())) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("secretkey", "line 1: that is no name and a key"),
        ("a secretkey more", "line 1: that is no name and a key"),
        ("a k1\na secretkey", "line 2: its name or key is taken"),
        ("a secretkey\nb secretkey", "line 2: its name or key is taken"),
        ("a secretadmin", "line 1: its name or key is taken"),
        ("# nobody", "there is no key in it"),
    ],
)
def test_a_file_that_is_none_is_refused_without_showing_a_key(file, text, message):
    path = file(text)
    with pytest.raises(ConfigError) as error:
        api_keys(ServerConfig(api_key_file=path, admin_key="secretadmin"))
    assert str(error.value).startswith(f"--api-key-file {path}")
    assert message in str(error.value)
    assert "allowed" in str(error.value)
    assert "secret" not in str(error.value)


def test_each_key_opens_the_api_and_leaves_its_clients_name():
    async def app(scope, receive, send):
        await PlainTextResponse(str(Request(scope).scope[CLIENT]))(scope, receive, send)

    async def answers(keys, given):
        transport = httpx.ASGITransport(BearerKeys(app, keys, "admin"))
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as http:
            found = [
                await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
                for key in given
            ]
        return [
            answer.text if answer.status_code == 200 else answer.status_code for answer in found
        ]

    keys = {"alice": "k1", "bob": "k2"}
    assert asyncio.run(answers(keys, ["k1", "k2", "k3", "", "admin"])) == [
        "alice", "bob", 401, 401, 401,
    ]  # fmt: skip
    assert asyncio.run(answers({}, ["k1"])) == ["None"]
