"""What one rank does in the tests of split models: load its share, run the ragged schedule, tell.

Owns the record that ranks bring back. Runs in processes that ``tests.ranks`` starts.
"""

import hashlib
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from stratakv.engine.huggingface.model import load_model
from tests.fixtures.models import random_prompt, reference_greedy
from tests.fixtures.runner_host import Host
from tests.fixtures.schedules import LENGTHS, NEW, ragged_schedule
from tests.fixtures.tiny_configs import tiny_config
from tests.fixtures.weights import fill

PAGE = 16
TOKENS = 1024
Wanted = list[tuple[list[int], list[int], torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A model directory, and what it must answer."""

    name: str
    path: Path
    wanted: Wanted


@dataclass
class CaseResult:
    """``fault``: what was raised. ``pools``: by group and buffer, [layers, pages, ...]. ``digests``
    of the same bytes, by group. ``collectives``: of one step."""

    fault: str | None = None
    logits: list[bytes] = field(default_factory=list)
    pools: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    collectives: int = 0


def build(family: str, **changes: object) -> PreTrainedModel:
    """A tiny model with teeth whose configuration is not the usual one."""
    config = tiny_config(family, **changes)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    fill(model, 0)
    return model.eval().requires_grad_(requires_grad=False)


def case_of(name: str, folder: Path, family: str, **changes: object) -> Case:
    model = build(family, **changes)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    prompts = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    return Case(name, folder, [(p, *reference_greedy(model, p, NEW)) for p in prompts])


def run_cases(cases: list[Case], tolerance: float) -> dict[str, CaseResult]:
    """Every case, one after the other; what is raised in one does not stop the others."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return {case.name: run_case(case, dist.get_world_size(), tolerance) for case in cases}


def run_case(case: Case, ranks: int, tolerance: float) -> CaseResult:
    result = CaseResult()
    try:
        host = Host(load_model(case.path, "float32", ranks=ranks), PAGE, tokens=TOKENS)
        step = host.run

        def noted(*chunks, **options):
            logits = step(*chunks, **options)
            result.logits.append(logits.numpy().tobytes())
            return logits

        host.run = noted
        ragged_schedule(host, case.wanted, tolerance)
        _record_pools(host, result)
        with Collectives() as seen:
            host.run((host.open(), [1, 2, 3]))
        result.collectives = seen.count
    except Exception:  # noqa: BLE001 - the test that reads it fails
        result.fault = traceback.format_exc()
    return result


def _record_pools(host: Host, result: CaseResult) -> None:
    for group in host.spec.groups:
        digest = hashlib.sha256()
        for buffer in group.buffers:
            layers = [host.pools.layer(group.id, buffer.name, layer) for layer in buffer.layers]
            result.pools[group.name, buffer.name] = torch.stack(layers).numpy()
            digest.update(result.pools[group.name, buffer.name].tobytes())
        result.digests[group.name] = digest.hexdigest()


class Collectives(TorchDispatchMode):
    """Counts the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.count += "c10d" in name and ("all_" in name or "allreduce" in name)
        return func(*args, **(kwargs or {}))
