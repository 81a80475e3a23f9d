"""One owner for each thing. Owns the lists of places that may do what nobody else may.

A list names every place with its reason; a place that stops using its right must leave the list.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

import pytest

from tests.meta.source import ROOT, Module, last_name, modules

Rule = Callable[[Module], bool]

CONCRETE: Final = {"CpuTransferEngine", "PageAllocator", "HostArena", "DevicePools", "TorchPools"}
THREADS: Final = {
    "Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "Process", "to_thread",
    "run_in_executor", "fork", "start_new_thread",
}  # fmt: skip
KINDS: Final = re.compile(r"sliding|^window$|chunked|mamba|(full|linear)_att|^mla$")
RULES: Final = {"KeepWindow", "KeepChunk", "KeepBoundary", "KeepLive"}


def builds_concrete_classes(module: Module) -> bool:
    return any(name in CONCRETE for name, _ in module.calls())


def imports_the_cpu_engine(module: Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom) and any(n.name == "CpuTransferEngine" for n in node.names)
        for node in ast.walk(module.tree)
    )


def makes_threads(module: Module) -> bool:
    return any(name in THREADS for name, _ in module.calls())


def distinguishes_rules(module: Module) -> bool:
    """By ``match`` or ``isinstance`` on any rule but ``KeepAll``."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.MatchClass) and last_name(node.cls) in RULES:
            return True
        if isinstance(node, ast.Call) and last_name(node.func) == "isinstance":
            named = {last_name(n) for n in ast.walk(node) if isinstance(n, ast.expr)}
            if named & RULES:
                return True
    return False


def asks_whether_all_is_kept(module: Module) -> bool:
    return any(
        name == "isinstance" and any(last_name(n) == "KeepAll" for n in call.args)
        for name, call in module.calls()
    )


def branches_on_an_attention_kind(module: Module) -> bool:
    """A condition that reads a name, a field or a string which is an attention kind."""
    conditions: list[ast.AST] = []
    for node in ast.walk(module.tree):
        match node:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                conditions.append(test)
            case ast.comprehension(ifs=tests):
                conditions += tests
            case ast.Match(subject=subject, cases=cases):
                conditions += [subject, *(case.pattern for case in cases)]
            case _:
                pass
    names = [_name(part) for condition in conditions for part in ast.walk(condition)]
    return any(KINDS.search(name) for name in names)


def _name(node: ast.AST) -> str:
    match node:
        case ast.Name(name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            return name
        case _:
            return ""


def _stores(module: Module) -> list[ast.expr]:
    found: list[ast.expr] = []
    for node in ast.walk(module.tree):
        match node:
            case ast.Assign(targets=targets):
                found += targets
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target, value=ast.expr()):
                found.append(target)
            case _:
                pass
    return found


def writes_residency(module: Module) -> bool:
    """Stores into an element of ``state``, ``states`` or ``_states``, or makes them writeable."""
    for target in _stores(module):
        if isinstance(target, ast.Attribute) and target.attr == "writeable":
            return True
        base = target
        while isinstance(base, ast.Subscript):
            base = base.value
        if base is not target and last_name(base) in {"state", "states", "_states"}:
            return True
    return False


def assigns_a_phase(module: Module) -> bool:
    return any(isinstance(t, ast.Attribute) and t.attr == "phase" for t in _stores(module))


