"""Triton's kernels compile without a GPU for three generations of them, as they are launched for
real models, and within budgets."""

import json
import os
import subprocess
import sys

import pytest

from tests.meta.source import ROOT

ALWAYS = (
    "llama decode", "llama chunk", "deepseek v3.2 selected", "deepseek v3.2 index", "swap-in",
    "copy",
)  # fmt: skip
LONG = (
    "llama decode fp32", "llama chunk fp32", "llama chunk fp16", "gemma 2 decode", "gemma 2 chunk",
    "gpt-oss decode", "gpt-oss chunk", "deepseek v3 decode", "deepseek v3 chunk",
    "deepseek v4 selected", "deepseek v4 index", "deepseek v4 index fp32", "copy of odd bytes",
    "swap-in of all", "swapped rows", "swapped rows of odd bytes",
)  # fmt: skip
REGISTERS = 255
SPILLED_BYTES = 64
"""What the compiler spills of tiles that just do not fit is read back once."""
SHARED_BYTES = 99 << 10
"""What every GPU of them, and a small sibling, has for one program."""


def printed(*words):
    out = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-2000:]
    return out.stdout


@pytest.mark.parametrize(
    "name", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
def test_launches_compile_within_their_budgets(name):
    found = [json.loads(line) for line in printed("-m", "tests.triton_aot", name).splitlines()]
    assert {one["capability"] for one in found} == {80, 90, 100}
    for one in found:
        assert one["registers"] <= REGISTERS, one
        assert one["spilled_bytes"] <= SPILLED_BYTES, one
        assert one["shared_bytes"] <= SHARED_BYTES, one
        if one["kernel"].startswith("attend") or one["kernel"] == "vote":
            assert one["tensor_cores"] is not name.endswith("fp32"), one
        if one["kernel"] == "plan":
            assert one["barriers"] >= 5, f"what one thread wrote another reads: {one}"
        if one["kernel"] != "combine" and "odd" not in name:
            assert one["wide_loads"], f"it is not read 16 bytes at a time: {one}"


def test_no_number_of_moves_compiles_a_copy_anew_while_a_server_serves():
    ask = "from tests.triton_aot import variants_of_a_copy; print(variants_of_a_copy(range(1, 9)))"
    assert printed("-c", ask) == "1\n"
