"""``stratakv bench serve``: what the cache's tiers bring, and how the engine compares.

Owns the report. Directly on the engine, without HTTP; one torch thread. Takes 6 to 8 minutes.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Final, TypeAlias

from stratakv.assembly.models import EngineParts, build_engine
from stratakv.bench.baselines import TARGETS, Baseline, compare
from stratakv.bench.countdown import Countdown
from stratakv.bench.first_token import PROMPT_TOKENS, TARGET, FirstTokenCase, first_token
from stratakv.bench.play import PlayFigures, play
from stratakv.bench.rig import config_for, errors_alone, one_thread
from stratakv.bench.shapes import BASELINES, FIRST_TOKENS, HYBRID, build
from stratakv.bench.workload import Chat, TraceScale, Workload, scaled_trace
from stratakv.core.choices import TIERS
from stratakv.engine.model import HuggingFaceModel, load_model, wrap
from stratakv.spec.budget import ExpectedLoad
from stratakv.spec.derive import spec_of

PAGE_TOKENS: Final = 16
MAX_RUNNING: Final = 4
MAX_TOKENS: Final = 4096
CHUNK_TOKENS: Final = 512
DEVICE_LONGEST: Final = 6
"""The device tier holds this many of the workload's longest requests: the running ones and little
beside them, so that a conversation is gone from it before its next turn."""
HOST_RATIO: Final = 8.0
_Report: TypeAlias = dict[str, list[dict[str, object]]]
MODE_NAMES: Final = {"off": "off", "device": "device", "host": "device+host"}


def run(*, trace: str | None, model: str | None) -> dict[str, object]:
    """Measure, and print three tables; what they say, also where it was interrupted (Ctrl-C) before
    all of it was there.

    ``trace``: a Mooncake-format file, in place of the generated chat. ``model``: a directory, in
    place of the built-in random hybrid. ConfigError where either cannot be read.
    """
    report: _Report = {"modes": [], "baselines": [], "first_tokens": []}
    progress = Countdown(len(TIERS) + len(BASELINES) + len(FIRST_TOKENS), "measurements")
    interrupted = False
    with one_thread(), errors_alone("transformers"), errors_alone("ContinuousBatchingLogger"):
        try:
            _measure(trace, model, report, progress)
        except KeyboardInterrupt:
            interrupted = True
    progress.clear()
    return {**report, "interrupted": interrupted}


def _measure(trace: str | None, model: str | None, report: _Report, progress: Countdown) -> None:
    """Put each figure into the report as soon as it is there: all of them take minutes."""
    progress.at("by tier")
    own = wrap(build(HYBRID)) if model is None else load_model(Path(model))
    workload = _workload(own, trace)
    print(f"workload: {workload.name}")
    names = tuple(PlayFigures.__dataclass_fields__)
    print("  ".join(["mode       ", *names]), flush=True)
    for tier in TIERS:
        mode = _mode(own, workload, tier)
        cells = [f"{mode[name]:>{len(name)}.0f}" for name in names]
        _report_one(report["modes"], mode, progress, "  ".join([f"{mode['mode']:11s}", *cells]))
    progress.at("beside Hugging Face")
    print("16 prompts of 256 + 128 new tokens; ratios (and what they must reach)", flush=True)
    for name, shape in BASELINES.items():
        one = compare(name, build(shape))
        line = f"{name}: ours {one.ours_tok_s:.0f}, generate {one.generate_tok_s:.0f} tok/s\n"
        line += "  ".join(f"  {text}" for text in _ratios(one))
        _report_one(report["baselines"], asdict(one), progress, line)
    progress.at("first tokens")
    print(
        f"first token of {PROMPT_TOKENS:,} tokens: computed, and what a hit takes of that "
        f"(at most {TARGET})",
        flush=True,
    )
    for family, shape in FIRST_TOKENS.items():
        case = first_token(family, build(shape))
        _report_one(report["first_tokens"], asdict(case), progress, _line(case))


def _report_one(
    so_far: list[dict[str, object]], one: dict[str, object], progress: Countdown, line: str
) -> None:
    so_far.append(one)
    progress.clear()
    print(line, flush=True)
    progress.one_more()


def _workload(model: HuggingFaceModel, trace: str | None) -> Workload:
    longest = min(MAX_TOKENS, model.max_positions - 1)
    if trace is not None:
        scale = TraceScale(max_tokens=longest, vocabulary=model.vocab_size)
        return scaled_trace(Path(trace), scale)
    return Chat.within(longest, model.vocab_size)


def _mode(model: HuggingFaceModel, workload: Workload, tier: str) -> dict[str, object]:
    parts = _engine(model, workload, tier)
    try:
        figures = play(parts.engine, workload)
        parts.engine.check()
    finally:
        parts.close()
    return {"mode": MODE_NAMES[tier], "workload": workload.name, **asdict(figures)}


def _engine(model: HuggingFaceModel, workload: Workload, tier: str) -> EngineParts:
    longest = workload.longest
    spec = spec_of(model.config, page_tokens=PAGE_TOKENS, dtype=model.dtype)
    load = ExpectedLoad(
        max_running=MAX_RUNNING,
        max_model_len=longest + 1,
        chunk_tokens=CHUNK_TOKENS,
        chat_tokens=longest,
    )
    tokens = DEVICE_LONGEST * -(-longest // PAGE_TOKENS) * PAGE_TOKENS
    host_ratio = HOST_RATIO if tier == "host" else None
    return build_engine(model, config_for(spec, tokens, load, cache=tier, host_ratio=host_ratio))


def _ratios(one: Baseline) -> list[str]:
    goal, ours, batching = TARGETS[one.model], one.ours_tok_s, one.generate_batch_tok_s
    ratios = (
        ("to generate", ours / one.generate_tok_s, goal.ours_to_generate),
        ("to generate_batch", batching and ours / batching, goal.ours_to_generate_batch),
        ("ragged", one.ragged_ratio, goal.ragged),
        ("without reuse", one.no_reuse_ratio, goal.no_reuse),
        ("and with a store", one.no_reuse_storage_ratio, goal.no_reuse),
    )
    return [f"{name} {ratio:.2f} ({aim})" for name, ratio, aim in ratios if ratio is not None]


def _line(one: FirstTokenCase) -> str:
    return (
        f"{one.family:11s}  {one.recompute_ms:5.0f} ms  on the device {one.device_hit_ratio:.3f}"
        f"  from the host {one.host_hit_ratio:.3f}  from storage {one.storage_hit_ratio:.3f}"
    )
