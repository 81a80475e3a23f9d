"""The device on which a wait of the host is an error: each wait is found, and nothing else."""

import numpy as np
import pytest
import torch

from stratakv.engine.tensors import on_host
from tests.host_reads import AWAY, Away, HostReadError, away, no_host_reads

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture(name="inference")
def in_inference_mode():
    with torch.inference_mode():
        yield


def numbers():
    return Away(torch.arange(6.0))


WAITS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool((x > 1).any()),
    "float": lambda x: float(x.sum()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": np.asarray,
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", non_blocking=True),
    "nonzero": lambda x: (x > 1).nonzero(),
    "where": lambda x: torch.where(x > 1),
    "by a mask": lambda x: x[x > 1],
    "put by a mask": lambda x: x.__setitem__(x > 1, x[:1]),
    "masked_select": lambda x: x.masked_select(x > 1),
    "by a list": lambda x: x[[0, 2]],
    "by indices of the host": lambda x: x[torch.tensor([0, 2])],
    "put a number of the host": lambda x: x.index_put_((x[:1].long(),), torch.tensor(1.0)),
    "bincount": lambda x: x.long().bincount(minlength=9),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "pageable": lambda x: torch.zeros(3).to(x.device, non_blocking=True),
    "pinned, and waited for": lambda x: torch.zeros(3).pin_memory().to(x.device),
    "copied from pageable": lambda x: x.copy_(torch.zeros(6), non_blocking=True),
    "copied to pageable": lambda x: torch.zeros(6).copy_(x, non_blocking=True),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_host_would_wait(name):
    with no_host_reads(), pytest.raises((HostReadError, RuntimeError)):
        WAITS[name](numbers())


GOES_ON = {
    "arithmetic": lambda x: (x * 2 + 1).softmax(-1),
    "a number of the host": lambda x: x * torch.tensor(2.0),
    "masked_fill": lambda x: x.masked_fill(x > 1, -torch.inf),
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "by indices": lambda x: x[torch.arange(2, device=x.device)],
    "by a slice": lambda x: x[1:3].fill_(7),
    "repeats of a known size": lambda x: x.repeat_interleave(x.long(), output_size=15),
    "repeats alike": lambda x: x.repeat_interleave(2),
    "sort": lambda x: x.sort(descending=True),
    "pinned": lambda x: torch.zeros(3).pin_memory().to(x.device, non_blocking=True) + x[:3],
}


@pytest.mark.parametrize("name", GOES_ON)
def test_the_host_goes_on(name):
    with no_host_reads() as reads:
        GOES_ON[name](numbers())
    assert not reads.count


def test_a_read_of_several_is_one_wait():
    x = numbers()
    with no_host_reads() as reads:
        more, less = on_host(x + 1, x.long() - 1)
    assert reads.count == 1
    assert (more - less).tolist() == [2.0] * 6


def test_bytes_are_there_only_once_they_were_waited_for():
    there = torch.zeros(6)
    with no_host_reads():
        pinned = there.pin_memory()
        pinned.copy_(numbers(), non_blocking=True)
        assert pinned.tolist() != list(range(6))
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        assert pinned.tolist() == list(range(6))


def test_what_was_not_brought_there_is_found():
    with pytest.raises(AssertionError, match="tensors on the host, and there"), no_host_reads():
        numbers() + torch.zeros(6)


def test_a_module_runs_there():
    module = torch.nn.Linear(6, 2)
    wanted = module(torch.arange(6.0))
    away(module)
    with no_host_reads():
        found = module(numbers())
    assert found.device == AWAY
    assert torch.equal(found.here, wanted)
