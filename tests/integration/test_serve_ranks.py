"""``stratakv serve --tp N`` as processes: what it answers, what it leaves in a store, and how all
ranks end when one does.
"""

import os
import shutil
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from stratakv.cli import main
from stratakv.storage.file.fsck import FsckReport, fsck
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.fixtures.models import random_prompt, tiny_model
from tests.fixtures.servers import free_port
from tests.parallel_models import build
from tests.rank_processes import (
    FLAGS,
    SILENCE_S,
    Listening,
    Ranked,
    launched,
    started,
    streaming,
)
from tests.serving import train_tokenizer

PROMPTS = [random_prompt(seed, 100) for seed in range(3)]
LONG = random_prompt(9, 30)
END = 96
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = train_tokenizer(tmp_path_factory.mktemp("model"))
    build("llama", num_attention_heads=8, num_key_value_heads=8).save_pretrained(path)
    return path


def serve(model: Path, ranks: int, *more: object) -> list[object]:
    return ["serve", model, *FLAGS, *(("--tp", ranks) if ranks > 1 else ()), *more]


def in_store(store: Path) -> tuple[object, ...]:
    return "--storage", f"file://{store}?quota=32MiB", "--admin-key", "k"


@dataclass
class Story:
    """Two ranks with a store, beside one without; then rank 0 of the two is killed."""

    store: Path
    alone: list[str]
    ranked: list[str]
    table: str
    code: int
    log: str
    report: FsckReport
    scores: list[list[float]]


@pytest.fixture(scope="module")
def story(model, tmp_path_factory) -> Story:
    folder = tmp_path_factory.mktemp("story")
    store = folder / "store"
    store.mkdir()
    with ExitStack() as both:
        two = both.enter_context(started(serve(model, 2, *in_store(store)), folder / "two"))
        one = both.enter_context(launched([serve(model, 1)], folder))
        two.listen()
        one.listen()
        alone = [one.ask(prompt)[0] for prompt in PROMPTS]
        ranked = [two.ask(prompt)[0] for prompt in PROMPTS]
        scores = [_scores(server) for server in (two, one)]
        wait_until(two.stored)
        with streaming(two, LONG, 900) as lines:
            two.process.kill()
            with pytest.raises(httpx.HTTPError):
                list(lines)
        code = two.ends()
        log = two.logged()
    return Story(store, alone, ranked, "".join(two.before), code, log, fsck(store), scores)


def _scores(server: Listening) -> list[float]:
    """Log-probabilities of the tokens of a prompt that is cached."""
    asked = {"prompt": PROMPTS[0], "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S).json()
    (first, *rest) = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert first is None
    assert len(rest) == len(PROMPTS[0]) - 1
    return rest


def test_two_ranks_say_what_one_says(story):
    assert story.ranked == story.alone


def test_two_ranks_score_a_prompt_as_one_does(story):
    ranked, alone = story.scores
    assert ranked == pytest.approx(alone, abs=1e-4)


def test_a_plan_shows_the_table_of_a_rank(story, model, capsys):
    sizing = FLAGS[2 : FLAGS.index("--threads")]
    assert main(["plan", "bytes", str(model), *sizing, "--tp", "2"]) == 0
    assert story.table
    assert story.table in capsys.readouterr().out


def test_a_follower_ends_when_rank_0_is_killed(story):
    """``story`` has seen it end."""
    assert story.code == -signal.SIGKILL
    assert "rank 1 waits for another rank, which has ended" in story.log or (
        "a rank was lost in a step of the model" in story.log
    )
    assert "Traceback" not in story.log


def test_a_kill_leaves_no_damage_in_the_store(story):
    assert story.report.clean, story.report


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(count, marks=pytest.mark.long) for count in (1, 4))]
)
def test_the_next_server_finds_what_two_ranks_have_stored(ranks, story, model, tmp_path):
    """And then changes it while it runs, ends well, or is robbed of a rank."""
    more = in_store(story.store) + (() if ranks > 1 else ("--storage-shards", 8))
    with started(serve(model, ranks, *more), tmp_path / "log") as server:
        server.listen()
        for prompt, wanted in zip(PROMPTS, story.alone, strict=True):
            assert server.ask(prompt) == (wanted, END)
        if ranks == 2:
            _attach_again(server, more[1])
            assert server.ask(PROMPTS[0]) == (story.alone[0], END)
            _rob(server)
        else:
            _drain(server)
    assert fsck(story.store).clean


def _attach_again(server: Ranked, url: str) -> None:
    """All ranks let go of a store, refuse others, and attach it again, with nothing in the tree."""
    dead = f"redis://:secret@127.0.0.1:{free_port()}/0"
    with httpx.Client(headers={"Authorization": "Bearer k"}, timeout=PATIENCE_S) as http:
        storage = server.url + "/cache/storage"
        assert http.delete(storage).json()["url"] == url
        for other, status, code in (
            (dead, 502, "storage_unreachable"),
            ("memory://", 400, "invalid_value"),
            ("file://relative", 400, "invalid_value"),
            ("file:///etc", 400, "invalid_value"),
        ):
            refused = http.put(storage, json={"url": other})
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
            assert "secret" not in refused.text
            assert http.get(storage).json() == {"attached": False}
        assert http.post(server.url + "/flush_cache").status_code == 200
        assert http.put(storage, json={"url": url}).json() == {"attached": True, "url": url}
        again = http.put(storage, json={"url": url})
        assert again.json()["error"]["code"] == "storage_attached"


