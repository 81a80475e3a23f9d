"""``stratakv doctor`` of a machine: each thing that is too little is named, with what helps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stratakv.cli import main
from stratakv.connect import machine
from stratakv.connect.checks import Check, check_lines, exit_code
from stratakv.connect.machine import DISK_BYTES, MachineFacts, disk_check, look, machine_checks
from stratakv.connect.store_checks import file_directory, store_check
from stratakv.connect.stores import open_engine_store
from stratakv.core.ids import GroupId, PageKey
from stratakv.storage.backend import ObjectKey, StoreFormat, WriteStatus
from stratakv.storage.ends import close_ends

GOOD = MachineFacts(
    python="3.11.9",
    packages={"stratakv": "0.1.0", **dict.fromkeys(machine.PACKAGES, "1.0")},
    compiled=True,
    total_bytes=64 << 30,
    free_bytes=32 << 30,
    huge_pages="madvise",
    locked_bytes=-1,
    files=(1024, 1 << 20),
    cores=8,
    quota=None,
    threads=None,
)


def test_a_good_machine_has_nothing_to_be_done():
    checks = machine_checks(GOOD)
    assert {check.verdict for check in checks} == {"fine"}
    assert not any(check.advice for check in checks)
    assert exit_code(checks) == 0


@pytest.mark.parametrize(
    ("facts", "what", "verdict", "advice"),
    [
        ({"packages": {**GOOD.packages, "torch": None}}, "versions", "poor", "stratakv[serve]"),
        ({"packages": {**GOOD.packages, "xxhash": None}}, "versions", "bad", "install stratakv"),
        ({"compiled": False}, "copies", "poor", "a C compiler"),
        ({"free_bytes": 1 << 30}, "memory", "poor", "--device-memory"),
        ({"huge_pages": "never"}, "huge pages", "poor", "echo madvise"),
        ({"huge_pages": None}, "huge pages", "poor", "CONFIG_TRANSPARENT_HUGEPAGE"),
        ({"locked_bytes": 8 << 20}, "pinned memory", "poor", "ulimit -l"),
        ({"files": (1024, 1024)}, "open files", "poor", "ulimit -Hn"),
        ({"quota": 2.0}, "threads", "poor", "--threads 2"),
        ({"threads": 16}, "threads", "poor", "--threads 8"),
    ],
)
def test_what_is_too_little_is_named_with_what_helps(facts, what, verdict, advice):
    checks = machine_checks(replace(GOOD, **facts))
    (found,) = [check for check in checks if check.verdict != "fine"]
    assert (found.what, found.verdict) == (what, verdict)
    assert advice in found.advice
    at = check_lines(checks).index(f"{verdict:<9}{what}: {found.text}")
    assert check_lines(checks)[at + 1] == f"{'':<9}-> {found.advice}"
    assert exit_code(checks) == (verdict == "bad")


@pytest.mark.parametrize("verdict", ["untested", "poor", "bad"])
def test_a_finding_that_says_not_what_to_do_cannot_be_made(verdict):
    with pytest.raises(AssertionError, match="disk: what is to be done"):
        Check("disk", verdict, "slow")
    with pytest.raises(AssertionError, match="disk: what is to be done"):
        Check("disk", "fine", "fast", "nothing")


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("redis://127.0.0.1:1", "redis-cli -u URL ping"),
        ("mooncake://127.0.0.1:1?timeout=1s", "a mooncake_master that runs"),
        ("s3://nowhere?endpoint=http://127.0.0.1:1&timeout=1s", "AWS_ACCESS_KEY_ID"),
        ("memory://?quota=1", "a larger quota"),
        ("file:///proc/nowhere", "a directory that this user may write to"),
        ("ftp://x", "file:///var/lib/stratakv?quota=200GiB"),
    ],
)
def test_a_store_that_cannot_be_had_says_what_to_do(monkeypatch, url, advice):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    found = store_check(url, None)
    assert found.verdict == "bad"
    assert advice in found.advice


def test_a_key_that_is_none_says_how_one_is_made(tmp_path):
    found = store_check("memory://", str(tmp_path / "a key"))
    assert (found.verdict, found.what) == ("bad", "store")
    assert f"openssl rand -hex 32 > '{tmp_path}/a key'" in found.advice


def test_a_quota_beside_as_many_threads_is_fine():
    assert machine_checks(replace(GOOD, quota=2.0, threads=2))[-1].verdict == "fine"


def test_this_machine_is_looked_at_and_a_disk_is_left_as_it_was(tmp_path, capsys):
    found, store = tmp_path / "found.json", tmp_path / "store"
    line = ["doctor", "--storage", f"file://{store}?quota=16MiB", "--json", str(found)]
    assert main(line) == 0
    shown, written = capsys.readouterr().out, json.loads(found.read_text())
    names = [check["what"] for check in written["checks"]]
    assert names == [check.what for check in machine_checks(look())] + ["store", "disk"]
    assert "MB/s written and synced" in shown
    assert written["ok"] is True
    assert main(["fsck", str(store)]) == 0
    assert "0 sound pages" in capsys.readouterr().out


def test_a_store_that_is_there_keeps_every_page(tmp_path, capsys):
    """A store makes room by the quota of the URL that it is opened with."""
    store = tmp_path / "store"
    form = StoreFormat(spec_digest=b"x" * 16, page_bytes=(1 << 16,))
    ends = open_engine_store(f"file://{store}?quota=64MiB", None, form)
    keys = [ObjectKey(PageKey(bytes([n]) * 32), GroupId(0)) for n in range(250)]
    page = memoryview(bytes(1 << 16))
    assert set(ends.writing.write(keys, [page] * len(keys))) == {WriteStatus.STORED}
    close_ends(ends)
    before = {file: file.read_bytes() for file in store.rglob("*") if file.is_file()}
    assert main(["doctor", "--storage", f"file://{store}?quota=16MiB"]) == 0
    assert "is there; nothing was written to it" in capsys.readouterr().out
    assert {file: file.read_bytes() for file in store.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    ("url", "directory"),
    [
        ("file://localhost/somewhere/x?quota=1GiB", Path("/somewhere/x")),
        ("file:///a%20b/c", Path("/a b/c")),
        ("file://relative/dir", None),
        ("redis://localhost:6379", None),
    ],
)
def test_the_disk_is_that_of_the_store(url, directory):
    assert file_directory(url) == directory


def test_a_path_that_no_disk_has_is_a_finding(tmp_path):
    assert main(["doctor", "--storage", f"file:///{'n' * 300}"]) == 1
    assert disk_check(tmp_path / ("n" * 300) / "x").verdict in {"fine", "poor"}


def test_a_disk_of_seconds_is_bounded_and_called_slow(tmp_path):
    clock = iter(range(1000))
    found = disk_check(tmp_path / "not/there/yet", lambda: float(next(clock)))
    assert found.verdict == "poor"
    assert str(tmp_path) in found.text
    assert next(clock) < 2 * DISK_BYTES >> 20, "not all of it was written"
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_to_is_bad(monkeypatch, tmp_path):
    def refused(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine.tempfile, "TemporaryFile", refused)
    found = disk_check(tmp_path)
    assert (found.verdict, found.advice) == ("bad", "a directory that this user may write to")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["vllm"], "MODEL is missing; allowed with vllm is one"),
        (["vllm", "model"], "--storage is missing; allowed with vllm is one"),
        (["--why-miss", "x"], "--why-miss: allowed with vllm or sglang"),
        (["--storage-key-file", "x"], "--storage-key-file: allowed with --storage"),
        (["--json", "/nowhere/x"], "--json /nowhere/x: allowed is"),
    ],
)
def test_lines_that_go_together_with_nothing_are_refused(line, message, capsys):
    assert main(["doctor", *line]) == 2
    assert message in capsys.readouterr().err
