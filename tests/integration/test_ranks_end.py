"""How ranks end where something is wrong: one is broken, gone or silent, a launcher must stop,
flags do not fit. Real processes; exit codes, words that name who and why.
"""

import os
import shutil
import signal
import socket
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stratakv.agreement.torch_ranks import join
from stratakv.cli import main
from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.model import load_model
from stratakv.storage.file.fsck import fsck
from stratakv.testing.patience import PATIENCE_S
from tests.fixtures.models import random_prompt, save_without_dtype
from tests.fixtures.servers import free_port
from tests.parallel_models import build
from tests.rank_processes import FLAGS, SILENCE_S, launched, started, streaming
from tests.serving import train_tokenizer

PROMPT = random_prompt(9, 60)
LOST = ("waits for another rank", "a rank was lost in a step of the model")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = train_tokenizer(tmp_path_factory.mktemp("model"))
    build("llama", num_attention_heads=8, num_key_value_heads=8).save_pretrained(path)
    return path


def serve(model: Path, ranks: int, *more: object) -> list[object]:
    return ["serve", model, *FLAGS, "--tp", ranks, *more]


# -- a launcher, a terminal ------------------------------------------------------------------------


def test_torchrun_that_is_stopped_lets_ranks_finish(model, tmp_path):
    """Its own exit code is 1 after any signal. It kills who has not ended within 30 s, if nobody
    gives them longer."""
    (store := tmp_path / "store").mkdir()
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    limit = ("--shutdown-timeout", int(PATIENCE_S))
    command = (*torchrun, *limit, "--master-port", free_port(), "-m", "stratakv")
    stored = f"file://{store}?quota=32MiB"
    words = serve(model, 2, "--storage", stored, "--drain-s", PATIENCE_S)
    with started(words, tmp_path / "log", command) as server:
        server.listen()
        with streaming(server, PROMPT, 100) as lines:
            server.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.ends() == 1
        log = server.logged()
    assert "SIGTERM: draining" in log
    assert "ERROR" not in log
    assert "forcefully" not in log
    found = fsck(store)
    assert found.clean
    assert found.pages > 1


def test_ctrl_c_ends_ranks_that_start(model, tmp_path):
    """Rank 0 waits for its follower then, which is still importing, or is about to say that it
    does: the words of its end may stand before that."""
    with started(serve(model, 2), tmp_path / "log", in_terminal=True) as server:
        server.first_follower()
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.ends() == 130
        lines = server.logged().splitlines()
        lines.remove("stratakv: interrupted")
        assert all(" INFO stratakv." in line for line in lines), lines


# -- a rank that is lost ---------------------------------------------------------------------------


def test_a_rank_that_is_killed_ends_the_others(model, tmp_path):
    with launched([serve(model, 3)] * 3, tmp_path) as ranks:
        ranks.listen()
        with streaming(ranks, PROMPT, 600) as lines:
            ranks.processes[2].kill()
            assert "engine_failed" in "".join(lines)
        for rank in (0, 1):
            assert ranks.ends(rank) == 1, ranks.all_logged()
            assert any(reason in ranks.logged(rank) for reason in LOST), ranks.logged(rank)
        assert "Traceback" not in ranks.all_logged()


def test_a_rank_that_hangs_ends_the_others_in_time(model, tmp_path):
    with launched([serve(model, 2, "--tp-timeout", SILENCE_S)] * 2, tmp_path) as ranks:
        ranks.listen()
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        assert ranks.ends(0) == 1, ranks.all_logged()
        assert f"has not answered within {SILENCE_S} s" in ranks.logged(0)
        assert "Traceback" not in ranks.logged(0)


# -- a rank that cannot start ----------------------------------------------------------------------


def _no_model(path: Path) -> None:
    (path / "config.json").unlink()


