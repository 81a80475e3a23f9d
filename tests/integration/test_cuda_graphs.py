"""An engine as ``--device cuda`` assembles it, whose decode steps are replayed as graphs: requests
that come, end and are retracted get the tokens that they get where nothing is recorded."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from stratakv.assembly.graphs import capture_on, reads_groups, refusal
from stratakv.assembly.models import build_engine
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.cuda.graph_choice import GraphSizes
from stratakv.engine.huggingface.model import wrap
from stratakv.spec.derive import spec_of
from tests.engines import asked_of_lengths, drain, logprobs_of, retract_youngest, tokens_of
from tests.fake_graphs import Computed, FakeGraphs, NotCapturableError, as_on_a_gpu
from tests.fixtures.models import (
    changed_model,
    model_to_give_away,
    random_prompt,
    reference_greedy,
    tiny_model,
)
from tests.late_gpu import AT, late_gpu

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}:RuntimeWarning")
    for words in ("All-NaN slice", "invalid value")
]
MOST_LEN = 160
EAGER = ("dbrx", "deepseek_v3", "deepseek_v4", "longcat_flash", "phimoe")
LONG = ("llama", "llama4", "gpt_oss", "mamba2", "falcon_h1", "mixtral")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    as_on_a_gpu(monkeypatch)


def config(**changes):
    return EngineConfig(
        device="cuda", device_memory="3MiB", host_memory="1MiB", max_running=5, step_tokens=64,
        max_model_len=MOST_LEN, **changes,
    )  # fmt: skip


def serve(family, graphs, act):
    """What ``act`` gives of an engine; ``graphs`` is poisoned on the page of padding."""
    device, driver = late_gpu(seed=1, graphs=None if graphs is None else lambda: graphs)
    parts = build_engine(wrap(model_to_give_away(family)), config(), device)

    def poison():
        for group in parts.spec.groups:
            for buffer in group.buffers:
                for layer in buffer.layers:
                    pages = parts.pools.layer(group.id, buffer.name, layer)
                    pages[parts.pools.pages[group.id] :] = float("nan")

    if graphs is not None:
        graphs.before_replay = poison
    try:
        found = act(parts)
        parts.engine.check()
        return found
    finally:
        parts.close()
        driver.close()


def grow_shrink_and_come_back(parts):
    """More requests than rows; the youngest is retracted twice; a second turn finds the pages of
    the first."""
    out = {}
    for name in ("first", "second"):
        prompts = asked_of_lengths(name, 6, 4)
        out |= {prompt.id: [] for prompt in prompts}
        for prompt in prompts:
            parts.engine.submit(prompt)
        for step in range(12):
            for output in parts.engine.step():
                out[output.request].append(output)
            if step in (5, 9):
                retract_youngest(parts)
        for output in drain(parts):
            out[output.request].append(output)
    return out


@pytest.mark.parametrize(
    "family", ["qwen3_next", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
def test_requests_get_the_tokens_that_they_get_without_graphs(family):
    """To the bit beside the same shapes computed anew, near beside steps that are not padded, and
    the tokens of Hugging Face."""
    graphs = FakeGraphs()
    found = serve(family, graphs, grow_shrink_and_come_back)
    assert all(graph.replays for graph in graphs.graphs), "a size is never replayed"
    again = serve(family, Computed(), grow_shrink_and_come_back)
    eager = serve(family, None, grow_shrink_and_come_back)
    for name, outputs in found.items():
        at = int(name.split()[1])
        prompt = random_prompt(at, 20 + 9 * at)
        wanted, _ = reference_greedy(tiny_model(family), prompt, 4 + 2 * at)
        assert tokens_of(outputs) == tokens_of(again[name]) == tokens_of(eager[name]) == wanted
        assert logprobs_of(outputs) == logprobs_of(again[name])
        assert np.allclose(logprobs_of(outputs), logprobs_of(eager[name]), atol=1e-4)


@pytest.mark.parametrize(
    "family", ["dbrx", "deepseek_v3", "deepseek_v4", "longcat_flash", "phimoe"]
)
def test_a_family_whose_steps_are_not_recorded_runs_eagerly_and_the_log_says_so(family, caplog):
    graphs = FakeGraphs()
    device, driver = late_gpu(graphs=lambda: graphs)
    with caplog.at_level(logging.INFO):
        parts = build_engine(wrap(model_to_give_away(family)), config(), device)
    parts.close()
    driver.close()
    assert "decode steps run eagerly, not as CUDA graphs" in caplog.text
    assert not graphs.graphs


def test_angles_that_follow_the_length_are_not_recorded():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = wrap(changed_model("llama", rope_parameters=rope))
    spec = spec_of(model.config, page_tokens=16, dtype=model.dtype)
    assert "rotary angles" in refusal(model, spec)
    assert "several ranks" in refusal(replace(wrap(model_to_give_away("llama")), ranks=2), spec)
    assert refusal(wrap(model_to_give_away("llama")), spec) is None


def test_products_of_experts_are_recorded_where_torch_does_not_read_their_sizes():
    experts, dense_layers = tiny_model("gpt_oss"), tiny_model("llama")
    assert not reads_groups(experts, torch.bfloat16, (9, 0))
    assert not reads_groups(experts, torch.bfloat16, (10, 3))
    assert reads_groups(experts, torch.bfloat16, (12, 0))
    assert reads_groups(experts, torch.bfloat16, (8, 0))
    assert reads_groups(experts, torch.float16, (10, 0))
    assert not reads_groups(dense_layers, torch.float16, (8, 0))


class Failing:
    """A ``GraphRunner`` that records nothing."""

    sizes = GraphSizes.upto(24, 1024)

    def __init__(self, error):
        self.error = error

    def capture(self):
        raise self.error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            r"^--cuda-graph-max-bs: CUDA graphs of up to 24 requests do not fit .*; 3 GiB of cpu w",
        ),
        (
            NotCapturableError("operation not permitted"),
            r"^--device cuda: .* allowed with --disable-cuda-graph: operation not permitted$",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused(error, message):
    with pytest.raises(ConfigError, match=message):
        capture_on(AT, Failing(error), lambda: 3 << 30)


def test_the_log_has_what_graphs_take(caplog):
    free = iter([3 << 30, 2 << 30])
    runner = Failing(None)
    runner.capture = lambda: None
    with caplog.at_level(logging.INFO):
        capture_on(AT, runner, lambda: next(free))
    assert "6 CUDA graphs of up to 24 requests, recorded in 0.0 s, take 1 GiB of cpu" in caplog.text
