"""Parts of DeepSeek-V4 by themselves: the tie rule, mHC, the taking over of weights."""

import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from stratakv.engine.attention import scratch_limit
from stratakv.engine.attention.row_kernels import RowKernels
from stratakv.engine.deepseek.v4_attention import V4Indexer
from stratakv.engine.deepseek.v4_config import V4Config
from stratakv.engine.deepseek.v4_mhc import HyperConnection, HyperHead
from stratakv.engine.deepseek.v4_model import V4Model
from stratakv.engine.deepseek.v4_step import Entries
from tests.fixtures.deepseek_v4 import config_of, hugging_face


class OneVote(torch.nn.Module):
    def forward(self, x):
        return torch.ones(len(x), 1)


def select(entries, scores):
    """The two best of ``entries``; ``scores``, none below 0, by pool row."""
    indexer = V4Indexer(V4Config.of(config_of(0).to_dict()), ratio=4)
    indexer.top_k, indexer.scorer = 2, OneVote()
    pool = torch.tensor(scores)[:, None]
    n = 1 if entries.counts is None else len(entries.counts)
    return indexer.select(torch.zeros(n, 1), torch.ones(n, 1, 1), entries, pool, RowKernels())


PIECES = pytest.mark.parametrize("scratch_bytes", [1, scratch_limit.SCRATCH_BYTES])


@PIECES
def test_among_equal_scores_the_lowest_positions_win(scratch_bytes, monkeypatch):
    monkeypatch.setattr(scratch_limit, "SCRATCH_BYTES", scratch_bytes)
    scores = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    shared = Entries(torch.tensor([5, 4, 3, 2, 1]), torch.tensor([5, 5]))
    assert select(shared, scores).rows.tolist() == [[5, 3]] * 2
    own = Entries(torch.tensor([[5, 4, 3, 2, 1], [1, 2, 4, 5, 0]]), torch.tensor([5, 5]))
    assert select(own, scores).rows.tolist() == [[5, 3], [1, 2]]


@PIECES
def test_a_query_with_few_entries_sees_those_alone(scratch_bytes, monkeypatch):
    monkeypatch.setattr(scratch_limit, "SCRATCH_BYTES", scratch_bytes)
    scores, counts = [1.0, 0, 0, 7, 8, 9], torch.tensor([1, 3])
    found = select(Entries(torch.tensor([[0, 0, 0], [3, 4, 5]]), counts), scores)
    assert found.rows.tolist() == [[0, 0], [4, 5]]
    assert found.hidden.tolist() == [[False, True], [False, False]]
    shared = select(Entries(torch.tensor([3, 4, 5]), counts), scores)
    assert shared.rows.tolist() == [[3, 4], [4, 5]]
    assert shared.hidden.tolist() == [[False, True], [False, False]]


def test_few_entries_are_not_scored():
    found = select(Entries(torch.tensor([[3, 1]]), None), [0.0] * 4)
    assert found.rows.tolist() == [[3, 1]]
    assert found.hidden is None
    found = select(Entries(torch.tensor([3, 1]), torch.tensor([0, 1, 2])), [0.0] * 4)
    assert found.rows.tolist() == [3, 1]
    assert found.hidden.tolist() == [[True, True], [False, True], [False, False]]


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
