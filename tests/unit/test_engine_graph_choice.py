"""Which steps are replayed as CUDA graphs, and why others are not."""

from dataclasses import replace

import numpy as np
import pytest

from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.batch import StepBatch
from stratakv.engine.cuda.graph_choice import (
    DEFAULT_MAX_BS,
    SPLITS,
    Eager,
    GraphOptions,
    GraphSizes,
)

SIZES = GraphSizes.upto(20, 1024)


def decoding(rows, start=100):
    some = np.arange(rows, dtype=np.int32)
    return StepBatch(
        rows=some,
        starts=some + start,
        counts=np.ones(rows, np.int32),
        tokens=some,
        sampled=np.ones(rows, np.bool_),
        gate=None,
    )


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 9)), (24, (1, 2, 4, 8, 16, 24)), (30, (1, 2, 4, 8, 16, 24, 30)),
    ],
)  # fmt: skip
def test_sizes_grow_by_eight_up_to_the_largest(most, sizes):
    assert GraphSizes.upto(most, 1024).sizes == sizes


def test_a_step_takes_the_smallest_size_that_holds_it():
    chosen = [SIZES.choose(decoding(rows)) for rows in range(1, 22)]
    assert chosen == [1, 2, 4, 4, *[8] * 4, *[16] * 8, *[20] * 4, Eager.ROWS]


def test_what_is_no_pure_decode_step_runs_eagerly():
    batch = decoding(3)
    with_chunk = np.array([1, 1, 2], np.int32)
    assert SIZES.choose(replace(batch, counts=with_chunk)) is Eager.CHUNKS
    first = np.array([5, 0, 7], np.int32)
    assert SIZES.choose(replace(batch, starts=first)) is Eager.CHUNKS
    assert SIZES.choose(replace(batch, gate=object())) is Eager.LOADING
    assert SIZES.choose(replace(batch, adapters=first)) is Eager.ADAPTERS
    assert SIZES.choose(replace(batch, scored=batch.sampled)) is Eager.SCORED


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 4), (17, 20)])
def test_contexts_are_as_long_as_the_parts_that_all_rows_share(rows, size):
    longest = SPLITS // size * 1024
    assert SIZES.tokens(size) == longest
    last = decoding(rows, start=longest - rows)
    assert last.starts.max() == longest - 1
    assert SIZES.choose(last) == size
    assert SIZES.choose(decoding(rows, start=longest - rows + 1)) is Eager.LONG


def test_a_graph_of_any_number_of_rows_takes_some_context():
    assert GraphSizes((SPLITS * 2,), 1024).tokens(SPLITS * 2) == 1024


def test_the_largest_graph_has_as_many_rows_as_run_or_as_are_allowed():
    assert GraphOptions().most(32) == 32
    assert GraphOptions().most(10_000) == DEFAULT_MAX_BS
    assert GraphOptions(max_bs=48).most(10_000) == 48
    assert GraphOptions(max_bs=48).most(32) == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cuda_graph_max_bs": 8}, "--cuda-graph-max-bs: allowed with --device cuda"),
        ({"disable_cuda_graph": True}, "--disable-cuda-graph: allowed with --device cuda"),
        (
            {"device": "cuda", "cuda_graph_max_bs": 0},
            "--cuda-graph-max-bs 0: allowed is 1 and more",
        ),
        (
            {"device": "cuda", "cuda_graph_max_bs": 64},
            "--cuda-graph-max-bs 64: allowed is --max-running 32 at most",
        ),
        (
            {"device": "cuda", "cuda_graph_max_bs": 8, "disable_cuda_graph": True},
            "--cuda-graph-max-bs: allowed without --disable-cuda-graph",
        ),
        (
            {"device": "cuda", "cuda_graph_max_bs": 8, "tp": 2},
            "--cuda-graph-max-bs: allowed with --tp 1; steps of --tp 2 run eagerly",
        ),
    ],
)
def test_flags_that_would_do_nothing_are_refused(changes, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        EngineConfig(**changes)
    assert EngineConfig(device="cuda", cuda_graph_max_bs=32).cuda_graph_max_bs == 32
