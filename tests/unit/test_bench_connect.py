"""``bench connect`` without an engine: a program in its place answers as one would, and what is
made of its answers is right."""

import json
import os
import sys

import pytest

from stratakv.bench.connect import EnginePython
from stratakv.bench.connect_lives import (
    SHARED_TOKENS,
    Life,
    cpu_s,
    disk_bytes,
    measure,
    prompt,
    wait_until_quiet,
    warm_up,
    written_bytes,
)
from stratakv.cli import main

ENGINE = f"""#!{sys.executable}
import json, sys
from pathlib import Path
if sys.argv[1] == "-c":
    print("0.32.0" if "vllm" in sys.argv else "")
    sys.exit()
given = json.loads(Path(sys.argv[3]).read_text())
if "family" in given:
    sys.exit()
if given["alone"]:
    calls = {{tier: {{"store": [[a, a]] * 3, "read": [[b, b / 2]] * 3}}
             for tier, a, b in (("strata", 1.0, 1.0), ("own", 3.0, 4.0))}}
    Path(sys.argv[4]).write_text(json.dumps(calls))
    sys.exit()
ours, full = given["tier"] == "strata", given["quota_bytes"]
with open(Path(__file__).with_name("lives"), "a") as log:
    print(given["tier"], full, *given["prompts"], file=log)
root = Path(given["directory"])
again = root.exists()
root.mkdir(exist_ok=True)
cached = 0 if not again else 512 if ours else 1024
Path(sys.argv[4]).write_text(json.dumps({{
    "first_token_s": [(0.5 if ours else 1.0) * (1 + at) for at in range(8)],
    "cached": [cached] * 8, "answer_cpu_s": 1.0 if ours else 4.0,
    "written_s": 1.0 if ours else 4.0, "written_bytes": 100 if ours else 400,
    "cpu_s": 3.0 if ours else 4.0,
    "disk_bytes": full if ours and full else 1000,
}}))
"""


@pytest.fixture
def engine(tmp_path):
    program = tmp_path / "python"
    program.write_text(ENGINE)
    program.chmod(0o755)
    (tmp_path / "config.json").write_text("{}")
    return program


def measured(engine, tmp_path, *flags, ends=0):
    figures = tmp_path / "figures.json"
    code = main(["bench", "connect", "--python", str(engine), "--json", str(figures), *flags])
    assert code == ends
    return json.loads(figures.read_text())


def test_ratios_are_ours_to_theirs_and_a_lost_hit_counts(engine, tmp_path, capsys):
    figures = measured(engine, tmp_path, "--model", str(tmp_path))
    assert figures["engines"] == {"vllm": "0.32.0"}
    assert not figures["interrupted"]
    (case,) = figures["cases"]
    assert (case["engine"], case["model"]) == ("vllm", tmp_path.name)
    assert (case["ttft_ratio"], case["store_ratio"], case["bytes_ratio"]) == (0.5, 4.0, 0.25)
    assert (case["store_cpu_ratio"], case["hit_cpu_ratio"]) == (0.75, 0.25)
    assert case["hits_lost"] == 2 * 8 * 512
    assert "restart hit" in capsys.readouterr().out


def test_tiers_take_turns_and_then_get_half_of_what_they_would_write(engine, tmp_path):
    (case,) = measured(engine, tmp_path, "--model", str(tmp_path))["cases"]
    lives = [line.split() for line in (tmp_path / "lives").read_text().splitlines()]
    tiers = [life[0] for life in lives]
    assert len(lives) == 2 * 4 + 4
    assert tiers[0] != tiers[4]
    assert {life[1] for life in lives[:8]} == {"0"}
    assert {life[1] for life in lives[8:]} == {"200"}
    assert lives[-1][2:] == [str(seed) for seed in range(7, -1, -1)]
    assert (case["quota_bytes"], case["ours_full"]["disk_bytes"]) == (200, 200)
    assert case["theirs_full"]["disk_bytes"] == 1000


@pytest.mark.parametrize(("lives", "rounds"), [(5, 1), (9, 2)])
def test_what_was_measured_before_ctrl_c_is_kept(
    engine, tmp_path, monkeypatch, capsys, lives, rounds
):
    interrupt_after(lives, monkeypatch)
    figures = measured(engine, tmp_path, "--model", str(tmp_path), ends=130)
    shown = capsys.readouterr().out
    assert figures["interrupted"]
    (case,) = figures["cases"]
    assert (case["rounds"], case["ttft_ratio"], case["ours_full"]) == (rounds, 0.5, None)
    assert shown.count("ours stores 8,208 tokens a second") == 2
    assert "0.50" in shown


