"""The parts of our own DeepSeek-V3.2, each against Hugging Face's or against its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as theirs

from stratakv.engine.attention.step_meta import DecodeBucket
from stratakv.engine.deepseek.common_rope import Rope
from stratakv.engine.deepseek.common_topk import highest, highest_indices
from stratakv.engine.deepseek.v32_model import score_scale, take_over
from stratakv.engine.deepseek.v32_step import Seen
from tests.fixtures.deepseek_v32 import CONFIGS, v32_model
from tests.fixtures.models import tiny_model

TOLERANCE = 1e-6


def near(mine, wanted):
    return (mine - wanted).abs().max() <= TOLERANCE * wanted.abs().max().clamp(min=1)


# --- the tie rule --------------------------------------------------------------------------------

values = st.sampled_from([-np.inf, -2.0, -0.0, 0.0, 0.5, 1.0])


@given(st.lists(values, min_size=1, max_size=12), st.data())
def test_among_equal_scores_the_lowest_index_wins(row, data):
    k = data.draw(st.integers(1, len(row)))
    by_rule = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    scored = torch.tensor([row, row[::-1]])
    assert highest_indices(scored, k)[0].tolist() == sorted(by_rule)
    assert highest(scored, k).sum(-1).tolist() == [k, k]


def test_what_is_broken_is_chosen_first():
    scored = torch.tensor([[1.0, torch.nan, torch.inf, 2.0], [0.0, 1.0, 2.0, 3.0]])
    assert highest_indices(scored, 2).tolist() == [[1, 2], [2, 3]]


def test_a_batch_chooses_as_each_row_alone():
    scored = torch.randint(4, (3, 5, 40), generator=torch.Generator().manual_seed(0)).float()
    together = highest_indices(scored, 7)
    assert together.shape == (3, 5, 7)
    alone = [highest_indices(row, 7) for rows in scored for row in rows]
    assert torch.stack(alone).view(3, 5, 7).equal(together)


# --- rotation ------------------------------------------------------------------------------------

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    **{name: CONFIGS[name]["rope_parameters"] for name in ("yarn", "yarn without mscale")},
}


def config_with(rope, **fields):
    return DeepseekV32Config(
        **fields, num_hidden_layers=1, rope_parameters=dict(rope), max_position_embeddings=2560
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ROPES)
def test_rotations_are_hugging_faces(kind):
    config = config_with(ROPES[kind], qk_rope_head_dim=12)
    positions = torch.tensor([0, 1, 63, 64, 2000])
    x = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(1))
    cos, sin = theirs.DeepseekV32RotaryEmbedding(config)(x, positions[None])
    rotation = Rope.of(config).at(positions, torch.float32)
    halves, _ = theirs.apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    pairs, _ = theirs.apply_rotary_pos_emb_interleave(x[None], x[None], cos, sin, unsqueeze_dim=2)
    assert near(rotation.halves(x), halves[0])
    assert near(rotation.pairs(x), pairs[0])
    assert near(rotation.pairs(x[:, 0]), pairs[0, :, 0])


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_scaled_as_hugging_face_does(name):
    model = v32_model(name)
    assert score_scale(model.config) == pytest.approx(model.model.layers[0].self_attn.scaling)


# --- experts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "groups", "one head"])
def test_experts_are_hugging_faces(name):
    model = v32_model(name)
    mine, _ = take_over(model)
    x = torch.randn(37, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    layer, wanted = mine.model.layers[-1].mlp, model.model.layers[-1].mlp
    _, weights, chosen = wanted.gate(x)
    my_chosen, my_weights = layer.gate(x)
    order = chosen.argsort(-1)
    assert my_chosen.equal(chosen.gather(1, order))
    assert near(my_weights, weights.gather(1, order))
    assert len(my_chosen.unique()) > 1
    assert near(layer(x), wanted(x[None])[0])


def test_groups_of_experts_are_left_out():
    """Else the routing in groups would be tested where it changes nothing."""
    model = v32_model("groups")
    mine, _ = take_over(model)
    x = torch.randn(37, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    router = mine.model.layers[-1].mlp.gate
    grouped, _ = router(x)
    router.groups = router.groups_kept = 1
    assert not router(x)[0].equal(grouped)


# --- weights -------------------------------------------------------------------------------------


def test_weights_are_shared_and_not_copied():
    model = v32_model("small")
    mine, _ = take_over(model)
    parameters = dict(model.named_parameters())
    found = dict(mine.named_parameters())
    assert found.keys() == parameters.keys()
    assert all(found[n].data_ptr() == parameters[n].data_ptr() for n in found)


def test_another_models_module_is_not_taken():
    with pytest.raises(AssertionError, match="LlamaConfig"):
        take_over(tiny_model("llama"))


# --- indexer -------------------------------------------------------------------------------------


def test_padding_names_the_newest_row_of_its_own_request():
    mask = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, -torch.inf, -torch.inf, -torch.inf]])
    bucket = DecodeBucket(
        count=2, width=2, tokens=None, pages=torch.tensor([4, 1, 3, 9]), keys=slice(None),
        mask=mask[:, None, None], stale=None,
    )  # fmt: skip
    seen = Seen.of(bucket, torch.tensor([3, 6]), page_tokens=2)
    assert seen.rows.tolist() == [[8, 9, 2, 3], [6, 6, 6, 6]]
    assert seen.hidden.tolist() == (mask != 0).tolist()
    picked = seen.only(torch.tensor([[0, 3], [0, 1]]))
    assert picked.rows.tolist() == [[8, 3], [6, 6]]
    assert picked.hidden.tolist() == [[False, False], [False, True]]
