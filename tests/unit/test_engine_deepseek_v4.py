"""Parts of DeepSeek-V4 by themselves: the tie rule, mHC, what is refused."""

import copy

import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from stratakv.core.errors import ConfigError
from stratakv.engine.deepseek.v4_attention import Indexer
from stratakv.engine.deepseek.v4_config import V4Config
from stratakv.engine.deepseek.v4_mhc import HyperConnection, HyperHead
from stratakv.engine.deepseek.v4_model import V4Model
from stratakv.engine.deepseek.v4_step import Keys
from tests.fixtures.deepseek_v4 import config_of, hugging_face


class FirstElement(torch.nn.Module):
    """Scores are the keys' only element."""

    def forward(self, query, keys, x):
        return keys[..., 0].expand(len(query), -1).clone()


def select(keys, scores):
    """The two best of ``keys``; ``scores`` by pool row."""
    indexer = Indexer(V4Config.of(config_of(0).to_dict()), ratio=4)
    indexer.top_k, indexer.scorer = 2, FirstElement()
    pool = torch.tensor(scores)[:, None]
    n = 1 if keys.hidden is None else len(keys.hidden)
    return indexer.select(torch.zeros(n, 1), torch.zeros(n, 1, 1), keys, pool)


def test_among_equal_scores_the_lowest_positions_win():
    shared = Keys(torch.tensor([5, 4, 3, 2, 1]), torch.zeros(2, 5, dtype=torch.bool))
    scores = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert select(shared, scores).hidden.tolist() == [[False, True, False, True, True]] * 2
    own = Keys(torch.tensor([[5, 4, 3, 2, 1], [1, 2, 4, 5, 0]]), torch.zeros(2, 5).bool())
    assert select(own, scores).rows.tolist() == [[5, 3], [1, 2]]


def test_a_query_with_few_entries_sees_those_alone():
    hidden = torch.tensor([[False, True, True], [False, False, False]])
    found = select(Keys(torch.tensor([[0, 0, 0], [3, 4, 5]]), hidden), [1.0, 0, 0, 7, 8, 9])
    assert found.rows.tolist() == [[0, 0], [4, 5]]
    assert found.hidden.tolist() == [[False, True], [False, False]]
    shared = select(Keys(torch.tensor([3, 4, 5]), hidden), [1.0, 0, 0, 7, 8, 9])
    assert shared.hidden.tolist() == [[False, True, True], [True, False, False]]


def test_few_entries_are_not_scored():
    keys = Keys(torch.tensor([[3, 1]]), None)
    assert select(keys, [0.0] * 4) is keys


@pytest.mark.parametrize("seed", range(3))
def test_hyper_connections_are_hugging_faces(seed):
    hf = config_of(seed)
    config, generator = V4Config.of(hf.to_dict()), torch.Generator().manual_seed(seed)
    connection, head = theirs.DeepseekV4HyperConnection(hf), theirs.DeepseekV4HyperHead(hf)
    for parameter in (*connection.parameters(), *head.parameters()):
        torch.nn.init.normal_(parameter, generator=generator)
    mine, my_head = HyperConnection(config), HyperHead(config)
    mine.load_state_dict(connection.state_dict())
    my_head.load_state_dict(head.state_dict())
    streams = torch.randn(1, 5, config.streams, config.hidden, generator=generator)
    post, comb, collapsed = connection(streams)
    mixing = mine(streams[0])
    torch.testing.assert_close(mixing.post, post[0])
    torch.testing.assert_close(mixing.comb, comb[0])
    torch.testing.assert_close(mixing.block_input, collapsed[0])
    torch.testing.assert_close(my_head(streams[0]), head(streams)[0])


def test_a_missing_or_foreign_weight_is_named():
    weights = hugging_face().state_dict()
    config = V4Config.of(config_of(0).to_dict())
    name = "model.layers.2.self_attn.compressor.indexer.position_bias"
    fewer = {key: value for key, value in weights.items() if key != name}
    with pytest.raises(RuntimeError, match=name):
        V4Model.of(config, fewer)
    with pytest.raises(RuntimeError, match="surplus"):
        V4Model.of(config, {**weights, "surplus": torch.zeros(1)})


REFUSED = {
    "hidden_act": "gelu", "mlp_bias": True, "scoring_func": "softmax", "num_key_value_heads": 2,
    "rms_norm_eps": "small", "sliding_window": 3,
}  # fmt: skip


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_run_as_hugging_face_runs_it_is_refused(field):
    fields = copy.deepcopy(config_of(0).to_dict())
    with pytest.raises(ConfigError, match=field):
        V4Config.of({**fields, field: REFUSED[field]})
