import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from stratakv import cli
from stratakv.bench import sparse, sparse_pages, sparse_recorded
from stratakv.bench.sparse_recall import recall_cases
from stratakv.bench.sparse_selections import (
    NEWEST,
    SelectionTraffic,
    clairvoyant_misses,
    generate_selections,
    lru_misses,
)
from stratakv.core.errors import ConfigError
from stratakv.sparse.hot_buffer import MOST_ENTRIES
from stratakv.sparse.swap_in import plan_swap_in
from tests.tiny_v32 import TINY_V32

ENGINES = ("resident_tok_s", "offload_tok_s", "same_memory_tok_s")
TRAFFIC = SelectionTraffic(entries=2000, top_k=200, drift=0.1)


def fewest_misses(selections, buffer):
    """By trying everything."""
    states = {frozenset(): 0}
    for selection in selections.tolist():
        after = {}
        for held, misses in states.items():
            wanted = set(selection) - {-1}
            count = misses + len(wanted - held)
            room = buffer - len(wanted)
            others = sorted(held - wanted)
            for kept in itertools.combinations(others, min(room, len(others))):
                state = frozenset(wanted | set(kept))
                after[state] = min(count, after.get(state, count))
        states = after
    return min(states.values())


@pytest.mark.parametrize("seed", range(30))
def test_nothing_misses_less_than_the_clairvoyant_buffer(seed):
    rng = np.random.default_rng(seed)
    selections = np.array([rng.permutation(7)[:3] for _ in range(8)], np.int32)
    selections[rng.random(selections.shape) < 0.1] = -1
    buffer = int(rng.integers(3, 6))
    assert clairvoyant_misses(selections, buffer).sum() == fewest_misses(selections, buffer)


@pytest.mark.parametrize("uniform", [False, True])
def test_the_planner_misses_what_the_plainest_lru_does_and_no_less_than_the_best(uniform):
    traffic = SelectionTraffic(entries=2000, top_k=200, drift=0.1, uniform=uniform)
    selections = generate_selections(traffic, 60)
    for buffer in (200, 300, 600):
        planned = sparse.planned_misses(selections, buffer).sum()
        assert planned == pytest.approx(lru_misses(selections, buffer).sum(), rel=0.01)
        assert planned >= clairvoyant_misses(selections, buffer).sum()


def test_a_buffer_of_a_selections_size_has_no_choice():
    selections = generate_selections(TRAFFIC, 30)
    counts = [
        misses(selections, TRAFFIC.top_k).tolist()
        for misses in (lru_misses, clairvoyant_misses, sparse.planned_misses)
    ]
    assert counts[0] == counts[1] == counts[2]


