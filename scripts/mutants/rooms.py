"""Which tests look for the mutants of which package: fast ones, no models, no processes.

Files named here that pytest does not collect by itself are walks of the long campaigns, cut short.
"""

from typing import Final

from scripts.mutants.zygote import ROOT

TESTS: Final[dict[str, tuple[str, ...]]] = {
    "policy": (
        "tests/unit/test_policy_*.py",
        "tests/unit/test_tiers_prefetch*.py",
        "tests/unit/test_cache_write_policies.py",
        "tests/mutants/walks_prefetch.py",
    ),
    "agreement": (
        "tests/unit/test_agreement_*.py",
        "tests/unit/test_tiers_consistency.py",
        "tests/unit/test_tiers_prefetch.py",
        "tests/unit/test_testing_fleet_thread_ranks.py",
        "tests/unit/test_testing_fleet_runs.py",
        "tests/integration/test_fleet_landing.py",  # threads of one process
    ),
    "tree": (
        "tests/unit/test_tree_[a-r]*.py",  # scale is slow
        "tests/unit/test_tree_stored.py",
        "tests/unit/test_tree_write_back.py",
        "tests/unit/test_cache_[clmw]*.py",
        "tests/unit/test_tiers_*.py",
        "tests/mutants/walks_tree.py",
    ),
    "spec": (
        "tests/unit/test_spec_*.py",
        "tests/unit/test_family_table.py",
        "tests/property/test_retention.py",
    ),
    "cache": (
        "tests/unit/test_cache_*.py",
        "tests/integration/test_engine_pages.py",
        "tests/mutants/walks_cache.py",
        "tests/mutants/walks_engine.py",
    ),
    "tiers": (
        "tests/unit/test_tiers_*.py",
        "tests/unit/test_cache_*.py",
        "tests/mutants/walks_engine.py",
        "tests/mutants/walks_tiers.py",
    ),
    "tiers/prefetch": (
        "tests/unit/test_tiers_*.py",
        "tests/mutants/walks_engine.py",
        "tests/mutants/walks_prefetch.py",
        "tests/mutants/walks_tiers.py",
    ),
    "storage/file": (
        "tests/unit/test_storage_file_*.py",
        "tests/unit/test_storage_fsck.py",
        "tests/conformance/test_storage_file*.py",
    ),
}

LEFT_OUT: Final = {
    "agreement/torch_ranks.py": "its tests need processes: tests/integration/test_ranks_end.py",
}
"""Files whose mutants are not run, and why."""


def files_of(room: str) -> list[str]:
    found = [path for pattern in TESTS[room] for path in sorted(ROOT.glob(pattern))]
    return [str(path.relative_to(ROOT)) for path in found]
