"""What ``make gpu`` does with its parts, without a GPU."""

import json
import re
import sys

import pytest

from scripts import gpu
from scripts.gpu import AGAIN, DONE, FAILED, LIMIT_S, NO_GPU, PARTS, Machine, Outcome, Part
from stratakv.testing.patience import PATIENCE_S

MACHINE = Machine("NVIDIA H100 80GB HBM3", "580.95.05", "81559 MiB", "abc1234")
TWO = (Part("one", ("run", "one")), Part("two", ("run", "two", "--json", "{figures}")))


class Runs:
    """``codes``: by part; each takes ``seconds`` of a clock that only they move."""

    def __init__(self, codes=(), seconds=1.0):
        self.codes, self.seconds = dict(codes), seconds
        self.ran, self.now, self.limits = [], 0.0, []

    def __call__(self, command, limit_s):
        name = command[1]
        self.ran.append(name)
        self.limits.append(limit_s)
        if self.seconds > limit_s:
            self.now += limit_s
            return Outcome(None, "")
        self.now += self.seconds
        if "--json" in command:
            with open(command[-1], "w") as file:
                json.dump({"GB/s": 1}, file)
        return Outcome(self.codes.get(name, 0), f"out of {name}")

    def call(self, results, parts=TWO):
        self.ran, self.limits, begin = [], [], self.now
        code = gpu.run_parts(MACHINE, results, self, lambda: self.now, parts)
        assert self.now - begin <= LIMIT_S
        return code


def record(results, name):
    (place,) = results.iterdir()
    return json.loads((place / f"{name}.json").read_text())


def test_each_part_is_written_down_with_what_it_ran_on(tmp_path):
    assert Runs().call(tmp_path) == DONE
    (place,) = tmp_path.iterdir()
    assert place.name == "nvidia-h100-80gb-hbm3-580.95.05-abc1234"
    assert sorted(file.name for file in place.iterdir()) == ["one.json", "two.json"]
    found = record(tmp_path, "two")
    assert (found["gpu"], found["driver"]) == (MACHINE.gpu, MACHINE.driver)
    assert (found["code"], found["figures"]) == (0, {"GB/s": 1})
    assert found["command"] == "run two --json {figures}"
    assert found["date"].endswith("+00:00")
    assert record(tmp_path, "one")["output"] == "out of one"


def test_what_is_done_is_skipped_and_what_failed_is_run_again(tmp_path):
    runs = Runs({"one": 1})
    assert runs.call(tmp_path) == FAILED
    assert runs.ran == ["one", "two"]
    runs.codes.clear()
    assert runs.call(tmp_path) == DONE
    assert runs.ran == ["one"]
    assert runs.call(tmp_path) == DONE
    assert runs.ran == []


def test_a_part_that_has_changed_since_is_run_again(tmp_path):
    runs = Runs()
    runs.call(tmp_path)
    assert runs.call(tmp_path, (Part("one", ("run", "one", "--more")), TWO[1])) == DONE
    assert runs.ran == ["one"]


def test_a_call_ends_in_time_and_the_next_one_goes_on(tmp_path):
    runs = Runs(seconds=LIMIT_S * 0.7)
    assert runs.call(tmp_path) == AGAIN
    assert runs.ran == ["one", "two"]
    assert runs.limits[1] == pytest.approx(LIMIT_S * 0.3)
    assert runs.call(tmp_path) == DONE
    assert runs.ran == ["two"]


def test_with_next_to_no_time_left_no_part_is_begun(tmp_path):
    runs = Runs(seconds=LIMIT_S - 5)
    assert runs.call(tmp_path) == AGAIN
    assert runs.ran == ["one"]


def test_a_record_that_was_cut_short_is_none(tmp_path):
    runs = Runs()
    runs.call(tmp_path)
    (place,) = tmp_path.iterdir()
    (place / "one.json").write_text("{")
    assert runs.call(tmp_path) == DONE
    assert runs.ran == ["one"]


def test_a_machine_is_known_by_what_it_says():
    printed = {
        "nvidia-smi": "NVIDIA A100-SXM4-80GB, 570.1, 81920 MiB\nNVIDIA A100-SXM4-80GB, 570.1, 8\n",
        "rev-parse": "abc1234\n",
        "status": "",
    }

    def ask(command):
        return next(text for word, text in printed.items() if word in command)

    assert gpu.machine_of(ask) == Machine("NVIDIA A100-SXM4-80GB", "570.1", "81920 MiB", "abc1234")
    printed["status"] = " M src\n"
    assert gpu.machine_of(ask).commit == "abc1234-changed"
    printed["nvidia-smi"] = None
    assert gpu.machine_of(ask) is None


def test_without_a_gpu_it_says_so_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "QUERY", ("no-such-program",))
    assert gpu.main() == NO_GPU
    assert capsys.readouterr().out.startswith("make gpu: no GPU here")


def test_tests_come_before_benches_and_each_is_there():
    names = [part.name for part in PARTS]
    assert names == sorted(names, key=lambda name: name.startswith("bench"))
    for part in PARTS:
        if part.name.startswith("tests"):
            assert (gpu.ROOT / part.command[-1]).is_file()
        else:
            assert part.command[2:] == (
                "stratakv", "bench", part.name.removeprefix("bench-"), "--device", "cuda",
                "--json", "{figures}",
            )  # fmt: skip


def test_when_time_is_up_what_a_part_has_started_ends_too(monkeypatch):
    """Its child holds the pipe: who killed the part alone would wait for the child."""
    child = "import time; time.sleep(600)"
    ask = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); "
    monkeypatch.setattr(gpu, "KILLED_S", PATIENCE_S)
    hangs = (sys.executable, "-c", ask + "print('begun', flush=True); " + child)
    found = gpu.run_command(hangs, 3.0)
    assert found == Outcome(None, "begun\n")


def test_each_class_of_kernels_is_a_part_of_its_own():
    source = (gpu.ROOT / "tests/gpu/test_gpu_kernels.py").read_text()
    classes = re.findall(r"^class (\w+)", source, re.MULTILINE)
    some = [part.command for part in PARTS if part.name.startswith("tests-kernels")]
    assert sorted(words[words.index("-k") + 1] for words in some) == sorted(classes)
    assert not any(one in other for one in classes for other in classes if one != other)
