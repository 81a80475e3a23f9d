"""Wherever the engine cuts a prompt, its logits are those of one forward without a cut.

Layers with a state have two code paths in Hugging Face: several tokens, and one token on a state.
Each family that has two is cut on either side of whatever could decide between them: one token and
two, fewer tokens than a convolution is wide, a chunk of the scan and one token more or less. The
other side of each switch that its configuration has is tried too.
"""

import copy
import inspect
import math
import re
import sys
from typing import Any, Final

import pytest
import torch

from stratakv.core.config import EngineConfig
from stratakv.engine.huggingface.model import wrap
from stratakv.engine.verify.session import Scribe
from stratakv.spec.support import state_places
from tests.engines import evict_device, on_device, on_host, small_engine
from tests.exact_families import NAMED
from tests.fixtures.bounds import bound_of_model
from tests.fixtures.models import (
    TOLERANCE,
    DynamicCache,
    changed_model,
    forward,
    random_prompt,
    stepped,
    tiny_model,
    uncached,
)
from tests.fixtures.runner_host import Host
from tests.fixtures.tiny_configs import CONFIGS
from tests.hit_cases import Lab, last_end
from tests.integration.test_runner_families import SERVED, spec

TOKENS: Final = 131
CUTS: Final = (
    (1,) * 6 + (2, 3, TOKENS - 11),
    (15, 1, 16, 1, 17, 14, 63, 1, 2, 1),
    (63, 1, 1, 64, 2),
    (64, 1, 66),
)
"""Chunks of Hugging Face's scans are 16 tokens in the tiny models of Mamba-2, 64 elsewhere."""
ONE_BY_ONE: Final = ((1,) * TOKENS, (2,) * 65 + (1,), (TOKENS - 1, 1))
STATES: Final = [family for family in SERVED if state_places(spec(family))]
OTHER_CODE: Final = {
    "gemma4_text": "which tokens the last layers compute, where a number says how many are kept",
    "gemma4_unified_text": "the same",
}
"""Families without a state whose code asks whether it got one token, and for what."""
SWITCHED: Final[dict[str, dict[str, Any]]] = {
    "mamba2": {"use_bias": True, "use_conv_bias": False, "time_step_limit": (0.0, 0.2)},
    "bamba": {
        "mamba_conv_bias": False, "mamba_proj_bias": True, "time_step_limit": (0.08, math.inf),
    },
    "granitemoehybrid": {"mamba_conv_bias": False, "mamba_proj_bias": True},
    "falcon_h1": {
        "mamba_conv_bias": False, "mamba_proj_bias": True, "projectors_bias": True,
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "ssm_in_multiplier": 0.75,
        "ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 2.0],
    },
    "nemotron_h": {"use_conv_bias": False, "use_bias": True, "mamba_proj_bias": True},
    "zamba2": {
        "add_bias_linear": True, "use_mem_rope": True, "use_shared_attention_adapter": True,
    },
    "olmo_hybrid": {"linear_allow_neg_eigval": False},
    "bailing_hybrid": {"kda_safe_gate": False},
    "jamba": {"mamba_conv_bias": False, "mamba_proj_bias": True},
    "zamba": {"mamba_conv_bias": False, "mamba_proj_bias": True},
    "mamba": {"use_bias": True, "use_conv_bias": False},
    "falcon_mamba": {"use_bias": True, "use_conv_bias": False},
    "lfm2": {"conv_bias": True}, "lfm2_moe": {"conv_bias": True}, "lfm3": {"conv_bias": True},
}  # fmt: skip
"""The other side of every switch that changes what a layer with a state computes."""
WIDTH: Final = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"),
        "linear_conv_kernel_dim",
    ),
    **dict.fromkeys(("nemotron_h", "mamba2", "mamba", "falcon_mamba"), "conv_kernel"),
    **dict.fromkeys(
        ("falcon_h1", "bamba", "granitemoehybrid", "zamba2", "zamba", "jamba"), "mamba_d_conv",
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), "conv_L_cache"),
    "bailing_hybrid": "short_conv_kernel_size",
}  # fmt: skip
"""The field that says how wide a family's convolution is."""
NARROW: Final = {"time_step_limit": (0.001, 0.1)}
ORDINARY: Final[dict[str, dict[str, Any]]] = {
    "nemotron_h": {"time_step_min": 0.001}, "zamba2": {"time_step_min": 0.001},
    "mamba2": NARROW, "bamba": NARROW, "falcon_h1": NARROW, "granitemoehybrid": NARROW,
}  # fmt: skip
"""Limits as Hugging Face has them by default, or as its initialisation draws time steps."""


def named(families, few=NAMED):
    """Those that people run in `make test`, all in `make test-long`."""
    return [
        family if family in few else pytest.param(family, marks=pytest.mark.long)
        for family in families
    ]


def usual_cuts(family):
    """Those that go token by token after the first chunk need no more than two of these."""
    return CUTS[:2] if stepped(family) else CUTS