def _half_its_weights(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def _lacks_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors.pop(min(tensors))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("breaks", "reason", "bad"),
    [
        (_no_model, "allowed is a directory with a Hugging Face config.json", 0),
        (_no_model, "allowed is a directory with a Hugging Face config.json", 1),
        (_half_its_weights, "not a causal LM that loads", 1),
        (_lacks_a_tensor, "not a whole causal LM", 0),
        (_lacks_a_tensor, "not a whole causal LM", 1),
    ],
)
def test_what_one_rank_lacks_ends_all(model, tmp_path, breaks, reason, bad):
    theirs = tmp_path / "theirs"
    shutil.copytree(model, theirs)
    breaks(theirs)
    paths = [theirs if rank == bad else model for rank in range(2)]
    with launched([serve(path, 2) for path in paths], tmp_path) as ranks:
        assert ranks.ends(bad) == 2, ranks.all_logged()
        assert ranks.ends(1 - bad) == 2, ranks.all_logged()
        assert f"rank {bad} of 2 cannot start" in ranks.logged(bad)
        assert reason in ranks.last_words(bad)
        last = ranks.last_words(1 - bad)
        assert last.startswith(f"stratakv: rank {bad}: MODEL {theirs}: {reason}")
        assert "Traceback" not in ranks.all_logged()


def test_a_dtype_that_only_the_weights_say_has_to_be_named(tmp_path):
    """Each rank has been sized together with the others by then."""
    path = train_tokenizer(tmp_path / "model")
    model = build("llama", num_attention_heads=8, num_key_value_heads=8).to(torch.bfloat16)
    save_without_dtype(model, path)
    with launched([serve(path, 2, "--dtype", "auto")] * 2, tmp_path) as ranks:
        for rank in range(2):
            assert ranks.ends(rank) == 2, ranks.all_logged()
            last = ranks.last_words(rank)
            assert last.endswith("allowed with --storage and --tp is --dtype bfloat16")


def test_a_byte_that_one_rank_has_otherwise_ends_all(model, tmp_path):
    theirs = tmp_path / "theirs"
    shutil.copytree(model, theirs)
    file = theirs / "model.safetensors"
    with file.open("r+b") as weights:
        weights.seek(file.stat().st_size // 2)
        (byte,) = weights.read(1)
        weights.seek(-1, 1)
        weights.write(bytes([byte ^ 1]))
    with launched([serve(path, 2) for path in (model, theirs)], tmp_path) as ranks:
        for rank in range(2):
            assert ranks.ends(rank) == 2, ranks.all_logged()
            last = ranks.last_words(rank)
            assert last.startswith("stratakv: rank 0 has weights: ")
            assert last.endswith("; all must agree")


def test_ranks_with_other_flags_are_refused_on_each(model, tmp_path):
    words = [serve(model, 2, "--load-back-threshold", 100 + rank) for rank in range(2)]
    with launched(words, tmp_path) as ranks:
        for rank in range(2):
            assert ranks.ends(rank) == 2, ranks.all_logged()
            assert ranks.last_words(rank) == (
                "stratakv: rank 0 has --load-back-threshold: 100, "
                "rank 1 has --load-back-threshold: 101; all must agree"
            )


# -- refusals: nothing is started ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "rank", "size", "message"),
    [
        (1, "1", "2", "--tp 1: the launcher has started 2 ranks; allowed is --tp 2"),
        (2, "0", "1", "--tp 2: the launcher has started 1 ranks; allowed is --tp 1"),
        (2, "2", "2", "RANK=2 WORLD_SIZE=2: allowed are"),
        (2, "", "2", "RANK= WORLD_SIZE=2: allowed are"),
        (2, "0", "2", "RANK and WORLD_SIZE are set, MASTER_ADDR and MASTER_PORT are not"),
    ],
)
def test_a_launcher_that_does_not_fit_is_refused(
    model, nothing_starts, monkeypatch, capsys, ranks, rank, size, message
):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    assert main([str(word) for word in serve(model, ranks)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"stratakv: {message}")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{}", "env://"])
def test_a_port_that_is_taken_is_named(monkeypatch, address):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(
            ConfigError, match=rf"cannot meet at .*{port}, .*allowed is a free port"
        ):
            join(0, 2, address.format(port), 5.0)


@pytest.fixture
def accelerator(monkeypatch):
    def seen(*, check_available=False):
        del check_available
        return torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", seen)


@pytest.mark.usefixtures("accelerator")
def test_an_accelerator_in_sight_is_refused_before_a_rank_is_started(model, nothing_starts, capsys):
    assert main([str(word) for word in serve(model, 2)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("stratakv: --tp 2: ranks would load their weights to cuda")
    assert "CUDA_VISIBLE_DEVICES=" in line


@pytest.mark.usefixtures("accelerator")
def test_an_accelerator_in_sight_is_refused_before_weights_are_read(model):
    with pytest.raises(ConfigError, match=r"^--tp 2: ranks would load their weights to cuda"):
        load_model(model, "float32", ranks=2)
