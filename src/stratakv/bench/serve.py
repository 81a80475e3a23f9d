"""``stratakv bench serve``: what the cache's tiers bring, and how the engine compares.

Owns the report. Directly on the engine, without HTTP; one torch thread. Takes at most three minutes
of two cores that do nothing else.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Final, TypeAlias

from stratakv.assembly.devices import device_of
from stratakv.assembly.models import EngineParts, build_engine
from stratakv.bench.baselines import TARGETS, Baseline, compare, work_s
from stratakv.bench.countdown import Countdown
from stratakv.bench.first_token import (
    HOST_TARGET,
    PROMPT_TOKENS,
    STORAGE_TARGET,
    TARGET,
    FirstTokenCase,
    first_token,
)
from stratakv.bench.gpu_serve import run_on
from stratakv.bench.play import PlayFigures, play
from stratakv.bench.rig import config_for, errors_alone, one_thread
from stratakv.bench.shapes import BASELINES, FIRST_TOKENS, HYBRID, build
from stratakv.bench.workload import Chat, TraceScale, Workload, scaled_trace
from stratakv.core.choices import TIERS
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.model import HuggingFaceModel, load_model, wrap
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
_PLAY_S: Final = 5.0
_FIRST_TOKEN_S: Final = 3.5
"""About how long a play and a first token take."""
_Report: TypeAlias = dict[str, list[dict[str, object]]]
MODE_NAMES: Final = {"off": "off", "device": "device", "host": "device+host"}


def run(*, trace: str | None, model: str | None, device: str = "cpu") -> dict[str, object]:
    """Measure, and print three tables; what they say, also where it was interrupted (Ctrl-C) before
    all of it was there.

    ``trace``: a Mooncake-format file, in place of the generated chat. ``model``: a directory, in
    place of the built-in random hybrid. ``device``: cuda has a model of its own. ConfigError where
    either cannot be read, or goes with --device cpu alone.
    """
    if device != "cpu":
        for flag, given in (("--trace", trace), ("--model", model)):
            if given is not None:
                raise ConfigError(f"{flag}: allowed with --device cpu")
        eager = EngineConfig(device=device, disable_cuda_graph=True)
        return run_on(device_of(EngineConfig(device=device)), device_of(eager))
    report: _Report = {"modes": [], "baselines": [], "first_tokens": []}
    work = _PLAY_S * len(TIERS) + sum(map(work_s, BASELINES)) + _FIRST_TOKEN_S * len(FIRST_TOKENS)
    progress = Countdown(work)
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
        report["modes"].append(mode)
        cells = [f"{mode[name]:>{len(name)}.0f}" for name in names]
        _print("  ".join([f"{mode['mode']:11s}", *cells]), progress)
        progress.one_more(_PLAY_S)
    progress.at("beside Hugging Face")
    print("16 prompts of 256 + 128 new tokens; ratios (and what they must reach)", flush=True)
    for name in BASELINES:
        _baseline(name, report["baselines"], progress)
    progress.at("first tokens")
    print(
        f"first token of {PROMPT_TOKENS:,} tokens: computed, and what a hit takes of that (at most "
        f"{TARGET}) and of one on the device (host {HOST_TARGET}, storage {STORAGE_TARGET})",
        flush=True,
    )
    for family, shape in FIRST_TOKENS.items():
        case = first_token(family, build(shape))
        report["first_tokens"].append(asdict(case))
        _print(_line(case), progress)
        progress.one_more(_FIRST_TOKEN_S)


def _baseline(name: str, rows: list[dict[str, object]], progress: Countdown) -> None:
    """One row, which grows: it has what was measured before an interruption too."""
    shown: list[str] = []
    for one in compare(name, build(BASELINES[name]), progress.one_more):
        if not shown:
            rows.append({})
            speeds = f"ours {one.ours_tok_s:.0f}, generate {one.generate_tok_s:.0f} tok/s"
            _print(f"{name}: {speeds}", progress)
        rows[-1] = asdict(one)
        ratios = _ratios(one)
        _print("  " + "  ".join(text for text in ratios if text not in shown), progress)
        shown = ratios


def _print(line: str, progress: Countdown) -> None:
    progress.clear()
    print(line, flush=True)


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
    goal = TARGETS[one.model]
    ratios = (
        ("to generate", one.ours_tok_s / one.generate_tok_s, goal.ours_to_generate),
        ("to generate_batch", one.batching_ratio, goal.ours_to_generate_batch),
        ("ragged", one.ragged_ratio, goal.ragged),
        ("without reuse", one.no_reuse_ratio, goal.no_reuse),
        ("and with a store", one.no_reuse_storage_ratio, goal.no_reuse),
    )
    return [f"{name} {ratio:.2f} ({aim})" for name, ratio, aim in ratios if ratio is not None]


def _line(one: FirstTokenCase) -> str:
    return (
        f"{one.family:11s}  {one.recompute_ms:5.0f} ms  on the device {one.device_hit_ratio:.3f}"
        f"  from the host {one.host_hit_ratio:.3f} {one.host_to_device:.2f}"
        f"  from storage {one.storage_hit_ratio:.3f} {one.storage_to_device:.2f}"
    )
