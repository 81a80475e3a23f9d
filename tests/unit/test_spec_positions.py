"""Where cached keys would go stale as a text grows, the model's limit comes before."""

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from stratakv.engine.huggingface.model import wrap
from stratakv.engine.huggingface.model_facts import plain_config
from stratakv.spec.model_config import stable_positions
from tests.fixtures.models import TOLERANCE, changed_model, forward, random_prompt, uncached
from tests.fixtures.tiny_configs import tiny_config
from tests.fixtures.weights import fill

ORIGINAL = 64
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8, "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip


def longrope():
    config = tiny_config(
        "phi3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=ORIGINAL,
        sliding_window=None, head_dim=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    fill(model, 0)
    return model.eval().requires_grad_(requires_grad=False)


def continued(tokens: int) -> float:
    """Relative error of logits when the last token meets cached keys of all the others."""
    model, ids = longrope(), random_prompt(0, tokens)
    whole = forward(model, DynamicCache(config=model.config), ids, 0)
    kv = DynamicCache(config=model.config)
    forward(model, kv, ids[:-1], 0)
    return float((forward(model, kv, ids[-1:], tokens - 1) - whole).abs().max() / whole.abs().max())


def test_keys_are_stable_up_to_the_limit_and_stale_behind_it():
    torch.set_num_threads(1)
    assert stable_positions(plain_config(longrope().config)) == ORIGINAL
    assert continued(ORIGINAL) <= TOLERANCE
    assert continued(ORIGINAL + 1) > 1000 * TOLERANCE


def test_the_engine_serves_no_more_than_the_stable_positions():
    assert wrap(longrope()).max_positions == ORIGINAL


def test_other_rotations_have_no_limit():
    assert stable_positions(plain_config(tiny_config("llama"))) is None
    assert stable_positions(plain_config(tiny_config("ministral3"))) is None
    assert stable_positions(plain_config(tiny_config("gpt2"))) is None


def test_the_smallest_limit_of_several_layer_types_counts():
    rope = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}
    assert stable_positions({"rope_parameters": rope}) == ORIGINAL


def test_phimoe_scales_keys_by_the_last_position_whatever_its_type():
    """Hugging Face's own fault, and the limit that keeps us from it."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "long_mscale": 1.3,
        "short_mscale": 1.0, "original_max_position_embeddings": ORIGINAL,
    }  # fmt: skip
    model = changed_model("phimoe", rope_parameters=rope)
    ids = random_prompt(1, ORIGINAL + 1)
    whole, kv = uncached(model, ids), DynamicCache(config=model.config)
    forward(model, kv, ids[:-1], 0)
    cut = forward(model, kv, ids[-1:], ORIGINAL)[-1]
    assert (cut - whole[-1]).abs().max() > 1000 * TOLERANCE * whole.abs().max()
    fields = model.config.to_dict()
    assert stable_positions(fields) == ORIGINAL
    assert stable_positions(fields | {"rope_parameters": {"rope_type": "default"}}) is None
    assert stable_positions(fields | {"model_type": "phi3"}) is None
    unsaid = {"model_type": "phimoe", "rope_parameters": {"rope_theta": 1e4}}
    assert stable_positions(unsaid) is None, "a rotation without a type is the default one"
