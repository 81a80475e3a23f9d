"""Lives of an engine over a storage tier, in the engine's own environment, for ``bench connect``.

Owns prompts, the model that is built where none is given, and what a tier's directory has. Must not
import an engine, nor compare. Run as ``python -m stratakv.bench.connect_lives LIFE LIVED`` with two
files of JSON, one life each: what comes back after a restart has to come from the directory.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np

BenchTier: TypeAlias = Literal["strata", "own"]
Answer: TypeAlias = Callable[[list[int]], int]
Settle: TypeAlias = Callable[[float], float]
PAGE_TOKENS: Final = 32
"""Of a page, in both engines; vLLM's CPU kernels take multiples of it."""
SHARED_TOKENS: Final = 8 * PAGE_TOKENS
"""With which all prompts begin."""
WARM_UP_TOKENS: Final = 2 * PAGE_TOKENS
HOST_BYTES: Final = 1 << 30
"""Of the engine's host tier."""
VOCABULARY: Final = 512
_PAGES_FROM_BYTES: Final = 1 << 16
"""A smaller file holds no pages."""
_QUIET_S: Final = 1.0
LAYERS: Final = 4
HEADS: Final = 8
HEAD_WIDTH: Final = 128
_USUAL: Final = {
    "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "hidden_size": 256,
    "intermediate_size": 512, "max_position_embeddings": 8192, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "head_dim": HEAD_WIDTH,
}  # fmt: skip
_MIXED: Final = {
    "sliding_window": 256,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {"model_type": "llama"},
    "gemma3": {"model_type": "gemma3_text", "query_pre_attn_scalar": 128, **_MIXED},
    "laguna": {"model_type": "laguna", "mlp_layer_types": ["dense"] * 4, **_MIXED},
}
"""Thin models with pages of a real size, 32 KiB a token: what is measured is the tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """An engine over ``directory`` answers ``prompts``, by seed, one after another. ``stand_ins``:
    what stands in for a GPU is on the path. ``quota_bytes``: 0 for none."""

    engine: str
    model: str
    tier: BenchTier
    directory: str
    quota_bytes: int
    prompts: tuple[int, ...]
    prompt_tokens: int
    stand_ins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Lived:
    """By prompt: seconds to the first token, and tokens that were not computed. ``answer_cpu_s``:
    of the engine's processors, from the first prompt to the last answer; ``cpu_s``, ``written_s``
    and ``written_bytes``: until the last page was written. ``disk_bytes``: what the directory takes
    then."""

    first_token_s: tuple[float, ...]
    cached: tuple[int, ...]
    answer_cpu_s: float
    written_s: float
    cpu_s: float
    written_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Calls:
    """Of each batch of pages: seconds, and seconds of processors, to store it, and to read it from
    files that have left the page cache."""

    store: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    read: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])


def measure(life: Life, answer: Answer, settle: Settle) -> Lived:
    """Ask all prompts of ``life``, one after another, after one that is none of them. ``answer``:
    tokens of a prompt that were not computed. ``settle``: wait until nothing is left to write; the
    seconds from a moment (``time.time``) to the last write."""
    answer(warm_up())
    settle(time.time())
    taken_s: list[float] = []
    cached: list[int] = []
    before, used_s, begun_s = written_bytes(), cpu_s(), time.time()
    for seed in life.prompts:
        tokens = prompt(seed, life.prompt_tokens)
        asked_s = time.perf_counter()
        cached.append(answer(tokens))
        taken_s.append(time.perf_counter() - asked_s)
    answered_s = cpu_s()
    written_s = settle(begun_s)
    return Lived(
        first_token_s=tuple(taken_s),
        cached=tuple(cached),
        answer_cpu_s=answered_s - used_s,
        written_s=written_s,
        cpu_s=cpu_s() - used_s,
        written_bytes=written_bytes() - before,
        disk_bytes=disk_bytes(Path(life.directory)),
    )


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids; all seeds begin alike."""
    head = np.random.default_rng(0).integers(0, VOCABULARY, SHARED_TOKENS)
    own = np.random.default_rng(seed + 1).integers(0, VOCABULARY, tokens)
    return [*head.tolist(), *own.tolist()][:tokens]


def warm_up() -> list[int]:
    """A prompt that shares nothing and never comes back."""
    seed = int.from_bytes(os.urandom(4), "little")
    return np.random.default_rng(seed).integers(0, VOCABULARY, WARM_UP_TOKENS).tolist()


def write_model(family: str, directory: Path) -> None:
    """A checkpoint of ``FAMILIES`` with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - of the engine's

    shape: dict[str, Any] = {**_USUAL, **FAMILIES[family]}
    config = AutoConfig.for_model(**shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def disk_bytes(directory: Path) -> int:
    """What its files take."""
    return sum(stat.st_blocks * 512 for _, stat in _files(directory))


def written_bytes() -> int:
    """What this process and those that it has started have written to disks so far."""
    total = 0
    for pid in _own_processes():
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            total += int(dict(line.split(": ") for line in lines)["write_bytes"])
    return total


def cpu_s() -> float:
    """What these processes have used of processors so far, in the kernel too."""
    ticks = 0
    for pid in _own_processes():
        with suppress(OSError):
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(after_name[11]) + int(after_name[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_processes() -> set[int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return ours


def wait_until_quiet(directory: Path, begun_s: float) -> float:
    """Until no page has been written for a while; from ``begun_s`` (``time.time``) to the last."""
    while True:
        written = [s.st_mtime for _, s in _files(directory) if s.st_size >= _PAGES_FROM_BYTES]
        last_s = max(written, default=begun_s)
        if time.time() - max(last_s, begun_s) > _QUIET_S:
            return last_s - begun_s
        time.sleep(_QUIET_S / 10)


def drop_cached(directory: Path) -> None:
    """Its files leave the kernel's page cache: whoever reads them next reads the disk."""
    for path, _ in _files(directory):
        with suppress(FileNotFoundError):
            end = os.open(path, os.O_RDONLY)
            try:
                os.fsync(end)
                os.posix_fadvise(end, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(end)


def _files(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):  # a tier renames and removes what it likes
            if path.is_file():
                yield path, path.stat()


def main(life_file: str, lived_file: str) -> None:
    """``alone`` of a life: of the tiers' calls, without a model."""
    given: dict[str, Any] = json.loads(Path(life_file).read_text())
    if "family" in given:
        write_model(given["family"], Path(given["directory"]))
        return
    given["prompts"] = tuple(given["prompts"])
    alone = given.pop("alone")
    life = Life(**given)
    Path(life.directory).mkdir(exist_ok=True)
    if alone:
        found = import_module("stratakv.bench.connect_calls").measure_calls(life)
        calls = {tier: asdict(one) for tier, one in found.items()}
        Path(lived_file).write_text(json.dumps(calls))
        return
    drop_cached(Path(life.directory))
    live = import_module(f"stratakv.bench.connect_{life.engine}").live
    Path(lived_file).write_text(json.dumps(asdict(live(life))))


if __name__ == "__main__":
    main(*sys.argv[1:])
