"""Several ranks of one test, each a process of its own, that can talk through gloo.

Owns what a test's rank does before and after its function. A rank that raises or hangs fails the
test in time, and none outlives it: ``bench.ranks_processes`` sees to that.
"""

from collections.abc import Callable

import torch.distributed as dist

from stratakv.agreement.torch_ranks import TorchRanks
from stratakv.bench.ranks_processes import on_ranks
from stratakv.core.errors import RankLostError
from stratakv.testing.patience import PATIENCE_S
from tests.forks import fork_server

SLACK_S = 3.0
"""A rank that waits for one that hangs raises first, and says where."""


def run_ranks(
    ranks: int, function: Callable[..., object], *args: object, timeout_s: float = PATIENCE_S
) -> list[object]:
    """``function(*args)`` in each of ``ranks`` processes, within a process group of gloo; what it
    returns, by rank. ``function`` and ``args`` are pickled, so both come from a module.

    AssertionError with the traceback of every rank that raised, or that ended or hung without a
    word; then all of them are killed.
    """
    fork_server()
    limit_s, given = timeout_s + SLACK_S, (function, args)
    try:
        return on_ranks(ranks, _act, given, limit_s, collective_s=timeout_s)
    except RankLostError as error:
        raise AssertionError(str(error)) from None


def _act(ranks: TorchRanks, given: tuple[Callable[..., object], tuple[object, ...]]) -> object:
    function, args = given
    answer = function(*args)
    dist.barrier()
    ranks.close()
    return answer
