"""``stratakv bench load``: a model from disk until all its weights are resident, and what its
identity costs.

Owns the measurement. The yardstick is Hugging Face's loader alone, after which every page of its
mapped weights is touched once; it is interleaved with ours, which hashes every byte. Cold is with
the files dropped from the page cache and no digests known; warm is the next start, with both. A
bare read of the files says what the disk gives. Takes three times the checkpoint's 1 GB of memory.
"""

import gc
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from stratakv.bench.rig import Laps, in_turn
from stratakv.core.clock import WallClock
from stratakv.core.identity.digest_cache import YOUNG_S, DigestCache
from stratakv.core.identity.file_stat import Kernel, boot_of_this_machine
from stratakv.core.model_identity import ModelIdentity, Surroundings
from stratakv.engine.huggingface.model import load_model

TARGET: Final = 1.2
"""Of a cold start, ours to Hugging Face's."""
LAYERS: Final = 8
HIDDEN: Final = 2048
VOCAB: Final = 32_000
REPEATS: Final = 5
_CHUNK_BYTES: Final = 2 << 20
_PAGE_BYTES: Final = 4096
_SEED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCase:
    """Medians; a ratio, ours to Hugging Face's, is the median of those of neighbouring runs. GB are
    10^9 bytes."""

    page_cache: str
    read_gb_s: float
    theirs_s: float
    ours_s: float
    wall_ratio: float
    theirs_cpu_s: float
    ours_cpu_s: float
    cpu_ratio: float


def run(directory: Path | None = None) -> dict[str, object]:
    """Measure with a checkpoint in ``directory`` (default: the one for temporary files), and print
    a table. About a minute."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="stratakv-bench-") as name:
        model = Path(name) / "model"
        write_checkpoint(model)
        threads = Surroundings.here().threads
        cases = [
            measure(model, None, threads),
            measure(model, Path(name) / "digests", threads),
        ]
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    print(f"{size / 1e9:.2f} GB of bfloat16 until all are resident, {threads} threads")
    print("page cache  bare read   Hugging Face     StrataKV         ratio")
    print("            GB/s        wall s  CPU s    wall s  CPU s    wall   CPU")
    for case in cases:
        print(
            f"{case.page_cache:10s}  {case.read_gb_s:9.2f}   {case.theirs_s:6.2f} "
            f"{case.theirs_cpu_s:6.2f}    {case.ours_s:6.2f} {case.ours_cpu_s:6.2f}    "
            f"{case.wall_ratio:4.2f}  {case.cpu_ratio:4.2f}"
        )
    return {
        "target": {"cold_wall_ratio": TARGET},
        "bytes": size,
        "threads": threads,
        "cases": [asdict(case) for case in cases],
    }


def write_checkpoint(directory: Path) -> None:
    """A llama in bfloat16, of random bytes."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=VOCAB,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(directory)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(_SEED)
    weights = {
        name: torch.randint(-(1 << 15), 1 << 15, tensor.shape, dtype=torch.int16, generator=random)
        for name, tensor in module.state_dict().items()
    }
    stored = {name: values.view(torch.bfloat16) for name, values in weights.items()}
    save_file(stored, directory / "model.safetensors", {"format": "pt"})


def measure(model: Path, digests: Path | None, threads: int) -> LoadCase:
    """Cold, or with ``digests`` of an earlier start and the files in the page cache."""
    cold = digests is None
    boot = boot_of_this_machine()
    around = Surroundings(Kernel(boot=boot), DigestCache(digests, boot, WallClock()), threads)
    files = sorted(model.glob("*.safetensors"))

    def bare() -> None:
        _read(files, threads)

    def theirs() -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(
            model,
            dtype="auto",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )

    def ours() -> nn.Module:
        return load_model(model, identity=ModelIdentity(model, None, around)).module

    if not cold:
        time.sleep(YOUNG_S)  # files that are younger have no digests kept
    ways: Mapping[str, Callable[[], nn.Module | None]] = {
        "bare": bare, "theirs": theirs, "ours": ours,
    }  # fmt: skip
    wall, cpu = Laps(), Laps()
    for turn in range(REPEATS + 1):
        for name in in_turn(sorted(ways), turn):
            if cold:
                _drop(files)
            gc.collect()  # the last model's memory, and its mapping of the files
            begin_s = time.process_time()
            wall.time(name, lambda load=ways[name]: _touch(load()))
            cpu.add(name, time.process_time() - begin_s)
    size = sum(file.stat().st_size for file in files)
    return LoadCase(
        page_cache="cold" if cold else "warm",
        read_gb_s=size / 1e9 / wall.median_s("bare"),
        theirs_s=wall.median_s("theirs"),
        ours_s=wall.median_s("ours"),
        wall_ratio=wall.ratio("ours", "theirs"),
        theirs_cpu_s=cpu.median_s("theirs"),
        ours_cpu_s=cpu.median_s("ours"),
        cpu_ratio=cpu.ratio("ours", "theirs"),
    )


def _touch(module: nn.Module | None) -> None:
    """Every page of every weight."""
    for weight in () if module is None else module.parameters():
        weight.detach().reshape(-1).view(torch.uint8)[::_PAGE_BYTES].sum()


def _drop(files: Sequence[Path]) -> None:
    gc.collect()  # nobody may have them mapped
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(files: Sequence[Path], threads: int) -> None:
    """All bytes, into memory that is used again."""
    runs: list[tuple[Path, int, int]] = []
    for file in files:
        step = -(-file.stat().st_size // threads)
        runs += [(file, at * step, step) for at in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_read_run, *zip(*runs, strict=True)))


def _read_run(file: Path, begin: int, count: int) -> None:
    scratch = memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as opened:
        at, end = begin, begin + count
        while at < end:
            read = os.preadv(opened.fileno(), [scratch[: end - at]], at)
            if not read:
                return
            at += read