def _drain(server: Ranked) -> None:
    with streaming(server, LONG, 300) as lines:
        server.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.ends() == 0, server.logged()
    assert not (set(server.logged().split()) & {"ERROR", "WARNING", "Traceback"}), server.logged()


def _rob(server: Ranked) -> None:
    with streaming(server, LONG, 900) as lines:
        os.kill(server.followers()[-1], signal.SIGKILL)
        assert "engine_failed" in "".join(lines)
    assert server.ends() == 1, server.logged()
    log = server.logged()
    assert "has ended: killed by SIGKILL" in log
    assert log.count("the engine has ended: ") == 1
    assert "Traceback" not in log


@pytest.mark.long
def test_a_rank_that_hangs_is_lost_after_the_time_limit(model, tmp_path):
    with started(serve(model, 2, "--tp-timeout", SILENCE_S), tmp_path / "log") as server:
        server.listen()
        with streaming(server, LONG, 900) as lines:
            (follower,) = server.followers()
            os.kill(follower, signal.SIGSTOP)
            assert "engine_failed" in "".join(lines)
        assert server.ends() == 1
        log = server.logged()
    assert "did not end within 10 s and is killed" in log
    assert "Traceback" not in log


def test_a_follower_that_dies_before_it_is_ready_ends_the_start(model, tmp_path):
    with started(serve(model, 2), tmp_path / "log") as server:
        os.kill(server.first_follower(), signal.SIGKILL)
        assert server.ends() == 1
        log = server.logged()
    assert "rank 1 of 2 has ended: killed by SIGKILL" in log
    assert "Traceback" not in log


@pytest.mark.long
def test_a_follower_does_not_wait_for_a_rank_0_that_died_before_it_was_ready(model, tmp_path):
    with started(serve(model, 2), tmp_path / "log") as server:
        server.first_follower()
        server.process.kill()
        assert server.ends() == -signal.SIGKILL
        assert "Traceback" not in server.logged()


@pytest.mark.long  # `test_ranks_end` has torchrun with another end
def test_torchrun_starts_the_ranks(model, story, tmp_path):
    command = (*TORCHRUN, "--master-port", free_port(), "-m", "stratakv")
    with started(serve(model, 2), tmp_path / "log", command) as server:
        server.listen()
        assert server.ask(PROMPTS[0])[0] == story.alone[0]
        assert "".join(server.before) == story.table
        mine = {pid for pid in server.alive() if pid != server.process.pid}
        (leader,) = mine - set(server.followers())
        os.kill(leader, signal.SIGTERM)
        assert server.ends() == 0, server.logged()


# -- refusals: nothing is started ------------------------------------------------------------------


def test_pages_of_ranks_are_not_missed_by_one_that_cuts_otherwise(model, story, capsys):
    assert main([*map(str, serve(model, 1, *in_store(story.store)))]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        f"stratakv: --storage {in_store(story.store)[1]}: pages of this model are there in slices "
        "of --storage-shards 8, which a server with --storage-shards 1 would never find; allowed "
        "is --storage-shards 8"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tp 0", "--tp 0: allowed is 1 and more"),
        ("--tp 2 --storage memory://", "--storage memory://: it is one process's own, and --tp 2"),
        ("--tp 2 --lora a=b", "--tp 2: adapters are not sharded"),
        ("--tp 2 --storage-shards 3", "--storage-shards 3: allowed are multiples of --tp 2"),
        ("--tp 2 --tp-timeout 0", "--tp-timeout 0.0: allowed are finite seconds from 1 up"),
        ("--tp 2 --tp-timeout nan", "--tp-timeout nan: allowed are finite seconds from 1 up"),
        ("--tp-timeout 5", "--tp-timeout: allowed with --tp 2 and more"),
    ],
)
def test_flags_are_refused_before_a_rank_is_started(model, nothing_starts, flags, message, capsys):
    assert main(["serve", str(model), *FLAGS, *flags.split()]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"stratakv: {message}"), error


def test_a_family_that_cannot_be_split_is_refused_with_the_reason(tmp_path, nothing_starts, capsys):
    tiny_model("gpt2").save_pretrained(train_tokenizer(tmp_path))
    assert main(["serve", str(tmp_path), *FLAGS, "--tp", "2"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        "stratakv: --tp 2: Hugging Face has no plan that splits the layers of model type 'gpt2'; "
        "docs/families.md has those with which more than 1 is allowed"
    )


def test_checkpoints_that_differ_in_one_row_share_no_page_over_ranks(model, tmp_path):
    """Each rank has a part of the weights; the names of its pages come from all of them."""
    other, store = tmp_path / "other", tmp_path / "store"
    store.mkdir()
    shutil.copytree(model, other)
    tensors = load_file(other / "model.safetensors")
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[embedding][PROMPTS[0][0]] += 0.5
    save_file(tensors, other / "model.safetensors", {"format": "pt"})

    def hits_of(path: Path, at: int) -> int:
        (folder := tmp_path / f"start {at}").mkdir()
        with launched([serve(path, 2, *in_store(store))] * 2, folder) as ranks:
            ranks.listen()
            _, from_storage = ranks.ask(PROMPTS[0])
            if not from_storage:
                wait_until(ranks.stored)
            return from_storage

    starts = [model, other, model, other]
    assert [hits_of(path, at) for at, path in enumerate(starts)] == [0, 0, END, END]
