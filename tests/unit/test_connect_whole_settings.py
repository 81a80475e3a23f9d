"""How a setting of another engine becomes text: what it names is in it, and no secret is."""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from stratakv.connect import whole_settings
from stratakv.connect.whole_settings import setting_fields
from stratakv.core.errors import ConfigError


def text(value, name="tables"):
    return setting_fields({name: value}, ())[name]


@pytest.fixture
def hub(tmp_path):
    """A snapshot as a hub's client lays it out: links to blobs beside it."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "a").write_text("one")
    (tmp_path / "blobs" / "b").write_text("two")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "table.json").symlink_to(tmp_path / "blobs" / "a")
    (tmp_path / "snapshot" / "more").symlink_to(tmp_path / "more")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "x").write_text("x")
    return tmp_path


def rewrite(hub):
    (hub / "blobs" / "a").write_text("longer")


def rewrite_below(hub):
    (hub / "more" / "x").write_text("longer")


def retarget(hub):
    """To bytes of the same size and time."""
    status = (hub / "blobs" / "a").stat()
    os.utime(hub / "blobs" / "b", ns=(status.st_atime_ns, status.st_mtime_ns))
    (hub / "snapshot" / "table.json").unlink()
    (hub / "snapshot" / "table.json").symlink_to(hub / "blobs" / "b")


@pytest.mark.parametrize("change", [rewrite, rewrite_below, retarget])
def test_what_a_link_in_a_directory_leads_to_is_a_part_of_the_setting(hub, change):
    first = text(str(hub / "snapshot"))
    assert text(str(hub / "snapshot")) == first
    change(hub)
    assert text(str(hub / "snapshot")) != first


def test_links_that_lead_round_end_and_each_of_two_to_one_directory_counts(hub):
    snapshot = hub / "snapshot"
    (hub / "more" / "back").symlink_to(snapshot)
    (snapshot / "self").symlink_to(snapshot)
    (snapshot / "again").symlink_to(hub / "more")
    first = text(str(snapshot))
    assert text(str(snapshot)) == first
    (snapshot / "again").unlink()
    (snapshot / "again").symlink_to(hub / "blobs")
    assert text(str(snapshot)) != first


def test_a_link_to_nothing_is_another_setting_than_one_to_a_file(hub):
    first = text(str(hub / "snapshot"))
    (hub / "blobs" / "a").unlink()
    assert text(str(hub / "snapshot")) != first


@pytest.mark.parametrize("value", ["tables", Path("tables"), "."])
def test_a_relative_path_is_a_path(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "x").write_text("one")
    first = text(value)
    (tmp_path / "tables" / "x").write_text("longer")
    assert text(value) != first


def test_what_is_no_path_is_its_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for value in ("", "auto", "x" * 5000, "a\0b", "file/below", "/nowhere/at/all", "\ud800"):
        assert text(value) == value


def test_a_device_is_not_read():
    assert text("/dev/null").startswith("/dev/null ")


def test_a_pipe_is_refused(tmp_path):
    """Who reads it takes it away."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"tables .*it is a pipe.*allowed is a file"):
        text(str(tmp_path / "pipe"))


def test_a_path_that_leads_nowhere_but_to_itself_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match=r"tables .*loop: cannot be read.*allowed is a file"):
        text(str(tmp_path / "loop"))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOENT])
@pytest.mark.parametrize("what", ["file", "subfolder", "file below"])
def test_what_is_there_and_cannot_be_read_is_refused(tmp_path, monkeypatch, number, what):
    """Also what is gone while it is read. By hand, since root may read everything."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_text("x")
    value = tmp_path / "below" / "file" if what == "file" else tmp_path
    where = tmp_path / "below" if what == "subfolder" else tmp_path / "below" / "file"

    def failing(function):
        def call(path=".", *given, **named):
            if os.fspath(path) == os.fspath(where):
                raise OSError(number, os.strerror(number), os.fspath(where))
            return function(path, *given, **named)

        return call

    owner, name = {
        "file": (Path, "open"),
        "subfolder": (os, "scandir"),
        "file below": (os, "stat"),
    }[what]
    monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    with pytest.raises(ConfigError, match=f"tables {value}.*{os.strerror(number)}.*allowed is"):
        text(str(value))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_path_of_which_nothing_can_be_learnt_is_refused(tmp_path, monkeypatch, number):
    def failing(path, *_given, **_named):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(ConfigError) as caught:
        text(str(tmp_path))
    with pytest.raises(ConfigError) as secret:
        text("/hidden", "VLLM_API_KEY")
    monkeypatch.undo()
    assert f"tables {tmp_path}: cannot be read" in str(caught.value)
    assert "VLLM_API_KEY: cannot be read" in str(secret.value)
    assert "/hidden" not in str(secret.value)


def test_a_directory_of_too_many_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_settings, "MOST_FILES", 3)
    for at in range(3):
        (tmp_path / str(at)).mkdir()
    text(str(tmp_path))
    (tmp_path / "0" / "x").touch()
    with pytest.raises(ConfigError, match="more than 3 files and directories"):
        text(str(tmp_path))


@dataclass
class Loader:
    api_key: str
    retries: int = 3


NESTED = {
    "mapping": lambda secret: {"cloud": {"secret_access": secret}},
    "list": lambda secret: [1, [{"hf_token": secret}]],
    "token": lambda secret: {"token": secret},
    "dataclass": lambda secret: {"loader": Loader(secret)},
    "below": lambda secret: {"password": {"value": [secret]}},
    "json": lambda secret: json.dumps({"headers": [{"Authorization": secret}]}),
}


@pytest.mark.parametrize("shape", NESTED)
def test_a_secret_is_hashed_wherever_it_lies(shape):
    first, same, other = (text(NESTED[shape](one)) for one in ("tell-nobody",) * 2 + ("another",))
    assert first == same != other
    assert "tell-nobody" not in first


def test_secrets_of_flattened_settings_are_hashed():
    for name in ("load.api_key", "api_key.value", "load.secrets.first", "hf_token"):
        assert "tell-nobody" not in text("tell-nobody", name)


def test_what_is_no_secret_can_be_read():
    assert json.loads(text({"num_key_value_heads": 8, "eos_token_id": 2})) == {
        "num_key_value_heads": 8,
        "eos_token_id": 2,
    }
