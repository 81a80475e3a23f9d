"""Hit == recompute on somebody's own checkpoint: what ``stratakv verify`` finds out, and its words.

Owns the prompts, the order of a verification (refuse, load, measure rounding, try every way), and
the report. Must not print.
"""

import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final
from uuid import uuid4

import numpy as np

from stratakv.assembly import device
from stratakv.assembly.models import check_model
from stratakv.assembly.sizing import spec_for
from stratakv.assembly.verify_engine import TrialShape, store_worker, trials
from stratakv.assembly.weights import weights_bytes
from stratakv.core.clock import MonotonicClock
from stratakv.core.config import EngineConfig
from stratakv.core.errors import ConfigError
from stratakv.core.free_memory import free_host_bytes
from stratakv.core.units import format_bytes
from stratakv.engine.huggingface.model import load_model
from stratakv.engine.huggingface.model_facts import read_facts
from stratakv.engine.verify.claims import Settings, Verifier, cut_sizes, widest_reach
from stratakv.engine.verify.report import Differs, Exact, NotRun, VerifyReport, Way, WayResult
from stratakv.engine.verify.rounding import bound_beside, compare_rounded, measure_rounding
from stratakv.serve.verify_storage import check_quota
from stratakv.spec.budget import device_bytes, host_bytes
from stratakv.spec.groups import CacheSpec
from stratakv.spec.support import refusal

MAX_RUNNING: Final = 8
ALONE_PAGES: Final = 8
"""Of the longest prompt, where no window reaches further."""
BEHIND_PAGES: Final = 3
"""Beyond the widest window, so that pages have left it."""
FARTHEST: Final = 4096
"""Tokens of a window that the longest prompt goes beyond; further ones would take an hour."""
MOST_ROUNDING: Final = 0.05
"""Of two batch shapes, in parts of the largest logit: where they differ by more, a wrong page would
not stand out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """``page_tokens`` None: the model's own. ``prompt_tokens``: of the longest prompt. ``storage``:
    a URL that ``check_store`` allows; None: files in a temporary directory, which go afterwards."""

    model: Path
    dtype: str
    page_tokens: int | None
    prompt_tokens: int | None
    storage: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVerdict:
    """``rounding``: what two batch shapes differ by without a cache; ``bound``: what a hit may;
    both in parts of the largest logit."""

    model: str
    dtype: str
    page_tokens: int
    lengths: tuple[int, ...]
    rounding: float
    bound: float
    report: VerifyReport

    @property
    def saved_s(self) -> float:
        return sum(result.saved_s or 0.0 for result in self.report.results)

    def lines(self) -> list[str]:
        """For people."""
        asked = ", ".join(map(str, self.lengths))
        lines = [
            f"{self.model}: {self.dtype}, pages of {self.page_tokens} tokens, prompts of {asked}",
            f"{'tier':<9}{'path':<17}{'verdict':<9}{'deviation':>9}{'computed':>10}{'hit':>9}",
        ]
        lines += [_line(result) for result in self.report.results]
        beside = (
            f"without a cache, two batch shapes differ by {self.rounding:.1e} of the largest "
            f"logit; a hit may by {self.bound:.1e}"
        )
        verdict = "hit = recompute" if self.report.exact else "hit is NOT recompute"
        return [
            *lines,
            beside,
            f"{verdict}; {self.saved_s:.2f} s saved until first tokens",
        ]

    def figures(self) -> Mapping[str, object]:
        """All of it as plain data."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "page_tokens": self.page_tokens,
            "prompt_tokens": list(self.lengths),
            "batch_shapes_differ_by": self.rounding,
            "bound": self.bound,
            "exact": self.report.exact,
            "saved_s": self.saved_s,
            "ways": [_figures(result) for result in self.report.results],
        }


