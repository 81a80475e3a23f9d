"""What of installed packages and of the processor is in a name."""

import json
import os
from importlib.metadata import distributions

import pytest

from stratakv.connect import whole_settings
from stratakv.connect.installed_code import (
    installed_fields,
    package_fields,
    processor_fields,
    usable_cores,
)
from stratakv.core.errors import ConfigError


class Package:
    """An installed package. ``digest``: of its one file."""

    def __init__(self, name, version, digest, **texts):
        self.name, self.metadata = name, {"Name": name, "Version": version}
        self.texts = {"RECORD": f"{name}/a.py,sha256={digest},1\n"} | texts

    def read_text(self, name):
        return self.texts.get(name)


def field(package):
    (found,) = package_fields([package]).values()
    return found


def edited(directory, **texts):
    origin = {"url": directory.as_uri(), "dir_info": {"editable": True}}
    return Package("own", "1", "a", **{"direct_url.json": json.dumps(origin)})


def test_a_package_is_its_release_and_its_files():
    first = field(Package("torch", "2", "a"))
    assert field(Package("torch", "2", "a")) == first
    assert field(Package("torch", "3", "a")) != first
    assert field(Package("torch", "2", "b")) != first
    assert field(Package("torch", "2", "a", RECORD=None)) == "2"


def test_where_an_environment_lies_and_who_made_it_does_not_count():
    record = "torch/a.py,sha256=a,1\n"
    noise = "../../bin/torchrun,sha256=x,1\ntorch-2.dist-info/INSTALLER,sha256=x,1\ntorch/a.pyc,,\n"
    assert field(Package("torch", "2", "a")) == field(
        Package("torch", "2", "a", RECORD=noise + record)
    )


def test_each_of_a_name_counts_in_the_order_in_which_they_are_found(tmp_path):
    """pip may leave an old one behind, which is found before the one that is imported."""
    first, second = Package("Some_Plugin", "1", "a"), Package("some-plugin", "2", "b")
    (both,) = package_fields([first, second]).values()
    assert both == f"{field(first)}, {field(second)}"
    assert package_fields([second, first]) != package_fields([first, second])


def test_what_pip_has_left_behind_without_a_name_is_no_package(tmp_path):
    (tmp_path / "~orch-2.dist-info").mkdir()
    (tmp_path / "plugin-1.dist-info").mkdir()
    (tmp_path / "plugin-1.dist-info" / "METADATA").write_text("Name: plugin\n")
    found = package_fields(distributions(path=[str(tmp_path)]))
    assert {name: text.strip() for name, text in found.items()} == {"package plugin": ""}


def test_what_no_forward_calls_does_not_count():
    assert package_fields([Package("stratakv", "1", "a"), Package("uvicorn", "1", "a")]) == {}


def change(directory):
    (directory / "own" / "a.py").write_text("longer")


def add(directory):
    (directory / "own" / "b.py").touch()


def same_size(directory):
    (directory / "own" / "a.py").write_text("b")
    os.utime(directory / "own" / "a.py", ns=(1, 1))


@pytest.mark.parametrize("act", [change, add, same_size])
def test_an_edited_package_is_its_files_as_they_are(tmp_path, act):
    where = tmp_path / "with space"
    (where / "own").mkdir(parents=True)
    (where / "own" / "a.py").write_text("a")
    first = field(edited(where))
    (where / ".git").mkdir()
    (where / ".git" / "HEAD").touch()
    (where / "own" / "__pycache__").mkdir()
    (where / "own" / "__pycache__" / "a.pyc").touch()
    assert field(edited(where)) == first
    act(where)
    assert field(edited(where)) != first


COUNTED = (
    "own/a.so", "own/lib.so.1", "own/kernel.cu", "own/kernel.cuh", "own/b.cpp", "own/b.h",
    "own/table.json", "own/template.jinja", "own/tests/helper.py", "own/build/kernel.py",
    "build/cp311/own.so", "setup.py",
)  # fmt: skip
PASSED_OVER = (
    "README.md", "own/run.log", "own/__pycache__/b.pyc", "build/lib/own/a.py", "dist/own.py",
    "tests/test_a.py", "docs/conf.py", "own.egg-info/x.json", ".git/x.py", "own/.a.py.swp.py",
    "empty/nothing",
)  # fmt: skip


@pytest.mark.parametrize("counts", [True, False])
def test_an_edited_package_is_what_computes_of_it(tmp_path, counts):
    (tmp_path / "own").mkdir()
    first = field(edited(tmp_path))
    for path in COUNTED if counts else PASSED_OVER:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
        second, first = first, field(edited(tmp_path))
        assert (first != second) is counts, path


def test_where_a_link_in_an_edited_package_leads_counts(tmp_path):
    """Also where the directory that it leads to was seen before."""
    for one in ("one", "two"):
        (tmp_path / one).mkdir()
        (tmp_path / one / "a.py").touch()
    (tmp_path / "used").symlink_to("one")
    first = field(edited(tmp_path))
    (tmp_path / "used").unlink()
    (tmp_path / "used").symlink_to("two")
    assert field(edited(tmp_path)) != first


def test_an_edited_package_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_settings, "MOST_FILES", 1)
    for name in ("a.py", "b.py"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"package own .*more than 1 files.*allowed is"):
        field(edited(tmp_path))


CPU = """processor\t: 0
model name\t: One
cpu MHz\t\t: 2596.128
flags\t\t: avx2 avx512f

processor\t: 1
model name\t: One
cpu MHz\t\t: 1200.000
flags\t\t: avx2 avx512f
"""


def test_a_processor_is_what_libraries_choose_kernels_by():
    first = processor_fields(CPU, 2)
    assert processor_fields(CPU.replace("2596", "2600"), 2) == first
    assert processor_fields(CPU.replace("avx512f", "amx"), 2) != first
    assert processor_fields(CPU.replace("One", "Two"), 2) != first
    assert processor_fields(CPU, 4) != first


def test_the_processor_counts_where_it_computes():
    assert "processor" in installed_fields([])
    assert "processor" in installed_fields(["cpu"])
    assert "processor" not in installed_fields(["NVIDIA H100"])
    assert installed_fields(["NVIDIA H100"]) != installed_fields(["NVIDIA H200"])


def test_a_system_that_does_not_say_where_a_process_may_run_has_all_cores(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_cores() == 3
    assert "3 cores" in installed_fields([])["processor"]
