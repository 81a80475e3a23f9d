"""The GPU's driver as torch has it, as far as that can be said without a GPU."""

import threading

import pytest
import torch

from stratakv.engine.cuda import driver as cuda_driver
from stratakv.engine.cuda import graphs as cuda_graphs

AT = torch.device("cuda", 1)


class Stream:
    device = AT


class Event:
    """Asked of a thread that has not been given its GPU, it would take memory of the first one."""

    def __init__(self, *, blocking):
        assert blocking, "who waits would take a core"

    def record(self, stream):
        assert stream.device == AT

    def query(self):
        assert CURRENT.device == AT
        return True

    synchronize = query


CURRENT = threading.local()


@pytest.mark.parametrize("ask", [cuda_driver.TorchEvent.passed, cuda_driver.TorchEvent.block])
def test_a_thread_that_asks_for_an_event_has_its_gpu(ask, monkeypatch):
    CURRENT.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_device", lambda at: setattr(CURRENT, "device", at))
    ask(cuda_driver.TorchEvent(Stream()))
    assert CURRENT.device == AT


def test_what_is_recorded_goes_before_copies(monkeypatch):
    """Kernels of a graph have the priority of the stream on which they were recorded."""
    made = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda at: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", lambda at, priority=0: made.append((at, priority)))
    cuda_graphs.TorchGraphs(AT)
    assert made == [(AT, cuda_driver.FIRST)]
