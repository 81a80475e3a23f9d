"""A step is launched before the last one is collected, and takes its tokens from it."""

import threading
from concurrent.futures import Future
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from stratakv.core.ids import NONE, GroupId
from stratakv.engine.batch import SamplingBatch, StepBatch
from stratakv.engine.executor import OwnTokens
from stratakv.engine.forward import Forward
from stratakv.engine.thread_executor import MirroredRunner, ThreadExecutor
from stratakv.engine.token_ids import token_ids
from stratakv.memory.block_table import BlockTable
from stratakv.testing.compute_queue import ComputeQueue
from stratakv.testing.patience import PATIENCE_S

VOCAB = 100


def batch(rows, tokens):
    count = len(rows)
    return StepBatch(
        rows=np.array(rows, np.int32), starts=np.full(count, 4, np.int32),
        counts=np.ones(count, np.int32), tokens=np.array(tokens, np.int32),
        sampled=np.ones(count, np.bool_), gate=None,
    )  # fmt: skip


def greedy(count):
    return SamplingBatch(
        temperature=np.zeros(count, np.float32), top_p=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int32), seeds=np.zeros(count, np.uint64),
        positions=np.full(count, 5), logprobs=np.full(count, -1, np.int32),
        min_p=np.zeros(count, np.float32),
    )  # fmt: skip


class Counts:
    """A model that counts on: after t comes t + 1. ``held``: until it is let go."""

    def __init__(self):
        self.let, self.seen, self.pages = threading.Event(), [], []
        self.mirror = BlockTable(1, 4, 2)

    def forward(self, batch):
        assert self.let.wait(PATIENCE_S)
        tokens = token_ids(batch, torch.device("cpu"))
        self.seen.append(tokens.tolist())
        self.pages.append(int(self.mirror.pages(GroupId(0))[1, 0]))
        if 66 in tokens:
            raise RuntimeError("the device is gone")
        logits = torch.nn.functional.one_hot(tokens + 1, VOCAB).float()
        return Forward.of_numbers(logits, batch)


class CountedTokens(OwnTokens):
    calls = 0

    def choose(self, forward, params):
        self.calls += 1
        return super().choose(forward, params)


def executor():
    model, tables = Counts(), BlockTable(1, 4, 2)
    runner = MirroredRunner(tables, model.mirror, model)
    source = CountedTokens()
    return ThreadExecutor(runner, source), model, tables, source


def test_the_next_step_is_launched_before_the_last_one_is_collected():
    steps, model, tables, _ = executor()
    assert steps.launched().passed()
    tables.pages(GroupId(0))[1, 0] = 7
    steps.launch(batch([1, 3], [10, 20]), greedy(2))
    first = steps.launched()
    tables.pages(GroupId(0))[1, 0] = 8  # of a later step: this one was launched before
    steps.launch(batch([3, 1, 2], [NONE, NONE, 50]), greedy(3))
    second = steps.launched()
    with pytest.raises(AssertionError):
        steps.launch(batch([1], [NONE]), greedy(1))
    assert not first.passed()
    assert not second.passed()
    model.let.set()
    first.wait()
    assert steps.collect().tokens.tolist() == [11, 21]
    assert steps.collect().tokens.tolist() == [22, 12, 51]
    assert second.passed()
    assert model.seen == [[10, 20], [21, 11, 50]]
    assert model.pages == [7, 8]


def test_a_step_that_fails_raises_where_it_is_collected_and_holds_nothing_up():
    steps, model, _, _ = executor()
    model.let.set()
    steps.launch(batch([1], [66]), greedy(1))
    steps.launched().wait()
    assert steps.launched().passed()
    with pytest.raises(RuntimeError, match="the device is gone"):
        steps.collect()
    steps.launch(batch([1], [5]), greedy(1))
    assert steps.collect().tokens.tolist() == [6]


def test_a_row_without_logits_goes_on_until_somebody_knows():
    steps, model, _, _ = executor()
    model.let.set()
    forward = model.forward

    def broken(batch):
        found = forward(batch)
        found.logits[0] = torch.nan
        return found

    model.forward = broken
    steps.launch(batch([1], [5]), greedy(1))
    steps.launch(batch([1], [NONE]), greedy(1))
    assert steps.collect().tokens.tolist() == [-1]
    steps.collect()
    assert model.seen[1] == [0]


def test_tokens_are_chosen_once_and_the_source_is_asked_when_they_are_collected():
    steps, model, _, source = executor()
    model.let.set()
    steps.launch(batch([1], [5]), greedy(1))
    steps.launched().wait()
    assert source.calls == 0
    steps.collect()
    assert source.calls == 1


