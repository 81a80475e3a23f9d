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


@pytest.mark.parametrize(
    "name", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
def test_launches_compile_within_their_budgets(name):
    command = [sys.executable, "-m", "tests.triton_aot", name]
    out = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-2000:]
    found = [json.loads(line) for line in out.stdout.splitlines()]
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
