"""``stratakv verify``: on a model of somebody's own it says exact, or what differs, or why not."""

import json
import re
from dataclasses import replace

import pytest
import torch

from stratakv import cli
from stratakv.assembly import device
from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.model_facts import read_facts
from stratakv.engine.request import Failure
from stratakv.engine.verify.claims import compare
from stratakv.engine.verify.report import Way
from stratakv.engine.verify.rounding import compare_rounded
from stratakv.engine.verify.session import VerifyOutput
from stratakv.serve.verify_model import trial_shape
from stratakv.serve.verify_storage import check_store
from stratakv.spec.derive import spec_of
from stratakv.transfer.cpu import DEFAULT_COPIER, CpuTransferEngine
from tests.fixtures.models import tiny_model
from tests.meta.source import ROOT

SMALL = ("--page-tokens", "16", "--prompt-tokens", "60")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of models, by family; attention with windows, and a state."""
    found = {}
    for family in ("gemma3", "qwen3_next"):
        found[family] = tmp_path_factory.mktemp(family)
        tiny_model(family).save_pretrained(found[family])
    return found


def verified(directory, tmp_path, *flags):
    code = cli.main(["verify", str(directory), "--json", str(tmp_path / "found.json"), *flags])
    return code, json.loads((tmp_path / "found.json").read_text())


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_a_model_of_ones_own_is_exact_on_every_tier_and_path(family, saved, tmp_path, capsys):
    """In files of the least quota that is allowed."""
    store = f"file://{tmp_path / 'store'}?quota="
    assert cli.main(["verify", str(saved[family]), *SMALL, "--storage", f"{store}1"]) == 2
    least = re.search(r"allowed for quota is (\d+) bytes", capsys.readouterr().err)[1]
    code, found = verified(saved[family], tmp_path, *SMALL, "--storage", f"{store}{least}")
    out, err = capsys.readouterr()
    assert (code, found["exact"]) == (0, True), out
    ways = {(one["tier"], one["path"]): one for one in found["ways"]}
    assert len(ways) == len(Way)
    for tier in ("device", "host", "storage"):
        for path in ("decode", "chunked prefill", "batch"):
            way = ways[tier, path]
            assert way["verdict"] == "exact"
            assert way["deviation"] <= found["bound"] < 1e-3
            if path != "batch":
                assert way["saved_s"] == way["computed_s"] - way["hit_s"]
    assert 0 < found["batch_shapes_differ_by"] < found["bound"]
    assert "hit = recompute" in out.splitlines()[-1]
    assert f"{len(Way)} of {len(Way)}: {Way.RESTART.value}" in err


def test_the_demo_model_is_verified_in_the_dtype_that_it_is_saved_in(tmp_path, capsys):
    code, found = verified(ROOT / "models/demo", tmp_path, *SMALL, "--dtype", "auto")
    assert code == 0, capsys.readouterr().out
    assert found["dtype"] == "bfloat16"
    assert found["batch_shapes_differ_by"] > 1e-4, "rounding alone"


class Stale:
    """Loads another page in the place of the last one: no NaN shows it."""

    def gather(self, route, device, host):
        DEFAULT_COPIER.gather(route, device, host)

    def scatter(self, route, device, host):
        host = host.copy()
        host[-1:] = host[:1]
        DEFAULT_COPIER.scatter(route, device, host)


def test_a_wrong_cache_is_caught(saved, tmp_path, monkeypatch, capsys):
    def transfer(spec, pools, arenas):
        return CpuTransferEngine(spec, pools, arenas, Stale())

    monkeypatch.setattr(device, "CPU", replace(device.CPU, transfer=transfer))
    code, found = verified(saved["gemma3"], tmp_path, *SMALL)
    assert (code, found["exact"]) == (1, False)
    wrong = {(one["tier"], one["path"]) for one in found["ways"] if one["verdict"] == "differs"}
    for tier in ("host", "storage"):
        assert wrong >= {(tier, path) for path in ("decode", "chunked prefill", "batch")}
    assert ("none", "prefill") not in wrong
    out = capsys.readouterr().out
    assert "DIFFERS" in out
    assert "hit is NOT recompute" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--dtype int8", "--dtype int8: allowed are float32"),
        ("--page-tokens 0", "--page-tokens 0: allowed is 1 and more"),
        ("--prompt-tokens 20 --page-tokens 16", "--prompt-tokens 20: allowed are 48 to"),
        ("--page-tokens 4096", "allowed is"),
        ("--json /nowhere/x.json", "--json /nowhere/x.json: allowed is"),
        ("--storage nowhere://x", "--storage nowhere://x"),
        ("--storage memory://", "allowed is a store that outlives an engine"),
    ],
)
def test_what_cannot_be_verified_is_refused(flags, message, saved, capsys):
    assert cli.main(["verify", str(saved["gemma3"]), *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_store_that_has_pages_is_refused_and_left_alone(saved, tmp_path, capsys):
    page = tmp_path / "0000000000000001.seg"
    page.write_bytes(b"somebody's")
    assert cli.main(["verify", str(saved["gemma3"]), "--storage", f"file://{tmp_path}"]) == 2
    assert "allowed is a directory that is not there yet, or an empty" in capsys.readouterr().err
    assert [(one, one.read_bytes()) for one in tmp_path.iterdir()] == [(page, b"somebody's")]
    with pytest.raises(ConfigError, match="allowed is a directory"):
        check_store(f"file://{page}")
    (tmp_path / "empty").mkdir()
    for other in ("empty", "none/yet"):
        check_store(f"file://{tmp_path / other}")
    check_store("redis://localhost:6379/0")


def test_a_quota_below_the_pages_is_refused_before_the_model_is_loaded(saved, tmp_path, capsys):
    store = f"file://{tmp_path / 'store'}?quota="
    assert cli.main(["verify", str(saved["gemma3"]), *SMALL, "--storage", f"{store}4096"]) == 2
    err = capsys.readouterr().err
    assert "a quota of 4 KiB is too little" in err
    assert "loading" not in err
    assert not (tmp_path / "store").exists()


def test_a_directory_without_a_model_is_refused(tmp_path, capsys):
    assert cli.main(["verify", str(tmp_path)]) == 2
    assert "allowed is a directory with a Hugging Face config.json" in capsys.readouterr().err


def test_the_longest_prompt_goes_beyond_the_window(saved):
    config = read_facts(saved["gemma3"]).config
    spec = spec_of({**config, "sliding_window": 1024}, page_tokens=64, dtype="float32")
    assert max(trial_shape(spec, None, 1 << 20).lengths) > 1024 + 2 * 64
    assert max(trial_shape(spec, None, 1000).lengths) <= 750
    with pytest.raises(ConfigError, match=r"--page-tokens 64: .* allowed is"):
        trial_shape(spec, None, 200)


def output(tokens, logits, failure=None):
    return VerifyOutput(tuple(tokens), torch.tensor(logits), 0.0, None, failure)


def test_a_near_tie_ends_the_comparison_and_no_more():
    right = output((0, 1), [[1.0, 0.999], [0.2, 1.0]])
    tied = output((1, 0), [[0.999, 1.0], [1.0, 0.0]])
    assert compare(right, tied, 0.01)[0] == 0
    assert compare_rounded(right, tied, 0.01)[0] is None
    assert compare_rounded(right, tied, 0.0001)[0] == 0
    late = output((0, 1), [[1.0, 0.999], [0.5, 1.0]])
    assert compare_rounded(right, late, 0.01)[0] == 1
    broken = output((0,), [[1.0, 0.999]], Failure.NOT_FINITE)
    assert compare_rounded(right, broken, 0.01)[0] == 1
    nan = output((0, 1), [[float("nan"), 0.999], [0.2, 1.0]])
    assert compare_rounded(right, nan, 0.01)[0] == 0
