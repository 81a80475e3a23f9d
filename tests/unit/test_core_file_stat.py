"""What an inode says of a file: any write shows later, or the look says that it may not."""

import mmap
import os
import time
from dataclasses import replace

import pytest

from stratakv.core.identity.file_stat import (
    TRUSTED,
    Kernel,
    boot_of_this_machine,
    coarse_ns,
    file_system_of,
    open_file,
    stat_file,
)

SECOND = 1_000_000_000


class Machine:
    """A kernel whose clock goes on when somebody sleeps."""

    def __init__(self, now_ns, file_system="ext4", boot="b"):
        self.now_ns = now_ns
        self.slept_s = 0.0
        self.kernel = Kernel(
            boot=boot,
            file_system=lambda fd: file_system,
            coarse_ns=lambda: self.now_ns,
            sleep=self._sleep,
        )

    def _sleep(self, seconds):
        self.slept_s += seconds
        self.now_ns += int(seconds * SECOND)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    return path


def seen(path, kernel):
    fd = open_file(path)
    try:
        return stat_file(path, fd, kernel)
    finally:
        os.close(fd)


def here():
    return Kernel(boot=boot_of_this_machine())


def on_trusted(path):
    fd = open_file(path)
    found = file_system_of(fd)
    os.close(fd)
    if found not in TRUSTED:
        pytest.skip(f"temporary files lie on {found}, which is not trusted")


def test_a_file_that_has_just_been_written_is_looked_at_after_the_next_tick(path):
    made_ns = path.stat().st_ctime_ns
    machine = Machine(made_ns)
    found = seen(path, machine.kernel)
    assert machine.now_ns > made_ns
    assert (found.trusted, found.ctime_ns) == (True, made_ns)
    assert seen(path, Machine(made_ns + 1).kernel) == found
    later = Machine(made_ns + SECOND)
    seen(path, later.kernel)
    assert later.slept_s == 0


def test_whole_seconds_are_the_clock_of_a_file_system_that_has_no_others(path, monkeypatch):
    real, at_ns = os.fstat, path.stat().st_ctime_ns // SECOND * SECOND

    class Inode:
        def __init__(self, fd):
            self._real = real(fd)

        st_ctime_ns = at_ns

        def __getattr__(self, name):
            return getattr(self._real, name)

    machine = Machine(path.stat().st_ctime_ns + 1)
    monkeypatch.setattr(os, "fstat", Inode)
    assert seen(path, machine.kernel).trusted
    assert machine.now_ns >= at_ns + SECOND


def test_a_file_from_the_future_is_not_waited_for_and_not_trusted(path):
    machine = Machine(path.stat().st_ctime_ns - 3600 * SECOND)
    assert not seen(path, machine.kernel).trusted
    assert machine.slept_s == 0


@pytest.mark.parametrize("file_system", ["nfs4", "fuse.sshfs", "overlay", "tmpfs", "9p", ""])
def test_other_file_systems_are_not_trusted(path, file_system):
    assert not seen(path, Machine(1 << 62, file_system).kernel).trusted


def test_a_kernel_without_a_name_is_not_trusted(path):
    assert not seen(path, Machine(1 << 62, boot="").kernel).trusted


def test_what_cannot_be_synced_is_not_trusted(path, monkeypatch):
    def fails(fd):
        raise OSError

    monkeypatch.setattr(os, "fsync", fails)
    assert not seen(path, Machine(1 << 62).kernel).trusted


def test_an_untrusted_stat_is_described_by_its_size_alone(path):
    found = seen(path, Machine(1 << 62, "nfs").kernel)
    assert found.may_match(replace(found, inode=7, ctime_ns=7))
    assert not found.may_match(replace(found, size=7))
    assert not found.may_match(replace(found, trusted=True))
    sure = replace(found, trusted=True)
    assert sure.may_match(sure)
    for field in ("device", "inode", "size", "mtime_ns", "ctime_ns"):
        assert not sure.may_match(replace(sure, **{field: 7}))
    assert not sure.may_match(replace(sure, link=(0, 0, 0)))


# -- this machine's own kernel ---------------------------------------------------------------------


def test_this_kernel_has_a_name_and_dates_files_by_the_coarse_clock(path):
    assert boot_of_this_machine() == boot_of_this_machine() != ""
    before = coarse_ns()
    path.write_bytes(b"again")
    on_trusted(path)
    # Newer kernels give a finer time to a file that was looked at; never an earlier one.
    assert before <= path.stat().st_ctime_ns <= time.time_ns()


def test_a_write_that_restores_size_and_mtime_shows(path):
    on_trusted(path)
    for _ in range(20):  # however quick
        found = seen(path, here())
        kept = path.stat()
        with path.open("r+b") as file:
            file.write(b"X")
        os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
        again = seen(path, here())
        assert (again.size, again.mtime_ns) == (found.size, found.mtime_ns)
        assert not found.may_match(again)


def test_a_store_through_a_mapping_that_was_dirty_before_the_look_shows(path):
    """Without the sync it would not: the first store set the time, a second one does not."""
    on_trusted(path)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[0] = 65
        found = seen(path, here())
        mapped[1] = 66
        assert not found.may_match(seen(path, here()))


def test_a_link_that_leads_elsewhere_and_back_shows(path, tmp_path):
    on_trusted(path)
    other, link = tmp_path / "other", tmp_path / "link"
    other.write_bytes(b"9876543210")
    link.symlink_to(path)
    found = seen(link, here())
    for target in (other, path):
        spare = tmp_path / "spare"
        spare.symlink_to(target)
        spare.replace(link)
        assert not found.may_match(seen(link, here()))


def test_a_file_that_was_away_and_is_back_shows(path, tmp_path):
    on_trusted(path)
    found = seen(path, here())
    path.rename(tmp_path / "away")
    (tmp_path / "away").rename(path)
    assert not found.may_match(seen(path, here()))
