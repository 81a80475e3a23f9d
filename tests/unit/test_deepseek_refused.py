"""What our own modules do not run is said from the configuration alone: by a plan, and by a server
before it opens a weight or takes memory."""

import json
from dataclasses import replace

import pytest

from stratakv.assembly import models
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.deepseek.refused import OWN_TYPES, own_refusal
from stratakv.engine.huggingface import model_facts
from stratakv.engine.huggingface.model_facts import read_planned
from stratakv.serve import wiring
from stratakv.serve.memory_plan import plan_bytes
from stratakv.serve.wiring import build_service
from tests.fixtures.deepseek_v4 import config_of
from tests.fixtures.deepseek_v32 import CONFIGS, v32_model
from tests.fixtures.tiny_configs import tiny_config

V32, GLM, V4 = "deepseek_v32", "glm_moe_dsa", "deepseek_v4"
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
THETA = {"rope_theta": 1e4}
DYNAMIC = {**THETA, "rope_type": "dynamic", "factor": 2.0}
LONG = {**THETA, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
ODD = {**THETA, "rope_type": "default", "partial_rotary_factor": 0.9}
PLAIN = {**THETA, "rope_type": "default", "partial_rotary_factor": 0.25}

REFUSED = [
    (V32, {"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized"),
    (V32, {"hidden_act": "sparkle"}, "hidden_act must be an activation that .* got 'sparkle'"),
    (V32, {"rope_parameters": DYNAMIC}, "rope_type must be one of default, .* got 'dynamic'"),
    (V32, {"rope_parameters": LONG | {"original_max_position_embeddings": 64}}, "got 'longrope'"),
    (V32, {"rope_parameters": ODD}, "head_dim must be of an even number of rotated elements"),
    (V32, {"rope_parameters": PLAIN}, "qk_rope_head_dim must be the number of rotated"),
    (V32, {"index_head_dim": 6}, "index_head_dim must be at least 8, its rotated elements, got 6"),
    (V32, {"index_n_heads": 0}, "index_n_heads must be at least 1, got 0"),
    (V32, {"index_topk": 0}, "index_topk must be at least 1"),
    (V32, {"indexer_types": ["full", "shared", "full", "full"]}, "'full' in every layer"),
    (V32, {"n_group": 3}, "n_group must be a divisor of 4 experts that leaves two"),
    (V32, {"n_group": 4}, "n_group must be a divisor of 4 experts that leaves two"),
    (V32, {"topk_group": 2}, "topk_group must be at most 1, the groups there are"),
    (V32, {"num_experts_per_tok": 5}, "num_experts_per_tok must be at most 4, the experts of"),
    (V32, {"num_kv_shared_layers": 1}, "num_kv_shared_layers must be absent"),
    (GLM, {"indexer_types": ["shared", "full", "full", "full"]}, "'full' in the first layer"),
    (GLM, {"indexer_types": ["full", "half", "full", "full"]}, "'full' or 'shared' for each of 4"),
    (V4, {"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized"),
    (V4, {"dtype": "float16"}, "not float16"),
    (V4, {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    (V4, {"mlp_bias": True}, "mlp_bias must be false, got True"),
    (V4, {"scoring_func": "softmax"}, "scoring_func must be 'sqrtsoftplus' or 'sigmoid'"),
    (V4, {"num_key_value_heads": 2}, "num_key_value_heads must be 1, got 2"),
    (V4, {"sliding_window": 3}, "sliding_window must be at least 4, the tokens of a block, got 3"),
    (V4, {"compress_rates": {CSA: 4, HCA: 4}}, "compress_rates must be numbers that differ"),
    (V4, {"o_groups": 3}, "o_groups must be a divisor of 128, the width of all heads, got 3"),
    (V4, {"index_n_heads": 0}, "index_n_heads must be at least 1, got 0"),
    (V4, {"index_head_dim": 6}, "index_head_dim must be at least 8, its rotated elements, got 6"),
    (V4, {"num_experts_per_tok": 5}, "num_experts_per_tok must be at most 4, the experts there"),
    (V4, {"hc_mult": 0}, "hc_mult must be at least 1"),
    (V4, {"rope_parameters": {"main": PLAIN, "compress": DYNAMIC}}, "got 'dynamic'"),
    (V4, {"rope_parameters": {"main": DYNAMIC, "compress": PLAIN}}, "got 'dynamic'"),
]


def directory(path, family, changed):
    """A checkpoint whose weights cannot be read."""
    fields = tiny_config(family).to_dict() | changed
    (path / "config.json").write_text(json.dumps(fields, default=str))
    (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def no_weights(monkeypatch):
    """Opening weights fails the test, and so does taking memory."""

    def opened(*_arguments):
        raise AssertionError("weights were opened, or memory was taken")

    monkeypatch.setattr(wiring, "load_model", opened)
    monkeypatch.setattr(models, "assemble", opened)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "changed", "message"), REFUSED)
def test_it_is_reported_before_weights_by_a_server_and_by_a_plan(
    family, changed, message, tmp_path, no_weights
):
    path = directory(tmp_path, family, changed)
    with pytest.raises(ConfigError, match=message) as refused:
        build_service(path, EngineConfig(), ServerConfig())
    reason = str(refused.value).removeprefix("MODEL: ")
    plan = plan_bytes(path, EngineConfig(device_memory="64MiB", max_running=4))
    assert plan.not_yet == reason
    assert f"cannot be served yet: {reason}" in plan.render().splitlines()
    assert plan.figures()["cannot_be_served_yet"] == reason


@pytest.mark.parametrize("family", sorted(OWN_TYPES))
def test_what_runs_is_not_refused(family, tmp_path):
    facts, _ = read_planned(directory(tmp_path, family, {}))
    assert own_refusal(facts) is None


@pytest.mark.parametrize("seed", range(6))
def test_no_configuration_that_is_compared_with_hugging_face_is_refused(seed):
    assert own_refusal(model_facts.facts_of(config_of(seed), "float32")) is None
    name = list(CONFIGS)[seed]
    assert own_refusal(model_facts.facts_of(v32_model(name).config, "float32")) is None


def test_other_families_are_none_of_its_business(tmp_path):
    facts, _ = read_planned(directory(tmp_path, "llama", {"hidden_act": "sparkle"}))
    assert own_refusal(facts) is None


def test_layers_that_only_predict_are_not_looked_at():
    """GLM lists one more indexer than layers that run."""
    facts = model_facts.facts_of(tiny_config(GLM), "float32")
    roles = [*facts.config["indexer_types"], "full"]
    longer = replace(facts, config={**facts.config, "indexer_types": roles})
    assert own_refusal(longer) is None


def test_layers_with_sizes_of_their_own_are_refused():
    facts = model_facts.facts_of(tiny_config(V4), "float32")
    unlike = {**facts.config, "per_layer_config": {"1": {"head_dim": 8}}}
    assert "per_layer_config must be absent" in str(own_refusal(replace(facts, config=unlike)))


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_act", 5), ("q_lora_rank", None), ("mlp_layer_types", ["a"])]
)
def test_what_hugging_face_does_not_read_is_a_config_error(field, value, tmp_path):
    """Its own class of errors is none that Python has."""
    path = directory(tmp_path, V32, {field: value})
    with pytest.raises(ConfigError, match=r"MODEL .*not a causal LM that loads: ") as refused:
        read_planned(path)
    assert field in str(refused.value)