def verify_model(options: VerifyOptions, show: Callable[[str], None]) -> ModelVerdict:
    """``show``: is called with a line about what begins. ConfigError for a model that cannot be
    served or verified, StorageError for a store, AssertionError where the engine's own books are
    wrong, TimeoutError where it hangs."""
    facts = read_facts(options.model, options.dtype)
    config = EngineConfig(page_tokens=options.page_tokens)
    check_model(facts, config)
    spec = spec_for(facts, config)
    if reason := refusal(spec):
        raise ConfigError(f"MODEL: it cannot be served: {reason}")
    shape = trial_shape(spec, options.prompt_tokens, facts.max_positions)
    _check_memory(spec, shape, weights_bytes(options.model, facts.dtype))
    if options.storage is not None:
        each = (shape.pages,) * len(spec.groups)
        check_quota(options.storage, sum(each), host_bytes(spec, each))
    show(f"loading {options.model}")
    model = load_model(options.model, options.dtype)
    spec = spec_for(model.facts, config)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, model.vocab_size, n).astype(np.int32) for n in shape.lengths]
    salt, cuts = f"verify {uuid4()}", cut_sizes(spec, model.config, max(shape.lengths))
    with _store(options.storage) as url:
        start = trials(
            model, spec, shape, lambda: device.CPU, partial(store_worker, url, model, spec)
        )
        show("without a cache, in two batch shapes")
        loose = Settings(bound=1.0, salt=salt, cuts=cuts)
        rounding = measure_rounding(start, prompts, loose, MonotonicClock())
        if not rounding <= MOST_ROUNDING:
            raise ConfigError(
                f"--dtype {options.dtype}: without a cache, two batch shapes differ by "
                f"{rounding:.1e} of the largest logit already; a wrong page would not stand out; "
                "allowed is a dtype, as float32, in which they do not"
            )
        settings = Settings(bound=bound_beside(rounding), salt=salt, cuts=cuts)
        ways = tuple(Way)
        report = Verifier(start, prompts, settings, judge=compare_rounded).run(
            ways, lambda way: show(f"{ways.index(way) + 1} of {len(ways)}: {way.value}")
        )
    return ModelVerdict(
        model=str(options.model),
        dtype=model.dtype,
        page_tokens=spec.page_tokens,
        lengths=shape.lengths,
        rounding=rounding,
        bound=settings.bound,
        report=report,
    )


def trial_shape(spec: CacheSpec, prompt_tokens: int | None, max_positions: int) -> TrialShape:
    """Prompts of several pages, the longest beyond the model's windows, in chunks that end within a
    page. ConfigError where no such prompt fits the model."""
    page = spec.page_tokens
    # A turn goes on from the longest with its answer and a third of it, and is answered too.
    most, least = (max_positions - 16) * 3 // 4, 3 * page
    if most < least:
        raise ConfigError(
            f"--page-tokens {page}: the model's positions end at {max_positions}, and a prompt has "
            f"three pages at least; allowed is {max(0, most // 3)} or less"
        )
    beyond = min(widest_reach(spec), FARTHEST) + BEHIND_PAGES * page
    longest = min(most, max(ALONE_PAGES * page, beyond) + 7)
    if prompt_tokens is not None:
        if not least <= prompt_tokens <= most:
            raise ConfigError(
                f"--prompt-tokens {prompt_tokens}: allowed are {least} to {most}, three pages and "
                "what the model's positions leave"
            )
        longest = prompt_tokens
    lengths = (longest, max(2 * page + 1, longest * 5 // 8), max(2 * page, longest // 3))
    # A turn adds a third of its prompt: more than one chunk of the longest.
    chunk = max(1, min(5 * page // 2, longest // 4))
    return TrialShape(
        page_tokens=page, chunk_tokens=chunk, max_running=MAX_RUNNING, lengths=lengths
    )


def _check_memory(spec: CacheSpec, shape: TrialShape, weights: int) -> None:
    each = (shape.pages,) * len(spec.groups)
    taken = weights + device_bytes(spec, each) + host_bytes(spec, each)
    free = free_host_bytes()
    if taken > free:
        raise ConfigError(
            f"MODEL: weights and pages take {format_bytes(taken)}, and {format_bytes(free)} are "
            f"free; allowed are shorter prompts than --prompt-tokens {max(shape.lengths)}, and "
            "--dtype bfloat16"
        )


@contextmanager
def _store(url: str | None) -> Generator[str]:
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="stratakv-verify-") as directory:
        yield f"file://{directory}?quota=64GiB"


def _line(result: WayResult) -> str:
    begun = f"{result.tier:<9}{result.path:<17}"
    timed = result.saved_s is not None
    match result.verdict:
        case Exact(error):
            line = f"{begun}{'exact':<9}{error:>9.1e}"
            return f"{line}{result.computed_s:>8.2f} s{result.hit_s:>7.2f} s" if timed else line
        case Differs(prompt, token, error, what):
            at = "" if token is None else f", token {token}"
            return f"{begun}{'DIFFERS':<9}{error:>9.1e} prompt {prompt}{at}: {what}"
        case NotRun(why):
            return f"{begun}{'not run':<9}{why}"


def _figures(result: WayResult) -> Mapping[str, object]:
    found: dict[str, object] = {"tier": result.tier, "path": result.path, "way": result.way.value}
    match result.verdict:
        case Exact(error):
            found |= {"verdict": "exact", "deviation": error}
        case Differs(prompt, token, error, what):
            found |= {"verdict": "differs", "prompt": prompt, "token": token, "why": what}
            found["deviation"] = error if np.isfinite(error) else None
        case NotRun(why):
            found |= {"verdict": "not run", "why": why}
    if result.saved_s is not None:
        found |= {"computed_s": result.computed_s, "hit_s": result.hit_s, "saved_s": result.saved_s}
    return found
