"""The GPU's driver as torch has it, as far as that can be said without a GPU."""

import threading

import pytest
import torch

from stratakv.engine.cuda import driver as cuda_driver

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
