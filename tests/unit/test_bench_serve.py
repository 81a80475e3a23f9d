import json
import signal
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from stratakv.assembly.device import CPU
from stratakv.bench import baselines, first_token, races, serve
from stratakv.bench.countdown import Countdown
from stratakv.bench.per_request import PER_REQUEST
from stratakv.bench.play import play
from stratakv.bench.shapes import BASELINES, FIRST_TOKENS, build
from stratakv.bench.workload import Chat
from stratakv.cli import main
from stratakv.core.config import EngineConfig
from stratakv.engine.huggingface.model import wrap
from tests.engines import greedy, run, small_engine, tokens_of
from tests.fixtures.models import VOCABULARY, model_to_give_away, random_prompt

CONFIG = EngineConfig(page_tokens=16, max_running=4, max_model_len=512)
CHAT = Chat(
    users=5, turns=3, system_tokens=48, message_tokens=20, answer_tokens=5, vocabulary=VOCABULARY
)

ABSENT = ["batching_ratio", "ragged_ratio", "no_reuse_ratio", "no_reuse_storage_ratio"]
"""What a model with states is not compared by."""


def test_a_play_times_every_token_and_counts_the_cache():
    with small_engine(wrap(model_to_give_away("gemma3")), CONFIG, (18, 18), (200, 200)) as parts:
        figures = play(parts.engine, CHAT)
        stats = parts.engine.stats()
    assert stats.output_tokens == 5 * 3 * 5
    assert figures.cached_device_tokens == stats.cached_device_tokens > 0
    assert figures.cached_host_tokens == stats.cached_host_tokens > 0
    assert 0 < figures.ttft_ms_p50 <= figures.ttft_ms_p99
    assert 0 < figures.itl_ms_p50 <= figures.itl_ms_p99
    assert figures.prompt_tok_s / figures.output_tok_s == pytest.approx(stats.prompt_tokens / 75)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_the_per_request_loop_says_the_same_on_a_ragged_batch(family):
    prompts = [greedy(str(n), random_prompt(n, n), 12) for n in (3, 30, 31, 200)]
    answers = []
    for device in (CPU, PER_REQUEST):
        model = wrap(model_to_give_away(family))
        pages = (40,) * (1 if family == "llama" else 2)
        with small_engine(model, CONFIG, pages, (0,) * len(pages), device_kind=device) as parts:
            out = run(parts, *prompts)
        answers.append({name: tokens_of(outputs) for name, outputs in out.items()})
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", list(FIRST_TOKENS))
def test_a_first_token_is_computed_found_and_loaded(family, monkeypatch):
    """``first_token`` itself asserts where each prompt was found."""
    monkeypatch.setattr(first_token, "PROMPT_TOKENS", 320)
    monkeypatch.setattr(first_token, "ROUNDS", 1)
    found = first_token.first_token(family, build(FIRST_TOKENS[family]))
    assert found.family == family
    assert found.recompute_ms > 0
    assert found.device_hit_ratio > 0
    assert found.host_hit_ratio > 0
    assert found.storage_to_device > 0


def test_a_race_beside_generate_serves_every_token_of_both():
    """The rests are turns too: 20 tokens are two turns of 8 and what is left."""
    prompts = [np.array(random_prompt(n, 24), np.int32) for n in range(3)]
    model = wrap(model_to_give_away("qwen3_next"))
    with small_engine(model, CONFIG, (40, 40), (0, 0)) as parts:
        ours, plain = races.race_generate(
            parts.engine, model_to_give_away("qwen3_next"), prompts, 20
        )
        assert not parts.engine.has_work()
        assert parts.engine.stats().output_tokens == 3 * 20
    assert len(ours) == len(plain) == 3
    assert min(ours + plain) > 0


def test_what_disturbs_one_round_does_not_count():
    assert races.undisturbed_s([[1.0, 9.0, 1.5], [8.0, 2.0, 1.0]]) == 4.0


FIGURES = baselines.Baseline(model="llama 8x256", ours_tok_s=2.0, generate_tok_s=1.0)


