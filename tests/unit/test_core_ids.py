"""Ids are plain numbers at run time; what matters is what they are beside that."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np

from stratakv.core import ids
from stratakv.core.errors import (
    ConfigError,
    DivergenceError,
    RequestError,
    StorageError,
    StrataError,
)


def test_ids_import_nothing_from_the_project() -> None:
    source = ids.__file__
    assert source is not None
    tree = ast.parse(Path(source).read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in modules if name.startswith("stratakv")]


def test_none_is_no_valid_page_and_fits_the_page_type() -> None:
    assert ids.NONE < 0
    assert np.asarray([ids.NONE], dtype=np.int32)[0] == ids.NONE


def test_core_and_spec_run_without_torch() -> None:
    """Decisions are torch-free: a fresh interpreter that imports them all has not loaded it."""
    modules = (
        "core.units core.page_keys core.clock core.errors core.ids spec.derive spec.support "
        "spec.budget spec.budget_table spec.retention"
    )
    imports = "; ".join(f"import stratakv.{name}" for name in modules.split())
    loaded = "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    code = f"{imports}; import sys; {loaded}"
    path = str(Path(ids.__file__ or "").parents[2])
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=True)


def test_errors_say_whose_fault_it_is() -> None:
    kinds = (ConfigError, RequestError, StorageError, DivergenceError)
    assert all(issubclass(kind, StrataError) for kind in kinds)
    values = [kind for kind in kinds if issubclass(kind, ValueError)]
    assert values == [ConfigError, RequestError]
