"""States between their pages and Hugging Face's layers: read from one page, written to another."""

from math import prod

import pytest
import torch

from stratakv.core.ids import GroupId, LayerId
from stratakv.engine.attention.paged_layer import Scratch
from stratakv.engine.huggingface.state_layer import OpenStates, StateBuffer, StatePages, StateRows

GROUP = GroupId(1)
PAGES, CHANNELS, WIDTH, STATE = 9, 6, 3, (4, 5)
FIRST, SECOND = LayerId(0), LayerId(2)


class Gate:
    def __init__(self):
        self.waited = []

    def wait(self, layer):
        self.waited.append(layer)


@pytest.fixture
def layers():
    """Two layers, everything NaN; the second has a convolution only."""
    torch.manual_seed(0)
    return {FIRST: pages((CHANNELS, WIDTH), STATE), SECOND: pages((CHANNELS, WIDTH), None)}


def pages(conv, recurrent):
    def buffer(shape):
        return StateBuffer.of(torch.full((PAGES, 1, *shape), torch.nan))

    return StatePages(GROUP, buffer(conv), None if recurrent is None else buffer(recurrent))


def opened(layers, source, own, gate=None):
    rows = StateRows(None if source is None else torch.tensor(source), torch.tensor(own))
    return OpenStates(layers, {GROUP: rows}, gate, Scratch())


def put(layers, page_ids):
    """Random states on pages: what a forward before has left there."""
    conv = torch.randn(len(page_ids), CHANNELS, WIDTH)
    recurrent = torch.randn(len(page_ids), *STATE)
    layers[FIRST].conv.write(torch.tensor(page_ids), conv)
    layers[FIRST].recurrent.write(torch.tensor(page_ids), recurrent)
    return conv, recurrent


def conv_of(layers, layer, page_ids):
    return layers[layer].conv.rows[page_ids].view(-1, CHANNELS, WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 3), (7, 4), (16, 8)], ids=str)
def test_a_row_of_any_size_comes_back_as_it_was_written(shape, dtype):
    buffer = StateBuffer.of(torch.full((PAGES, 1, *shape), torch.nan, dtype=dtype))
    flat = torch.randn(1 + 3 * prod(shape)).to(dtype)
    states = flat[1:].view(3, *shape)  # a view that does not begin where a word does
    buffer.write(torch.tensor([7, 0, 3]), states)
    assert buffer.read("any", torch.tensor([7, 0, 3]), Scratch()).equal(states)
    assert buffer.rows[[1, 2, 4, 5, 6, 8]].isnan().all()


def test_a_request_without_a_state_gets_none_and_leaves_one(layers):
    states = opened(layers, None, [5])
    assert not states.begun
    assert states.conv(FIRST) is None
    assert states.recurrent(FIRST) is None
    inputs, recurrent = torch.randn(1, CHANNELS, 2), torch.randn(1, *STATE)
    seen = states.convolve(FIRST, inputs)
    assert seen.equal(torch.nn.functional.pad(inputs, (1, 0)))
    states.recur(FIRST, recurrent)
    states.close()
    assert conv_of(layers, FIRST, [5]).equal(seen)
    assert layers[FIRST].recurrent.rows[5].view(1, *STATE).equal(recurrent)


def test_new_inputs_come_behind_those_before_them(layers):
    conv, recurrent = put(layers, [2, 6])
    states = opened(layers, [2, 6], [3, 1])
    assert states.begun
    inputs = torch.randn(2, CHANNELS, 5)
    assert states.convolve(FIRST, inputs).equal(torch.cat((conv, inputs), -1))
    states.recur(FIRST, recurrent + 1)
    states.close()
    assert conv_of(layers, FIRST, [3, 1]).equal(inputs[..., -WIDTH:])
    assert layers[FIRST].recurrent.rows[[3, 1]].view(2, *STATE).equal(recurrent + 1)
    assert conv_of(layers, FIRST, [2, 6]).equal(conv)


@pytest.mark.parametrize("requests", [1, 2])
def test_a_convolution_of_width_1_keeps_the_last_of_several_inputs(requests):
    narrow = {FIRST: pages((CHANNELS, 1), None)}
    own, inputs = list(range(requests)), torch.randn(requests, CHANNELS, 5)
    states = opened(narrow, None, own)
    assert states.convolve(FIRST, inputs).equal(inputs)
    states.close()
    assert narrow[FIRST].conv.rows[own].view(requests, CHANNELS, 1).equal(inputs[..., -1:])


def test_what_a_kernel_changes_in_place_is_written_and_its_source_is_not(layers):
    conv, recurrent = put(layers, [2, 6])
    states = opened(layers, [2, 6], [6, 4])
    states.conv(FIRST).mul_(2)
    states.recurrent(FIRST).add_(1)
    states.close()
    assert conv_of(layers, FIRST, [6, 4]).equal(conv * 2)
    assert layers[FIRST].recurrent.rows[[6, 4]].view(2, *STATE).equal(recurrent + 1)
    assert conv_of(layers, FIRST, [2]).equal(conv[:1])


def test_the_next_layer_closes_the_one_before(layers):
    put(layers, [2])
    layers[SECOND].conv.write(torch.tensor([2]), torch.ones(1, CHANNELS, WIDTH))
    gate = Gate()
    states = opened(layers, [2], [8], gate)
    states.conv(FIRST).zero_()
    states.recurrent(FIRST)
    assert gate.waited == [FIRST]
    states.conv(SECOND).mul_(3)
    assert conv_of(layers, FIRST, [8]).eq(0).all()
    assert conv_of(layers, SECOND, [8]).isnan().all()
    states.close()
    assert conv_of(layers, SECOND, [8]).eq(3).all()
    assert gate.waited == [FIRST, SECOND]


def test_a_layer_that_leaves_no_state_is_our_bug(layers):
    states = opened(layers, None, [5])
    states.convolve(FIRST, torch.randn(1, CHANNELS, 4))
    with pytest.raises(AssertionError, match="left no recurrent state"):
        states.close()