def looks_into_a_tree(module: Module) -> bool:
    """At the columns of another room's tree, which has verbs for what they mean."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == "internals"
        for node in ast.walk(module.tree)
    )


ANYWHERE_IN: Final = ("spec/", "bench/", "testing/")
"""``spec`` owns the rules; the benches and the public test tools build specs of their own."""

ALLOWED: dict[Rule, dict[str, str]] = {
    builds_concrete_classes: {},
    imports_the_cpu_engine: {
        "assembly/device.py": "what the CPU copies with",
        "sim/accelerator.py": "an engine around a timed device",
        "transfer/cuda.py": "the engine of a GPU is it, and pins",
    },
    makes_threads: {
        "core/identity/tensor_reader.py": "several files are hashed while the weights load",
        "transfer/cpu.py": "one worker per direction",
        "transfer/pinning.py": "host memory is registered while the server serves",
        "engine/thread_executor.py": "steps are computed while the next is launched",
        "connect/bounded_calls.py": "who asks another engine's store waits only so long",
        "connect/lmcache_tasks.py": "LMCache asks and goes on: one thread writes, one reads",
        "storage/io_worker.py": "one worker per open backend",
        "storage/opening.py": "no step may wait for a store that opens or closes",
        "disagg/link.py": "a peer may block whoever writes to it: one worker per peer",
        "disagg/http_join.py": "no step may wait for a peer's answer",
        "disagg/resolver.py": "a name server may never answer, and a join has a limit",
        "disagg/peers.py": "no step may wait for all memory to be registered with a new peer",
        "engine/in_c.py": "helpers in C share a step's requests as torch's threads would",
        "serve/driver.py": "the engine's own thread",
        "serve/kv_events.py": "who publishes must not hold a step up",
        "serve/load_progress.py": "the load itself is one call of Hugging Face's",
        "serve/tracing.py": "an end waits only so long for a collector of spans",
        "serve/followers.py": "who watches the processes of other ranks",
        "serve/lanes.py": "what takes long runs beside the event loop, one thread for each lane",
        "serve/admin_api.py": "opening, closing and waiting for storage, in asyncio's pool",
    },
    distinguishes_rules: {},
    asks_whether_all_is_kept: {},
    branches_on_an_attention_kind: {},
    writes_residency: {"tree/residency.py": "the table"},
    assigns_a_phase: {"engine/request.py": "the table"},
    looks_into_a_tree: {"tree/check.py": "every invariant"},
}
SAMPLES: dict[Rule, tuple[str, ...]] = {
    builds_concrete_classes: ("pools = device_pools.DevicePools(spec, pages, cpu)",),
    imports_the_cpu_engine: ("from stratakv.transfer.cpu import CpuTransferEngine",),
    makes_threads: ("threading.Thread(target=f).start()", "async def f(): await to_thread(g)"),
    distinguishes_rules: (
        "match rule:\n    case KeepWindow(tokens): pass",
        "isinstance(group.retention, KeepAll | retention.KeepBoundary)",
    ),
    asks_whether_all_is_kept: ("isinstance(rule, KeepAll)",),
    branches_on_an_attention_kind: (
        "if config.sliding_window: pass",
        "x = 1 if kind == 'sliding_attention' else 2",
        "[g for g in groups if g.window]",
        "match kind:\n    case 'full_attention': pass",
    ),
    writes_residency: (
        "nodes.state[group][rows] = Residency.BOTH",
        "column._states[rows] = 3",
        "column.states.flags.writeable = True",
    ),
    assigns_a_phase: ("request.phase = Phase.DECODING", "request.phase: Phase = Phase.DECODING"),
    looks_into_a_tree: ("need = self._tree.internals.nodes.need",),
}


@pytest.mark.parametrize("rule", ALLOWED, ids=lambda rule: rule.__name__)
def test_only_its_owners_do_it(rule):
    for sample in SAMPLES[rule]:
        assert rule(Module("sample.py", sample)), sample
    assert not rule(Module("sample.py", "request.row = pools.state[1]\nif left: f()"))
    found = {m.name for m in modules() if rule(m) and not m.name.startswith(ANYWHERE_IN)}
    assert found == set(ALLOWED[rule])


TORCH_FREE: Final = ("core", "spec", "tree", "policy", "storage", "engine.request", "engine.batch",
                     "engine.scheduler", "engine.rows", "engine.running", "engine.backlog",
                     "engine.namespaces", "engine.huggingface.step_calls", "cache", "memory",
                     "transfer",
                     "agreement", "testing", "tiers", "disagg", "sparse", "assembly.cache",
                     "assembly.engine_plan", "assembly.sizing", "bench.policy")  # fmt: skip
ADAPTERS: Final = (
    "agreement/torch_ranks.py", "testing/hit_engine.py", "testing/kernel_", "testing/fleet/",
)  # fmt: skip
"""What of the library is nothing without the engine's extra."""
LATE: Final = ("testing/hit_equals_recompute.py",)
"""What imports an adapter when it is used, and not before: import-linter cannot tell."""


def loaded_with(names: list[str], library: str) -> bool:
    """Whether importing ``names`` in a fresh interpreter loads ``library``."""
    code = f"import sys, {', '.join(names)}; sys.exit({library!r} in sys.modules)"
    return bool(subprocess.run([sys.executable, "-c", code], check=False).returncode)


def test_import_linter_is_given_every_suite_that_needs_no_torch():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (named,) = (
        one["source_modules"]
        for one in contracts["contracts"]
        if one["name"] == "Decisions are torch-free"
    )
    suites = {
        f"stratakv.{one.name.removesuffix('.py').replace('/', '.')}"
        for one in modules()
        if one.name.startswith("testing/")
        and not one.name.startswith((*ADAPTERS, *LATE))
        and not one.name.endswith("__init__.py")
    }
    assert {name for name in named if name.startswith("stratakv.testing")} == suites


def test_decisions_run_without_torch():
    """import-linter reads imports; this runs them, so that a detour would show as well."""
    found = [m.name for m in modules()]
    assert all(any(name.startswith(adapter) for name in found) for adapter in ADAPTERS)
    paths = [name for name in found if not name.startswith(ADAPTERS)]
    dotted = [f"stratakv.{path.removesuffix('.py').replace('/', '.')}" for path in paths]
    roots = tuple(f"stratakv.{name}" for name in TORCH_FREE)
    names = [n for n in dotted if n in roots or n.startswith(tuple(f"{r}." for r in roots))]
    assert len(names) > 25
    if find_spec("stratakv.sparse._swap_in") is None:  # there was no compiler
        names.remove("stratakv.sparse.compiled_swap_in")
        names.remove("stratakv.sparse.compiled_reads")
    assert not loaded_with([n.removesuffix(".__init__") for n in names], "torch")
    assert loaded_with(["stratakv.engine.attention.torch_pools"], "torch")
