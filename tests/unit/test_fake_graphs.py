"""The stand-in for CUDA graphs refuses what a capture would, and replays on the same memory."""

import pytest
import torch

from stratakv.engine.huggingface.model_call import CallOutputs
from tests.fake_graphs import FakeGraphs, NotCapturableError

AT = torch.device("cpu")


def recorded(work):
    with torch.inference_mode():
        return FakeGraphs().record(lambda: CallOutputs(*work()))


def test_a_replay_goes_by_what_is_in_its_buffers_then():
    source, target = torch.ones(3), torch.zeros(3)

    def work():
        target.add_(source * 2)
        return target.view(3, 1)[:2], source + 1

    graph, outputs = recorded(work)
    assert outputs.hidden.isnan().all(), "a capture computes nothing"
    target.zero_()
    source.fill_(5)
    graph.replay()
    assert target.tolist() == [10.0] * 3
    assert outputs.logits.tolist() == [[10.0]] * 2
    assert outputs.hidden.tolist() == [6.0] * 3
    graph.replay()
    assert target.tolist() == [20.0] * 3


def test_a_graph_keeps_nothing_alive_that_it_was_given():
    def recorded_over(buffer):
        return recorded(lambda: (buffer + 1, buffer * 2))[0]

    graph = recorded_over(torch.ones(3))
    with pytest.raises(AssertionError, match="memory that is gone"):
        graph.replay()


NUMBERS = torch.arange(4)
REFUSED = {
    "a number": lambda: NUMBERS.sum().item(),
    "a choice": lambda: bool(NUMBERS.any()),
    "an array": NUMBERS.numpy,
    "a list": NUMBERS.tolist,
    "places": NUMBERS.nonzero,
    "where alone": lambda: torch.where(NUMBERS > 1),
    "a mask": lambda: NUMBERS[NUMBERS > 1],
    "a masked write": lambda: NUMBERS.clone().index_put_((NUMBERS > 1,), torch.tensor(0)),
    "repeats": lambda: torch.repeat_interleave(NUMBERS),
    "unique": NUMBERS.unique,
    "one of many": lambda: torch.nn.functional.one_hot(NUMBERS),
    "a new tensor": lambda: torch.tensor([1, 2], device=AT),
    "of an array": lambda: torch.from_numpy(NUMBERS.numpy()),
    "on the host": lambda: NUMBERS + torch.arange(4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_goes_by_the_host_is_refused(name):
    with pytest.raises(NotCapturableError):
        recorded(lambda: (REFUSED[name](), NUMBERS))


def test_what_is_warmed_up_behind_a_record_is_refused():
    graphs = FakeGraphs()
    graphs.record(lambda: CallOutputs(NUMBERS + 1, NUMBERS))
    with pytest.raises(AssertionError, match="may take its memory"):
        graphs.warm_up(lambda: None)
