import pytest
import torch.distributed as dist

from stratakv.agreement import torch_ranks
from stratakv.agreement.torch_ranks import BACKENDS, join
from stratakv.core.choices import DEVICES


def test_every_device_has_a_way_for_its_ranks_and_ballots_stay_on_the_cpu():
    assert BACKENDS.keys() == set(DEVICES)
    assert all("gloo" in way for way in BACKENDS.values())
    assert BACKENDS["cuda"] == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_meet_over_the_way_of_their_device(device, monkeypatch):
    given = []
    monkeypatch.setattr(dist, "init_process_group", lambda way, **_: given.append(way))
    monkeypatch.setattr(torch_ranks, "TorchRanks", lambda timeout_s: timeout_s)
    join(0, 1, "env://", 5.0, backend=BACKENDS[device])
    assert given == [BACKENDS[device]]