def test_ctrl_c_before_there_is_a_ratio_is_an_end_without_one(
    engine, tmp_path, monkeypatch, capsys
):
    interrupt_after(3, monkeypatch)
    assert measured(engine, tmp_path, "--model", str(tmp_path), ends=130)["cases"] == []
    assert "theirs has the first token of a restart hit after" in capsys.readouterr().out


def interrupt_after(lives, monkeypatch):
    asked, call = [], EnginePython.call

    def interrupted(self, name, given):
        asked.append(given)
        if len(asked) > lives:
            raise KeyboardInterrupt
        return call(self, name, given)

    monkeypatch.setattr(EnginePython, "call", interrupted)


def test_back_ends_that_work_without_an_engine_are_measured_alone_too(engine, tmp_path, capsys):
    engine.write_text(ENGINE.replace('if "vllm" in sys.argv', "if True"))
    flags = ["--engine", "sglang", "--model", str(tmp_path)]
    (case,) = measured(engine, tmp_path, *flags)["cases"]
    assert case["alone"] == {
        "store_ratio": 3.0, "store_cpu_ratio": 3.0, "read_ratio": 0.25, "read_cpu_ratio": 0.25,
    }  # fmt: skip
    assert "ours stores 3.00 times as fast" in capsys.readouterr().out
    (other,) = measured(engine, tmp_path, "--engine", "vllm", "--model", str(tmp_path))["cases"]
    assert other["alone"] is None


def test_the_built_in_models_are_those_of_the_engine(engine, tmp_path):
    cases = measured(engine, tmp_path, "--engine", "vllm")["cases"]
    assert [case["model"] for case in cases] == ["llama", "gemma3"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--engine", "trt"], "--engine trt: allowed are vllm, sglang"),
        (["--engine", "sglang"], "sglang not installed; allowed"),
        (["--stand-ins", "/nowhere"], "--stand-ins /nowhere: allowed"),
    ],
)
def test_what_cannot_be_measured_is_refused(engine, flags, words, capsys):
    assert main(["bench", "connect", "--python", str(engine), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_life_that_fails_is_shown_with_its_last_words(engine, tmp_path, capsys):
    engine.write_text(ENGINE.replace("ours, full", "sys.exit('no GPU')\nours, full"))
    line = ["bench", "connect", "--python", str(engine), "--model", str(tmp_path)]
    assert main(line) == 2
    assert "no GPU" in capsys.readouterr().err


def test_prompts_begin_alike_and_a_warm_up_never_comes_back():
    one, other = prompt(0, 600), prompt(1, 600)
    assert one == prompt(0, 600)
    assert one[:SHARED_TOKENS] == other[:SHARED_TOKENS]
    assert one[SHARED_TOKENS:] != other[SHARED_TOKENS:]
    assert warm_up() != warm_up()


def test_a_life_is_measured_from_its_first_prompt_to_its_last_page(tmp_path):
    (tmp_path / "page").write_bytes(b"x" * 5000)
    life = Life(
        engine="vllm", model="m", tier="own", directory=str(tmp_path), quota_bytes=0,
        prompts=(3, 1), prompt_tokens=600, stand_ins=True,
    )  # fmt: skip
    events = []

    def answer(tokens):
        events.append(tokens)
        return len(events)

    def settle(since_s):
        events.append(since_s)
        return 7.0

    lived = measure(life, answer, settle)
    assert [prompt(3, 600), prompt(1, 600)] == events[2:4]
    assert len(events) == 5
    assert events[1] <= events[4]
    assert (lived.cached, lived.written_s) == ((3, 4), 7.0)
    assert len(lived.first_token_s) == 2
    assert lived.cpu_s >= lived.answer_cpu_s >= 0
    assert lived.disk_bytes >= 5000


def test_processors_are_counted():
    before = cpu_s()
    while cpu_s() == before:
        sum(range(100_000))


def test_what_a_directory_takes_and_when_its_last_page_was_written(tmp_path):
    before = written_bytes()
    page = tmp_path / "page"
    page.write_bytes(b"x" * (1 << 20))
    with page.open("rb+") as file:
        os.fsync(file.fileno())
    os.utime(page, (1000.0, 1000.0))
    (tmp_path / "note").write_text("later")
    assert wait_until_quiet(tmp_path, 900.0) == 100.0
    assert disk_bytes(tmp_path) >= 1 << 20
    assert written_bytes() >= before
