"""What of installed packages and of the processor is in a name."""

import json
import os

import pytest

from stratakv.connect import whole_settings
from stratakv.connect.installed_code import installed_fields, package_fields, processor_fields
from stratakv.core.errors import ConfigError


class Package:
    """An installed package. ``digest``: of its one file."""

    def __init__(self, name, version, digest, **texts):
        self.name, self.version = name, version
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


def test_the_first_of_a_name_is_the_one_that_is_imported():
    first, second = Package("Some_Plugin", "1", "a"), Package("some-plugin", "2", "b")
    assert package_fields([first, second]) == {"package some-plugin": field(first)}


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