def test_what_was_measured_before_ctrl_c_is_printed_and_written(monkeypatch, capsys, tmp_path):
    """The signal comes in the middle of a model's comparisons, with others still to come."""

    def compare(name, model, passed):
        yield FIGURES
        passed(1.0)
        yield replace(FIGURES, batching_ratio=3.0)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(serve, "compare", compare)
    monkeypatch.setattr(serve, "DEVICE_LONGEST", 2)
    monkeypatch.setattr(serve.Chat, "within", lambda longest, vocabulary: CHAT)
    threads, written = torch.get_num_threads(), tmp_path / "figures.json"
    assert main(["bench", "serve", "--json", str(written)]) == 130
    report = json.loads(written.read_text())
    assert report["interrupted"]
    assert [mode["mode"] for mode in report["modes"]] == ["off", "device", "device+host"]
    assert report["baselines"] == [asdict(replace(FIGURES, batching_ratio=3.0))]
    assert report["first_tokens"] == []
    shown = capsys.readouterr()
    assert "llama 8x256: ours 2, generate 1 tok/s\n  to generate 2.00 (1.3)\n" in shown.out
    assert "\n  to generate_batch 3.00 (2.5)\n" in shown.out
    assert "stratakv: interrupted" in shown.err
    assert torch.get_num_threads() == threads


class _Counted(Countdown):
    total = units = 0.0

    def __init__(self, total):
        super().__init__(total)
        _Counted.total, _Counted.units = total, 0.0

    def one_more(self, units=1.0):
        super().one_more(units)
        _Counted.units += units


def test_the_report_has_every_mode_baseline_and_first_token(monkeypatch, capsys):
    monkeypatch.setattr(baselines, "PROMPTS", 2)
    monkeypatch.setattr(baselines, "PROMPT_TOKENS", 8)
    monkeypatch.setattr(baselines, "NEW_TOKENS", 3)
    monkeypatch.setattr(baselines, "RAGGED", (40, 8))
    monkeypatch.setattr(baselines, "RAGGED_STEPS", 2)
    monkeypatch.setattr(baselines, "SINGLE_PROMPT_TOKENS", 3)
    monkeypatch.setattr(baselines, "ALONE_NEW", 2)
    monkeypatch.setattr(baselines, "ROUNDS", dict.fromkeys(BASELINES, 1))
    monkeypatch.setattr(baselines, "RAGGED_ROUNDS", 1)
    monkeypatch.setattr(baselines, "ALONE_ROUNDS", 1)
    monkeypatch.setattr(baselines, "BATCHING_NEW", 2)
    monkeypatch.setattr(races, "TURN_STEPS", 2)
    monkeypatch.setattr(serve, "DEVICE_LONGEST", 2)
    monkeypatch.setattr(serve.Chat, "within", lambda longest, vocabulary: CHAT)
    monkeypatch.setattr(first_token, "PROMPT_TOKENS", 320)
    monkeypatch.setattr(first_token, "ROUNDS", 1)
    monkeypatch.setattr(serve, "FIRST_TOKENS", {"lfm2": FIRST_TOKENS["lfm2"]})
    # Transformers' continuous batching takes its time to start; its call is not ours.
    monkeypatch.setattr(baselines, "generate_batch", lambda model, prompts, new_tokens: 1.0)
    threads = torch.get_num_threads()
    monkeypatch.setattr(serve, "Countdown", _Counted)
    report = serve.run(trace=None, model=None)
    assert torch.get_num_threads() == threads
    assert json.loads(json.dumps(report)) == report
    assert not report["interrupted"]
    assert [mode["mode"] for mode in report["modes"]] == ["off", "device", "device+host"]
    off, device, host = report["modes"]
    assert off["cached_device_tokens"] == off["cached_host_tokens"] == 0
    assert device["cached_host_tokens"] == 0 < device["cached_device_tokens"]
    assert host["cached_host_tokens"] > 0
    assert [one["model"] for one in report["baselines"]] == list(BASELINES)
    for one in report["baselines"]:
        absent = [key for key in one if one[key] is None]
        states = one["model"].startswith(("qwen3_next", "nemotron_h"))
        assert absent == ABSENT * states
        figures = [value for key, value in one.items() if key != "model" and key not in absent]
        assert all(np.isfinite(figures))
        assert min(figures) > 0
    assert [one["family"] for one in report["first_tokens"]] == ["lfm2"]
    printed = capsys.readouterr().out
    assert "workload: chat: 5 users" in printed
    assert "gpt_oss 4x64: ours" in printed
    assert "\nlfm2 " in printed
    assert "None" not in printed
    assert _Counted.units == pytest.approx(_Counted.total)
