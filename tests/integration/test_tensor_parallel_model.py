"""One rank's share of a model on its share of the cache: all ranks say what the whole model says.

Prompts in chunks, joins and decode in one batch, on pages in random order, everything that no
request owns NaN. The answers are those of Hugging Face's own cache in one process.
"""

import os
import signal
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist

from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.model import load_model
from stratakv.engine.huggingface.model_facts import facts_of
from stratakv.engine.huggingface.parallel import tp_refusal
from stratakv.spec.families import COMPOSITES
from stratakv.spec.sharding import NOT_SPLIT
from tests.fixtures.bounds import bound_of
from tests.fixtures.composites import composite
from tests.fixtures.models import TOLERANCE, random_prompt, tiny_model
from tests.fixtures.runner_host import Host
from tests.fixtures.tiny_configs import CONFIGS, tiny_config
from tests.parallel_models import CaseResult, case_of, run_case, run_cases
from tests.ranks import run_ranks

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4}
BIASED = {"attention_bias": True}
CASES = {
    "llama": ("llama", WIDE),
    "gemma3": ("gemma3_text", WIDE),
    "qwen3_next": ("qwen3_next", WIDE),
    "two key heads": ("llama", {}),
    "one key head among others": ("gemma4_text", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v32": ("deepseek_v32", BIASED),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "deepseek_v4": ("deepseek_v4", {"o_groups": 4}),
    "two groups of heads": ("deepseek_v4", {"o_groups": 2}),
}  # fmt: skip
WITH_HEADS = ["llama", "gemma3", "qwen3_next"]
RANKS = [2, pytest.param(4, marks=pytest.mark.long)]


def every_case(test):
    return pytest.mark.parametrize("ranks", RANKS)(pytest.mark.parametrize("name", CASES)(test))


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    return [
        case_of(name, folder / str(at), family, **changes)
        for at, (name, (family, changes)) in enumerate(CASES.items())
    ]


@pytest.fixture(scope="module")
def results(cases):
    """By number of ranks: what each rank tells of each case."""

    @cache
    def run(ranks: int) -> list[dict[str, CaseResult]]:
        return run_ranks(ranks, run_cases, cases, TOLERANCE)

    return run


@every_case
def test_ranks_together_give_the_whole_models_logits(results, name, ranks):
    for rank, found in enumerate(results(ranks)):
        assert found[name].fault is None, f"rank {rank}: {found[name].fault}"


@every_case
def test_every_rank_has_the_same_logits_to_the_bit(results, name, ranks):
    first, *others = [found[name].logits for found in results(ranks)]
    assert first
    assert all(logits == first for logits in others)


@every_case
def test_what_ranks_keep_alike_is_alike_to_the_bit(results, name, ranks):
    split = {"llama": {"anchor"}, "gemma3": {"anchor", "swa"}, "qwen3_next": {"anchor"}}.get(name)
    split = {"anchor"} if (name, ranks) == ("two key heads", 2) else split or set()
    digests = [found[name].digests for found in results(ranks)]
    for group in digests[0]:
        kinds = len({digest[group] for digest in digests})
        assert kinds == (ranks if group in split else 1), group


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", WITH_HEADS)
def test_a_rank_keeps_its_heads_of_what_one_alone_keeps(results, cases, name, ranks):
    case = next(case for case in cases if case.name == name)
    alone = run_case(case, 1, TOLERANCE)
    assert alone.fault is None
    assert alone.collectives == 0
    for rank, found in enumerate(results(ranks)):
        for key, whole in alone.pools.items():
            mine, part = found[name].pools[key], whole
            if key[0] != "state":  # [layers, pages, rows, heads, dim]
                count = mine.shape[3]
                assert count * ranks == whole.shape[3]
                part = whole[:, :, :, rank * count : (rank + 1) * count]
            scale = np.nanmax(np.abs(whole))
            np.testing.assert_allclose(mine, part, atol=2e-5 * scale, equal_nan=True)


@pytest.mark.parametrize("ranks", RANKS)
def test_only_sums_and_gathers_of_the_model_itself(results, ranks):
    """One sum where a layer's attention and its feed-forward join the stream."""
    found = {name: one.collectives for name, one in results(ranks)[0].items()}
    layers = 4
    # Beside the layers': the embedding's sum, and the gathering of logits.
    assert found["llama"] == 2 * layers + 2
    assert found["deepseek_v3"] == 2 * layers + 2 + 3  # shared experts are summed by themselves
    assert found["deepseek_v32"] == found["glm_moe_dsa"] == 2 * layers
    assert found["deepseek_v4"] == 2 * 3
    assert found["two groups of heads"] == (3 if ranks == 4 else 6)


# --- every other family --------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("family", sorted(set(CONFIGS) - NOT_SPLIT - {"recurrent_gemma"}))
def test_every_family_that_is_not_refused_runs(tmp_path, family, ranks):
    case = case_of(family, tmp_path, family)
    found = run_ranks(ranks, run_cases, [case], bound_of(family))
    for rank, one in enumerate(found):
        assert one[family].fault is None, f"rank {rank}: {one[family].fault}"
        assert one[family].logits == found[0][family].logits


def _last_logits(path, tokens):
    host = Host(load_model(path, "float32", ranks=dist.get_world_size()), 16)
    row = host.open()
    host.run((row, tokens[:40]))
    return host.run((row, tokens[40:])).numpy()


def _composites():
    for whole, text in COMPOSITES.items():
        if text not in NOT_SPLIT:
            for ranks in (2, 4):
                often = (whole, ranks) == ("gemma4", 2)
                marks = [] if often else [pytest.mark.long]
                yield pytest.param(whole, text, ranks, marks=marks)


@pytest.mark.parametrize(("whole", "text", "ranks"), list(_composites()))
def test_a_checkpoint_with_more_than_text_is_shared_too(tmp_path, whole, text, ranks):
    model = composite(whole, text)
    model.save_pretrained(tmp_path)
    tokens = random_prompt(0, 60)
    host = Host(load_model(tmp_path, "float32"), 16)
    wanted = host.run((host.open(), tokens)).numpy()
    for found in run_ranks(ranks, _last_logits, tmp_path, tokens):
        np.testing.assert_allclose(found, wanted, atol=bound_of(text) * np.abs(wanted).max())


# --- refused before weights are read -------------------------------------------------------------


def refused(family, ranks, **changes):
    return tp_refusal(facts_of(tiny_config(family, **changes), "bfloat16"), ranks)


def test_one_rank_alone_is_never_refused():
    assert not any(refused(family, 1) for family in ("llama", "gpt2", "deepseek_v4"))


def test_what_ranks_cannot_share_is_refused_with_the_reason():
    assert "no plan" in refused("gpt2", 2)
    divisors = "does not divide by that; allowed are the divisors of 128"
    assert refused("deepseek_v4", 3) == f"moe_intermediate_size 128 {divisors}"
    assert refused("deepseek_v32", 3) == f"intermediate_size 128 {divisors}"
    assert refused("qwen3_moe", 4) is None
    assert refused("qwen3_moe", 4, moe_intermediate_size=24) == (
        "each rank's part of moe_intermediate_size 24, the width of an expert, must be a multiple "
        "of 8; allowed are the divisors of 3"
    )
    narrow = refused("mixtral", 4, intermediate_size=48, moe_intermediate_size=None)
    assert narrow.endswith("must be a multiple of 8; allowed are the divisors of 6")
    odd = refused("qwen3_moe", 2, moe_intermediate_size=28)
    assert odd.endswith("must be a multiple of 8; allowed is 1")
    assert refused("qwen3_moe", 3, moe_intermediate_size=24) is None
    assert refused("llama", 4, intermediate_size=50) is None
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    assert "allowed with more than 1 are plain ones" in refused("llama", 2, **quantized)


def test_a_refusal_comes_before_weights(tmp_path):
    tiny_model("gpt2").config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing to read")
    with pytest.raises(ConfigError, match=r"--tp 2: .*gpt2"):
        load_model(tmp_path, ranks=2)


# --- the harness itself --------------------------------------------------------------------------


def _raise_on_the_second():
    if dist.get_rank() == 1:
        raise ValueError("of the second")
    dist.barrier()


def _stop_the_second():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def _lose_the_second(path):
    host = Host(load_model(path, "float32", ranks=2), 16)
    row = host.open()
    host.run((row, [1, 2, 3]))
    if dist.get_rank() == 1:
        os._exit(1)
    host.run((row, [4]))


@pytest.mark.parametrize("name", ["llama", "deepseek_v32"])
def test_a_forward_raises_at_once_where_a_rank_is_gone(cases, name):
    path = next(case.path for case in cases if case.name == name)
    with pytest.raises(AssertionError, match=r"(?s)rank 0: .*RuntimeError: .*[Cc]onnection"):
        run_ranks(2, _lose_the_second, path)


def test_a_rank_that_raises_fails_the_test_with_its_words():
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*ValueError: of the second"):
        run_ranks(2, _raise_on_the_second)


def test_a_rank_that_hangs_fails_the_test_in_time():
    with pytest.raises(AssertionError, match=r"rank 1: nothing within"):
        run_ranks(2, _stop_the_second, timeout_s=1.0)
