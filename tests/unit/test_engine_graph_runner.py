"""Decode steps that are replayed give what the same steps give computed, over batches that grow,
shrink, move to other pages and are padded; padding touches nothing that anyone owns."""

from dataclasses import replace
from functools import cache
from itertools import count

import numpy as np
import pytest
import torch

from stratakv.assembly.graphs import is_recordable, refusal
from stratakv.engine.attention.dense_kernels import DenseKernels
from stratakv.engine.attention.torch_pools import TensorPools
from stratakv.engine.attention.triton_kernels import SPLIT_TOKENS, WorkTensors
from stratakv.engine.batch import StepBatch
from stratakv.engine.cuda.graph_choice import Eager, GraphSizes
from stratakv.engine.cuda.graph_runner import GraphRunner
from stratakv.engine.huggingface.model import wrap
from stratakv.engine.huggingface.runner import ModelRunner
from stratakv.memory.block_table import BlockTable
from stratakv.spec.derive import spec_of
from tests.exact_families import every_long_family
from tests.fake_graphs import Computed, FakeGraphs, NotCapturableError, as_on_a_gpu
from tests.fixtures.bounds import bound_of
from tests.fixtures.models import model_to_give_away, random_prompt

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}:RuntimeWarning")
    for words in ("All-NaN slice", "invalid value")
]
AT = torch.device("cpu")
PAGE, ROWS = 16, 5
BLOCK, BLOCKS = 6, 10
"""Pages of a block, and blocks."""
SIZES = GraphSizes.upto(4, SPLIT_TOKENS)
FAMILIES = ("gemma2", "qwen3_next")
"""A window, full attention and softcap; states beside attention."""
LONG = ("llama", "llama4", "gpt_oss", "mamba2", "falcon_h1", "lfm2", "mixtral", "gemma3n_text")
every_kind = pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    as_on_a_gpu(monkeypatch)


class Rig:
    """A runner and its rows, each on a block of pages that it owns alone; all others hold NaN."""

    def __init__(self, family, graphs, padding=BLOCKS * BLOCK):
        model = wrap(model_to_give_away(family))
        self.spec = spec_of(model.config, page_tokens=PAGE, dtype=model.dtype)
        count = len(self.spec.groups)
        self.pools = TensorPools(self.spec, [BLOCKS * BLOCK] * count, AT, padding=1)
        self.tables = BlockTable(count, ROWS + 1, 8)
        self.eager = ModelRunner(
            model, self.spec, self.pools, self.tables, DenseKernels(AT, model.module.dtype)
        )
        self.runner = GraphRunner(
            self.eager, self.tables, dict.fromkeys(range(count), padding), graphs, SIZES
        )
        self.lengths, self.blocks = [40, 3, 70, 21, 55], list(range(ROWS))
        self.poison(range(BLOCKS * BLOCK))
        for row in range(ROWS):
            self.point(row, row)

    def layers(self):
        for group in self.spec.groups:
            for buffer in group.buffers:
                for layer in buffer.layers:
                    yield self.pools.layer(group.id, buffer.name, layer)

    def poison(self, pages):
        for layer in self.layers():
            layer[list(pages)] = float("nan")

    def point(self, row, block):
        """At a block of pages."""
        self.blocks[row], slots = block, self.tables.slots
        for group in range(len(self.spec.groups)):
            self.tables.pages(group)[row, :BLOCK] = pages_of(block)
            slots.own(group)[row] = slots.source(group)[row] = block * BLOCK

    def move(self, row, block):
        """To other pages, as a request that was retracted and has come back."""
        old, new = (list(pages_of(at)) for at in (self.blocks[row], block))
        for layer in self.layers():
            layer[new] = layer[old]
        self.poison(old)
        self.point(row, block)

    def prompts(self, *rows):
        """From their beginnings; every row has one."""
        prompts = [random_prompt(row, self.lengths[row]) for row in rows]
        counts = [len(prompt) for prompt in prompts]
        return batch(rows, [0] * len(rows), counts, np.concatenate(prompts))

    def next(self, *rows):
        """A token more of each of ``rows``, any one."""
        starts = [self.lengths[row] for row in rows]
        for row in rows:
            self.lengths[row] += 1
        return batch(rows, starts, [1] * len(rows), [7 * at % 200 + 1 for at in starts])

    def owned(self, *rows):
        """Pages of these rows, and the one of padding."""
        pages = [page for row in rows for page in pages_of(self.blocks[row])]
        return [*pages, BLOCKS * BLOCK]

    def others(self, *rows):
        """What is on all pages but theirs."""
        kept = np.setdiff1d(np.arange(BLOCKS * BLOCK + 1), self.owned(*rows))
        return [layer[kept].clone() for layer in self.layers()]