def test_made_up_selections_drift_as_far_as_they_should():
    selections = generate_selections(TRAFFIC, 20)
    assert selections.shape == (20, 200)
    for step, selection in enumerate(selections.tolist()):
        assert len(set(selection)) == 200
        assert min(selection) >= 0
        assert max(selection) < TRAFFIC.entries + step + 1
    end = TRAFFIC.entries + 19
    newest = range(end - min(NEWEST, TRAFFIC.top_k // 4), end)
    assert set(newest) <= set(selections[19].tolist())
    assert 0.07 < sparse.drift_of(selections) <= 0.11
    assert (generate_selections(TRAFFIC, 20) == selections).all()


@pytest.fixture
def small(monkeypatch):
    for name, value in {
        "TOP_K": 40, "ENTRIES": 400, "BUFFERS": (40, 80), "STEPS": 12, "WARM_STEPS": 4,
        "PLAN_ENTRIES": 800, "PLAN_BUFFER": 128, "BATCHES": (1, 2), "LAYER_COUNTS": (1, 2),
    }.items():  # fmt: skip
        monkeypatch.setattr(sparse, name, value)
    for name, value in {"STORED_TOKENS": 64, "STORED_LAYERS": 2, "LAPS": 2}.items():
        monkeypatch.setattr(sparse_pages, name, value)
    for name, value in {"HANDED_OVER": 1, "HANDED_OVER_PROMPT": 128}.items():
        monkeypatch.setattr(sparse_pages, name, value)
    load = replace(
        sparse.ON_CPU, shape=TINY_V32, concurrency=(1, 12), context_tokens=344, answer_tokens=4,
        chunk_tokens=64, laps=2,
    )  # fmt: skip
    monkeypatch.setattr(sparse, "ON_CPU", load)
    for name, value in {
        "PROMPT_TOKENS": 120, "ANSWER_TOKENS": 20, "DEEPSEEK_V32_3X512": TINY_V32,
    }.items():  # fmt: skip
        monkeypatch.setattr(sparse_recorded, name, value)


def test_the_report_has_what_the_table_shows(small, capsys, tmp_path):
    recorded = generate_selections(SelectionTraffic(entries=300, top_k=20, drift=0.2), 10)
    np.save(tmp_path / "recorded.npy", recorded)
    figures = sparse.run(str(tmp_path / "recorded.npy"))
    names = {"drift", "buffer", "per_step", "hit_rate", "clairvoyant_hit_rate", "bytes_per_step"}
    assert all(names <= case.keys() for case in figures["misses"])
    layers = TINY_V32["num_hidden_layers"]
    assert len(figures["misses"]) == 3 + 3 * layers + 2 * 3 * 2
    assert all(case["hit_rate"] <= case["clairvoyant_hit_rate"] for case in figures["misses"])
    planners = {case["planner"] for case in figures["plan_us"]}
    assert "numpy" in planners
    assert ("c" in planners) == (sparse.DEFAULT_PLANNER is not plan_swap_in)
    assert all(case["us"] > 0 for case in figures["plan_us"])
    assert [case["path"] for case in figures["page_sizes"]] == ["storage to host", "hand-off"]
    assert all(min(case["gb_s"], case["single_gb_s"]) > 0 for case in figures["page_sizes"])
    alone, many = figures["throughput"]
    assert (alone["concurrency"], many["concurrency"]) == (1, 12)
    assert alone["resident_at_once"] == alone["offload_at_once"] == 1
    assert many["resident_at_once"] <= sparse.ON_CPU.held
    assert many["same_memory_at_once"] > many["resident_at_once"]
    assert sparse.ON_CPU.held < many["offload_at_once"] <= 12  # some may be coming back
    rates = (*ENGINES, "ratio", "cpu_ratio", "same_memory_ratio", "same_memory_cpu_ratio")
    assert all(case[name] > 0 for case in (alone, many) for name in rates)
    printed = capsys.readouterr().out
    assert "recorded" in printed
    assert "approximate" in printed


def test_what_a_running_model_selects_is_recorded_step_by_step(small, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)))
    layers = sparse_recorded.recorded_selections(str(text))
    assert len(layers) == TINY_V32["num_hidden_layers"]
    for steps in layers:
        assert steps.shape == (19, 16)  # the first token is the prompt's
        assert steps.dtype == np.int32
        for step, selection in enumerate(steps.tolist()):
            assert sorted(set(selection)) == selection, "in the order of the context"
            assert selection[0] >= 0
            assert selection[-1] <= 120 + step, "of the context, the newest token among it"
    assert not np.array_equal(layers[0], layers[1])
    assert np.array_equal(layers[0], sparse_recorded.recorded_selections(str(text))[0])


def test_recorded_positions_are_those_of_the_context():
    context = torch.tensor([40, 41, 8, 9, 16])
    found = sparse_recorded.positions(context, torch.tensor([41, 8, 16]))
    assert found.tolist() == [1, 2, 4]


@pytest.mark.parametrize("length", [None, 119])
def test_a_text_that_cannot_be_read_is_refused(length, small, tmp_path, capsys):
    path = tmp_path / "text"
    if length is not None:
        path.write_bytes(bytes(length))
    assert cli.main(["bench", "sparse", "--text", str(path)]) == 2
    assert "--text" in capsys.readouterr().err


def test_pages_by_bounds_carry_more_than_at_random_and_less_than_the_best():
    for case in recall_cases():
        assert case.random_recall < case.recall <= case.best_recall


@pytest.mark.parametrize(
    "bad",
    ["absent", "text", "float", "flat", "empty", "negative", "none", "huge", "wide"],
)
def test_what_are_no_selections_is_refused(bad, tmp_path, capsys):
    path = tmp_path / "recorded.npy"
    made = {
        "float": np.zeros((2, 3)),
        "flat": np.zeros(3, np.int32),
        "empty": np.zeros((0, 3), np.int32),
        "negative": np.full((2, 3), -2, np.int32),
        "none": np.full((2, 3), -1, np.int32),
        "huge": np.full((2, 3), np.iinfo(np.int32).max, np.int32),
        "wide": np.zeros((1, MOST_ENTRIES + 1), np.int32),
    }
    if bad == "text":
        path.write_text("no array")
    elif bad in made:
        np.save(path, made[bad])
    with pytest.raises(ConfigError, match="--selections"):
        sparse.run(str(path))
    assert cli.main(["bench", "sparse", "--selections", str(path)]) == 2
    assert "allowed is" in capsys.readouterr().err