@torch.no_grad()
def assert_cuts_do_not_show(model, cuts) -> None:
    ids = random_prompt(5, TOKENS)
    wanted = uncached(model, ids)
    host = Host(wrap(copy.deepcopy(model)), 16, tokens=1024)
    for chunks in cuts:
        assert sum(chunks) == TOKENS
        row, at = host.open(), 0
        for count in chunks:
            (found,) = host.run((row, ids[at : at + count]))
            at += count
            error = (found - wanted[at - 1]).abs().max() / wanted.abs().max()
            assert error <= bound_of_model(model), f"{chunks} at {at}: logits differ by {error:.1e}"
        host.close(row)


@pytest.mark.parametrize("family", named(STATES))
def test_no_cut_of_a_prompt_shows(family):
    assert_cuts_do_not_show(changed_model(family), usual_cuts(family))


@pytest.mark.long
@pytest.mark.parametrize("family", SERVED)
def test_no_cut_shows_in_any_family(family):
    assert_cuts_do_not_show(changed_model(family), (*CUTS, *ONE_BY_ONE))


@pytest.mark.parametrize("family", named(SWITCHED))
def test_no_cut_shows_with_every_switch_on_its_other_side(family):
    model = changed_model(family, **SWITCHED[family])
    ids = random_prompt(5, TOKENS)
    usual, switched = uncached(tiny_model(family), ids), uncached(model, ids)
    assert (usual - switched).abs().max() > 1000 * TOLERANCE * usual.abs().max()
    assert_cuts_do_not_show(model, usual_cuts(family))


@pytest.mark.parametrize("family", named(WIDTH, few=("lfm2", "mamba2", "qwen3_next")))
def test_a_convolution_of_width_1_runs_like_any_other(family):
    assert_cuts_do_not_show(changed_model(family, **{WIDTH[family]: 1}), CUTS)


@pytest.mark.long
@pytest.mark.parametrize("width", [2, 7])
@pytest.mark.parametrize("family", WIDTH)
def test_no_cut_shows_with_a_convolution_of_another_width(family, width):
    assert_cuts_do_not_show(changed_model(family, **{WIDTH[family]: width}), (*CUTS, *ONE_BY_ONE))


@torch.no_grad()
def ordinary_model(family):
    """``dt_bias`` as Hugging Face's own initialisation draws it, [1e-3, 0.1] after softplus; all
    else as ever, so that states matter."""
    model = changed_model(family, **ORDINARY[family])
    generator = torch.Generator().manual_seed(0)
    for name, bias in model.named_parameters():
        if name.endswith("dt_bias"):
            steps = torch.empty_like(bias).uniform_(
                math.log(1e-3), math.log(0.1), generator=generator
            )
            bias.copy_(steps.exp().expm1().log())
    return model


@pytest.mark.parametrize("family", ORDINARY)
def test_time_steps_of_ordinary_weights_are_cut_off_in_single_tokens_too(family):
    """Hugging Face's own one-token steps go wrong with them: these weights would show it."""
    model = ordinary_model(family)
    ids = random_prompt(5, TOKENS)
    wanted = uncached(model, ids)
    kv = DynamicCache(config=model.config)
    forward(model, kv, ids[:90], 0)
    alone = torch.cat([forward(model, kv, ids[at : at + 1], at) for at in range(90, TOKENS)])
    assert (alone - wanted[90:]).abs().max() > 10 * TOLERANCE * wanted.abs().max()
    assert_cuts_do_not_show(model, CUTS)


@pytest.mark.parametrize("family", named(ORDINARY, few=("nemotron_h", "zamba2")))
def test_answers_of_ordinary_weights_are_the_same_from_every_tier(family):
    """Computed, hit, loaded: 12 tokens each, after prompts that end anywhere in a page."""
    model = ordinary_model(family)
    config = EngineConfig(
        page_tokens=16, max_running=6, max_model_len=1024, chunk_tokens=40, step_tokens=88
    )
    groups = len(spec(family).groups)
    pages, scribe = (64,) * groups, Scribe()
    engine = wrap(copy.deepcopy(model))
    with small_engine(engine, config, pages, pages, token_source=scribe) as parts:
        this = Lab(model, parts, scribe)
        for turn, tokens in enumerate((75, 97)):
            prompt = random_prompt(20 + turn, tokens)
            end = last_end(tokens, 16)
            assert this.ask(prompt, 12).cached == on_device(this.spec, 0)
            assert this.ask(prompt, 12).cached == on_device(this.spec, end)
            evict_device(parts)
            assert this.ask(prompt, 12).cached == on_host(this.spec, end)


def test_every_module_with_a_path_for_one_token_is_among_these():
    """Read from Hugging Face's source, so that a new one is seen."""
    asks = re.compile(
        r"\b(seq_len|seq_length|q_len|query_length)\w* *(==|!=|>|<=) *1\b|has_previous"
    )
    found = set()
    for family in SERVED:
        source = inspect.getsource(sys.modules[type(tiny_model(family)).__module__])
        if asks.search(source):
            found.add(family)
    assert found == {*STATES, *OTHER_CODE}


def test_every_family_with_a_state_has_its_width_and_its_switches_listed():
    assert {*WIDTH} == {*STATES}
    without = {"kimi_linear", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
    assert {*SWITCHED} == {*STATES} - without
    assert {*CONFIGS} >= {*SWITCHED}