def pages_of(block):
    return range(block * BLOCK, (block + 1) * BLOCK)


def batch(rows, starts, counts, tokens):
    arrays = (np.array(of, np.int32) for of in (rows, starts, counts, tokens))
    given = dict(zip(("rows", "starts", "counts", "tokens"), arrays, strict=True))
    return StepBatch(**given, sampled=np.ones(len(rows), np.bool_), gate=None)


STALE = ("slots", "first", "decoding")
MOVES = {2: (1, 7), 4: (2, 8), 5: (1, 9)}
"""Before a step: a row, and the block that it moves to."""
STEPS = ((0,), (0, 1), (0, 1, 2), (3, 0, 2, 1), (1, 2), (2, 4, 1), (4,), (0, 3, 4, 2, 1), (1, 3))
"""Rows of each, that grow and shrink; one step has more than any graph."""


def stepped(rig, look=lambda rig, rows, before: None):
    """Logits of each step."""
    rig.runner.capture()
    found = [rig.runner.forward(rig.prompts(*range(ROWS)))]
    for at, rows in enumerate(STEPS):
        if at in MOVES:
            rig.move(*MOVES[at])
        before = rig.others(*rows)
        found.append(rig.runner.forward(rig.next(*rows)))
        assert found[-1].finite.all()
        look(rig, rows, before)
    return [one.logits for one in found]


def untouched(rig, rows, before):
    for old, new in zip(before, rig.others(*rows), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8)), "somebody else's page"


def poisoned(family, graphs, **changed):
    """NaN is on the page of padding before each step."""
    rig = Rig(family, graphs, **changed)
    graphs.before_replay = lambda: rig.poison([BLOCKS * BLOCK])
    return rig


@cache
def computed(family):
    """What the same steps give, of the same shapes, where nothing is recorded."""
    return stepped(poisoned(family, Computed()))


@every_kind
def test_steps_that_are_replayed_give_what_computing_them_gives(family):
    """To the bit where the shapes are the same; near where a step is computed without padding, by
    other kernels."""
    graphs = FakeGraphs()
    rig = poisoned(family, graphs)
    found = stepped(rig, untouched)
    assert [len(graphs.graphs), graphs.warmed] == [len(SIZES.sizes)] * 2
    assert sum(graph.replays for graph in graphs.graphs) == len(STEPS) - 1
    chosen = {1: 2, 2: 3, 4: 3, Eager.CHUNKS: 1, Eager.ROWS: 1}
    assert rig.runner.steps == chosen
    for one, other in zip(found, computed(family), strict=True):
        assert torch.equal(one, other)
    beside = Rig(family, Computed())
    beside.runner = beside.eager
    beside.eager.capture = lambda: None
    for one, other in zip(found, stepped(beside), strict=True):
        assert (one - other).abs().max() <= bound_of(family) * other.abs().max()


def test_logits_stay_when_the_next_step_is_replayed():
    rig = poisoned("llama", FakeGraphs())
    rig.runner.capture()
    rig.runner.forward(rig.prompts(*range(ROWS)))
    first = rig.runner.forward(rig.next(0, 1)).logits
    kept = first.clone()
    rig.runner.forward(rig.next(2, 3))
    assert torch.equal(first, kept)