def test_a_mirror_knows_that_a_row_was_spilled_again():
    """By that the copies of whoever sat there before are forgotten."""
    group = GroupId(0)
    tables, mirror = (BlockTable(1, 2, 4, {group: 2}) for _ in range(2))
    model = Counts()
    model.let.set()
    runner = MirroredRunner(tables, mirror, model)
    for _ in range(3):
        tables.spilled[group].open(1, np.array([0, 1], np.int32))
        runner.computed(runner.tables(), batch([1], [10]))
        for (name, mine), (_, theirs) in zip(mirror.columns(), tables.columns(), strict=True):
            assert mine.tolist() == theirs.tolist(), name
        assert mirror.spilled[group].times.tolist() == tables.spilled[group].times.tolist()
        tables.spilled[group].close_row(1)


class Queued:
    """A device's stream: what it is given is computed later. Who asks for logits waits for them."""

    def __init__(self, model):
        self._model, self.queue, self.entered = model, ComputeQueue(Random(1)), []

    def enter(self):
        self.entered.append(threading.current_thread().name)

    def mark(self):
        return self.queue.fence()

    def forward(self, batch):
        found = Future()
        self.queue.launch(lambda: found.set_result(self._model.forward(batch)))
        if batch.sampled.any():
            return found.result(PATIENCE_S)
        return Forward.of_numbers(torch.empty(0, VOCAB), batch)


def test_a_step_that_samples_nothing_has_passed_when_its_device_has_done_it():
    """Its tokens, which are none, are known at once: by then nothing need be computed."""
    model, tables = Counts(), BlockTable(1, 4, 2)
    device = Queued(model)
    runner = MirroredRunner(tables, model.mirror, device)
    steps = ThreadExecutor(runner, OwnTokens(), device)
    chunk = replace(batch([1], [10]), sampled=np.zeros(1, np.bool_))
    steps.launch(chunk, greedy(0))
    fence = steps.launched()
    assert steps.collect().tokens.tolist() == []
    assert not fence.passed()
    model.let.set()
    fence.wait()
    assert fence.passed()
    assert model.seen == [[10]]
    assert len(device.entered) == 1
    device.queue.close()


def test_a_step_that_fails_has_passed_when_its_device_has_done_what_it_was_given():
    model, tables = Counts(), BlockTable(1, 4, 2)
    device = Queued(model)
    runner = MirroredRunner(tables, model.mirror, device)
    forward = device.forward

    def broken(batch):
        forward(batch)
        raise RuntimeError("out of memory")

    device.forward = broken
    steps = ThreadExecutor(runner, OwnTokens(), device)
    steps.launch(replace(batch([1], [10]), sampled=np.zeros(1, np.bool_)), greedy(0))
    with pytest.raises(RuntimeError, match="out of memory"):
        steps.collect()
    fence = steps.launched()
    assert not fence.passed()
    model.let.set()
    fence.wait()
    assert model.seen == [[10]]
    device.queue.close()


class OtherRank(OwnTokens):
    """Ranks agree on rank 0's tokens, which are not this one's where ``agreed`` says so."""

    def __init__(self, agreed):
        self.agreed = list(agreed)

    def choose(self, forward, params):
        own = super().choose(forward, params)
        tokens = own.tokens.copy()
        for at, token in enumerate(self.agreed.pop(0)):
            tokens[at] = token
        return replace(own, tokens=tokens)


def ranked(*agreed):
    model, tables = Counts(), BlockTable(1, 4, 2)
    model.let.set()
    return ThreadExecutor(MirroredRunner(tables, model.mirror, model), OtherRank(agreed))


def test_a_step_that_went_on_from_another_token_than_the_ranks_agreed_on_is_no_step():
    """Its keys would be stored under the name of a token that they are not of."""
    steps = ranked([11, 99], [])
    steps.launch(batch([1, 3], [10, 20]), greedy(2))
    steps.launch(batch([3], [NONE]), greedy(1))
    assert steps.collect().tokens.tolist() == [11, 99]
    with pytest.raises(AssertionError, match=r"different tokens for rows \[3\]"):
        steps.collect()


def test_another_token_that_nothing_went_on_from_does_no_harm():
    """As of a row with a grammar, which rank 0 alone knows and which is never computed ahead."""
    steps = ranked([11, 89], [], [])
    steps.launch(batch([1, 3], [10, 20]), greedy(2))
    steps.launch(batch([1], [NONE]), greedy(1))
    steps.collect()
    steps.launch(batch([1, 3], [NONE, 89]), greedy(2))
    assert steps.collect().tokens.tolist() == [12]
    assert steps.collect().tokens.tolist() == [13, 90]
