"""No test fails because a machine is slow: limits guard against hangs and come from one constant,
what is awaited is an event, and seconds are not compared. Owns the places that may do otherwise.

A list names every place with its reason; a place that stops using its right must leave the list.
Every rule is shown to bite on a sample.
"""

import ast
from collections.abc import Callable
from functools import cache
from typing import Final

import pytest

from stratakv.testing.patience import PATIENCE_S
from tests.meta.source import Module, repository

PLACES: Final = ("tests/", "demo/", "src/stratakv/testing/")
WAITS: Final = {
    "acquire", "close", "communicate", "create_connection", "get", "join", "poll", "post", "put",
    "result", "settle", "sleep", "stop", "wait", "wait_for", "Client", "HTTPConnection", "OpenAI",
    "Timer", "TorchRanks", "urlopen",
}  # fmt: skip
"""Calls that end after a time that they are given."""
LIMITS: Final = {"timeout", "timeout_s", "wait_s", "drain_s", "limit_s", "within_s"}
CLOCKS: Final = {"monotonic", "perf_counter", "process_time", "monotonic_ns", "perf_counter_ns"}

Rule = Callable[[Module], bool]


def waits_for_a_number_of_seconds(module: Module) -> bool:
    """A limit is ``PATIENCE_S``; a number of one's own is a guess about the machine."""
    for name, call in module.calls():
        given = [word.value for word in call.keywords if word.arg in LIMITS]
        given += call.args[:1] if name in WAITS else []
        if any(_seconds(value) for value in given):
            return True
    return False


def reads_a_clock(module: Module) -> bool:
    """To compare seconds is to guess about the machine."""
    return any(name in CLOCKS for name, _ in module.calls())


def has_a_limit_of_its_own(module: Module) -> bool:
    """A constant like ``SOON_S = 25.0`` beside the one that all share."""
    for node in module.tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(name)], value=value)
                | ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value)
            ):
                if name.endswith("_S") and _seconds(value):
                    return True
            case _:
                pass
    return False


def _seconds(value: ast.expr) -> bool:
    """A number of seconds to wait: 0 is to look without waiting, a million what a clock says."""
    match value:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int(number) | float(number)):
            return 0 < number < 100_000
        case _:
            return False


@cache
def modules() -> tuple[Module, ...]:
    found = [(name, text) for name, text in repository() if name.endswith(".py")]
    return tuple(Module(name, text) for name, text in found if name.startswith(PLACES))


ALLOWED: dict[Rule, dict[str, str]] = {
    waits_for_a_number_of_seconds: {
        "tests/conformance/test_cpu_transfer.py": "a layer, not a time",
        "tests/conformance/test_storage_mooncake.py": "a client's own limit, which must pass",
        "tests/conformance/test_storage_redis.py": "a client's own limit, which must pass",
        "tests/conformance/test_storage_s3.py": "a client's own limit, which must pass",
        "tests/conformance/test_transport_faults.py": "bugs that act late",
        "tests/integration/test_engine_admission.py": "lets go of what the test waits for",
        "tests/integration/test_engine_retraction.py": "lets go of what the test waits for",
        "tests/integration/test_http_api.py": "lets go of what the test waits for",
        "tests/integration/test_storage_troubles.py": "who closes over a store that hangs gives up",
        "tests/integration/test_tensor_parallel_model.py": "a rank that hangs is given up",
        "tests/unit/test_cache_copies.py": "a pause between two looks",
        "tests/unit/test_tiers_storage.py": "who closes over a store that hangs gives up",
        "tests/unit/test_serve_kv_events.py": "a pause between two looks",
        "tests/unit/test_storage_file_ledger.py": "a glimpse of what must not happen",
        "tests/unit/test_storage_io_faults.py": "who closes over a store that hangs gives up",
        "tests/unit/test_storage_urls.py": "what a URL says",
        "tests/unit/test_storage_redis_hostile.py": "a client's own limit, which must pass",
    },
    reads_a_clock: {
        "src/stratakv/testing/patience.py": "the one limit",
        "demo/client.py": "the demo shows how long an answer took",
        "demo/run.py": "the demo says how long it took",
        "demo/servers.py": "a server that never listens ends the demo",
        "tests/unit/test_transfer_bench.py": "a bench's times, which are least ones",
    },
    has_a_limit_of_its_own: {
        "src/stratakv/testing/patience.py": "the one limit",
        "src/stratakv/testing/compute_queue.py": "how late a device may be that is late on purpose",
        "src/stratakv/testing/transfer_ends.py": "a glimpse of what must not happen",
        "demo/servers.py": "the demo's one limit",
        "tests/rank_processes.py": "the operator's own limit, of a rank that hangs on purpose",
        "tests/ranks.py": "who waits for a rank that hangs says so first",
    },
}
SAMPLES: dict[Rule, tuple[str, ...]] = {
    waits_for_a_number_of_seconds: (
        "assert done.wait(5)", "thread.join(10)", "httpx.get(url, timeout=20)",
        "service.stop(drain_s=1.5)", "time.sleep(0.02)",
    ),
    reads_a_clock: ("began = time.monotonic()", "from time import perf_counter\nperf_counter()"),
    has_a_limit_of_its_own: ("SOON_S = 25.0", "LIMIT_S: Final = 3"),
}  # fmt: skip
FINE: dict[Rule, str] = {
    waits_for_a_number_of_seconds: (
        "done.wait(PATIENCE_S)\ntime.sleep(pause_s)\n', '.join(words)\nworker.close(0.0)"
    ),
    reads_a_clock: "clock.now_s()",
    has_a_limit_of_its_own: "LIMIT_S = 2 * PATIENCE_S\nPAGES = 5",
}


@pytest.mark.parametrize("rule", ALLOWED, ids=lambda rule: rule.__name__)
def test_no_place_guesses_how_fast_the_machine_is(rule):
    for sample in SAMPLES[rule]:
        assert rule(Module("sample.py", sample)), sample
    assert not rule(Module("sample.py", FINE[rule]))
    found = {module.name for module in modules() if rule(module)}
    assert found == set(ALLOWED[rule])


def test_the_limit_is_minutes_long():
    assert PATIENCE_S >= 300