def test_rows_that_sample_nothing_have_no_logits():
    rig = poisoned("llama", FakeGraphs())
    other = Rig("llama", Computed())
    some = np.array([True, False, True])
    found = []
    for one in (rig, other):
        one.runner.capture()
        one.runner.forward(one.prompts(*range(ROWS)))
        step = one.next(0, 1, 2)
        found += [one.runner.forward(step if one is other else replace(step, sampled=some))]
    assert torch.equal(found[0].logits, found[1].logits[[0, 2]])


class Gate:
    def __init__(self):
        self.waited = []

    def wait(self, layer):
        self.waited.append(layer)


def test_a_step_whose_pages_are_loading_waits_layer_by_layer_and_is_not_replayed():
    graphs, gate = FakeGraphs(), Gate()
    rig = poisoned("llama", graphs)
    rig.runner.capture()
    rig.runner.forward(rig.prompts(*range(ROWS)))
    rig.runner.forward(replace(rig.next(0, 1), gate=gate))
    assert sorted(set(gate.waited)) == list(range(len(list(rig.layers())) // 2))
    assert not any(graph.replays for graph in graphs.graphs)
    assert rig.runner.steps[Eager.LOADING] == 1


@every_long_family
def test_each_family_is_recorded_or_is_known_not_to_be(family):
    graphs = FakeGraphs()
    model = wrap(model_to_give_away(family))
    spec = spec_of(model.config, page_tokens=PAGE, dtype=model.dtype)
    if not is_recordable(spec):
        assert refusal(model, spec) is not None
        return
    rig = Rig(family, graphs)
    if refusal(model, spec) is None:
        rig.runner.capture()
        assert len(graphs.graphs) == len(SIZES.sizes)
    else:
        with pytest.raises(NotCapturableError):
            rig.runner.capture()


def test_a_damaged_row_harms_its_own_alone():
    rig = poisoned("llama", FakeGraphs())
    rig.runner.capture()
    rig.runner.forward(rig.prompts(*range(ROWS)))
    rig.poison(list(pages_of(1))[:1])
    found = rig.runner.forward(rig.next(0, 1, 2))
    assert found.finite.tolist() == [True, False, True]


# -- seeded bugs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stale", ["table", *(pytest.param(name, marks=pytest.mark.long) for name in STALE)]
)
def test_a_buffer_that_is_not_filled_again_is_seen(monkeypatch, stale):
    """Of each size and group it stays what it was when it was filled first."""
    of, kept, calls = WorkTensors.of, {}, count()
    wanted, rig = computed("gemma2"), poisoned("gemma2", FakeGraphs())
    groups = len(rig.eager.groups)

    def forgetful(cls, step, device):
        found = of(step, device)
        old = kept.setdefault((len(found.slots), next(calls) % groups), found)
        return replace(found, **{stale: getattr(old, stale)})

    capture = rig.runner.capture
    monkeypatch.setattr(rig.runner, "capture", lambda: None)
    capture()
    monkeypatch.setattr(WorkTensors, "of", classmethod(forgetful))
    try:
        found = stepped(rig, untouched)
    except AssertionError:
        return
    assert not all(map(torch.equal, found, wanted))


def test_padding_on_somebodys_page_is_seen():
    rig = Rig("llama", FakeGraphs(), padding=3 * BLOCK)
    with pytest.raises(AssertionError, match="somebody else's page"):
        stepped(rig, untouched)


def test_a_size_that_is_too_small_is_seen(monkeypatch):
    choose = GraphSizes.choose

    def smaller(self, batch):
        size = choose(self, batch)
        return 2 if size == 4 else size

    monkeypatch.setattr(GraphSizes, "choose", smaller)
    with pytest.raises(ValueError, match="negative dimensions"):
        stepped(Rig("llama", FakeGraphs()))
