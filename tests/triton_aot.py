"""What launches of Triton's kernels become, without a GPU: compiled ahead of time, and measured.

Run as a program, for the kernels must be imported without the interpreter:
``python -m tests.triton_aot NAME [CAPABILITY ...]`` prints a JSON line for each kernel that the
case launches and each capability. Owns the cases: launches over tensors of the shapes of real
models, of which only shapes, strides and dtypes matter.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from stratakv.engine.attention import triton_kernels
from stratakv.engine.attention.kernels import Expanded, IndexKeys, Paged, SelectedRows
from stratakv.engine.attention.paged_layer import LatentPages, Scoring
from stratakv.engine.attention.triton_kernels import TritonKernels
from stratakv.engine.attention.triton_swap_ins import room_of
from stratakv.engine.deepseek import triton_best_keys
from stratakv.sparse import triton_swap_in
from stratakv.sparse.reads import EntryPlaces
from stratakv.spec.retention import KeepAll, KeepWindow
from stratakv.testing.kernel_oracle import Heads, KernelStep, PagedCase
from stratakv.transfer import triton_copy
from tests.triton_buffers import PlanTensors

CAPABILITIES = (80, 90, 100)
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int16: "*i16",
    torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip
WIDE_LOADS = ("ld.global.v4.b32", "ld.global.v2.b64", "cp.async.cg.shared.global")
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
CPU = torch.device("cpu")
DECODE = ((700, 1), (90, 1))
CHUNK = ((200, 130),)


class Recorder:
    """Stands where a kernel is launched, and keeps with what."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, **keywords):
            options = {name: keywords.pop(name) for name in OPTIONS if name in keywords}
            values = dict(zip(self.kernel.arg_names, args, strict=False)) | keywords
            self.launches.append((self.kernel, values, options))

        return launch


def source(kernel, values):
    """As Triton specialises a launch: what divides by 16, and what is 1."""
    signature, constants, attributes = {}, {}, {}
    marked = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    anywhere = {one.name for one in kernel.params if one.do_not_specialize_on_alignment}
    for at, name in enumerate(kernel.arg_names):
        value = values[name]
        if name in marked or (isinstance(value, int) and value == 1):
            signature[name], constants[(at,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            if name in anywhere:
                continue
            attributes[(at,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(at,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def measured(kernel, values, options, capability):
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source(kernel, values), target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [TOOL, "--dump-resource-usage", file.name]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = out.split("Function ", 1)[1].split("\n")[1].split()
    numbers = {key: int(number) for key, number in (part.split(":") for part in usage[:2])}
    ptx = made.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "capability": capability,
        "registers": numbers["REG"],
        "spilled_bytes": numbers["STACK"],
        "shared_bytes": made.metadata.shared,
        "wide_loads": sum(ptx.count(of) for of in WIDE_LOADS),
        "barriers": ptx.count("bar.sync"),
        "tensor_cores": any(of in ptx for of in ("mma.sync", "wgmma", "tcgen05.mma")),
    }


def paged(heads, spans, rule, dtype, *, cap=None, sinks=False, size=64):
    step = KernelStep(rule, size, spans, dtype)
    case = PagedCase.of(step, heads)
    keys, values = step.fresh(case.keys), step.fresh(case.values)
    plan = TritonKernels(CPU).plan(case.group, step.shape, step.table)
    logits = torch.zeros(heads.query, dtype=dtype) if sinks else None
    scoring = Scoring(0.1, cap, logits)
    context = Paged(case.layer, keys.transpose(0, 1), values.transpose(0, 1))
    run = plan.decode if plan.decodes else plan.prefill
    run(case.query, context, scoring)


def expanded(heads, spans, dtype):
    step = KernelStep(KeepAll(), 64, spans, dtype)
    plan = TritonKernels(CPU).plan(step.attention_group(400), step.shape, step.table)
    found = plan.gather(LatentPages.of(step.group, step.pool(step.contexts(64, salt=1))))
    keys = torch.zeros(heads.key, len(found), heads.key_dim, dtype=dtype)
    values = torch.zeros(heads.key, len(found), heads.value_dim, dtype=dtype)
    query = torch.zeros(len(step.shape.positions), heads.query, heads.key_dim, dtype=dtype)
    run = plan.decode if plan.decodes else plan.prefill
    run(query, Expanded(keys, values), Scoring(0.1, None, None))


def selected(heads, dim, value_dim, dtype, *, parts, sinks=False):
    pool, query = torch.zeros(64, dim, dtype=dtype), torch.zeros(2, heads, dim, dtype=dtype)
    rows = torch.zeros(2, 2048, dtype=torch.int64)
    some = [SelectedRows(pool, rows, torch.zeros(2, 2048, dtype=torch.bool))]
    if parts > 1:
        some.append(SelectedRows(pool, rows[0, :128], None))
    logits = torch.zeros(heads, dtype=dtype) if sinks else None
    TritonKernels(CPU).attend_selected(query, some, value_dim, 0.1, logits)


def indexed(dtype, *, hides):
    """As V3.2 asks, whose index keys are hidden by a mask, or V4, where they count."""
    query, weights = torch.zeros(2, 64, 128, dtype=dtype), torch.zeros(2, 64)
    rows = torch.zeros(2, 70_000, dtype=torch.int64)
    hidden = torch.zeros(rows.shape, dtype=torch.bool) if hides else None
    counts = None if hides else torch.zeros(2, dtype=torch.int64)
    keys = IndexKeys(torch.zeros(64, 128, dtype=dtype), rows, hidden, counts)
    TritonKernels(CPU).best_keys(query, weights, keys, 2048)


def swapped_in(rows, top_k, entries, hides):
    """Of requests of 131,072 tokens."""
    places = EntryPlaces(
        np.zeros((rows, 2048), np.int32), np.zeros((rows, entries // 64), np.int32), 64
    )
    resident = np.zeros((rows, entries), np.int32)
    asked = np.zeros((rows, top_k), np.int64)
    hidden = np.zeros(asked.shape, np.bool_) if hides else None
    which = np.zeros(rows, np.int32)
    order = resident.astype(np.int16)
    tensors = PlanTensors.of(which, asked, hidden, places, resident, order)
    triton_swap_in.launch_plan(tensors.asked, tensors.tables, tensors.planned, 64)


def copied_rows(row_bytes):
    targets = torch.zeros(2, 2048, dtype=torch.int64)
    base = 1 << 40
    route = triton_swap_in.RowRoute(base, base, 64 * row_bytes, 61 * 64 * row_bytes, row_bytes)
    triton_swap_in.launch_rows(route, room_of(targets, 2048), 64)


def copied(size):
    ends = torch.arange(3) * 4096
    triton_copy.launch_moves(ends, ends, ends * 0 + size, size, wide=not size % 16)


B, H, F = torch.bfloat16, torch.float16, torch.float32
LLAMA, GEMMA, OSS = Heads(32, 8, 128, 128), Heads(8, 4, 256, 256), Heads(64, 8, 64, 64)
CASES = {
    "llama decode": lambda: paged(LLAMA, DECODE, KeepAll(), B),
    "llama chunk": lambda: paged(LLAMA, CHUNK, KeepAll(), B),
    "llama decode fp32": lambda: paged(LLAMA, DECODE, KeepAll(), F),
    "llama chunk fp32": lambda: paged(LLAMA, CHUNK, KeepAll(), F),
    "llama chunk fp16": lambda: paged(LLAMA, CHUNK, KeepAll(), H),
    "gemma 2 decode": lambda: paged(GEMMA, DECODE, KeepWindow(512), B, cap=50.0),
    "gemma 2 chunk": lambda: paged(GEMMA, CHUNK, KeepWindow(512), B, cap=50.0),
    "gpt-oss decode": lambda: paged(OSS, DECODE, KeepWindow(128), B, sinks=True),
    "gpt-oss chunk": lambda: paged(OSS, CHUNK, KeepWindow(128), B, sinks=True),
    "deepseek v3 decode": lambda: expanded(Heads(16, 16, 192, 128), DECODE, B),
    "deepseek v3 chunk": lambda: expanded(Heads(16, 16, 192, 128), CHUNK, B),
    "deepseek v3.2 selected": lambda: selected(128, 576, 512, B, parts=1),
    "deepseek v3.2 index": lambda: indexed(B, hides=True),
    "deepseek v4 index": lambda: indexed(B, hides=False),
    "deepseek v4 index fp32": lambda: indexed(F, hides=False),
    "swap-in": lambda: swapped_in(2, 2048, 4096, hides=True),
    "swap-in of all": lambda: swapped_in(2, 2048, 2048, hides=False),
    "swapped rows": lambda: copied_rows(1152),
    "swapped rows of odd bytes": lambda: copied_rows(577),
    "copy": lambda: copied(131_072),
    "copy of odd bytes": lambda: copied(131_071),
    "deepseek v4 selected": lambda: selected(64, 512, 512, B, parts=2, sinks=True),
}


KERNELS = (
    (triton_kernels, "attend_pages"), (triton_kernels, "attend_rows"), (triton_kernels, "combine"),
    (triton_copy, "copy_moves"), (triton_best_keys, "vote"), (triton_best_keys, "vote_exactly"),
    (triton_best_keys, "choose"), (triton_swap_in, "plan"), (triton_swap_in, "copy_rows"),
)  # fmt: skip


def launches_of(name):
    launches, real = [], [getattr(*where) for where in KERNELS]
    for where, kernel in zip(KERNELS, real, strict=True):
        setattr(*where, Recorder(kernel, launches))
    try:
        CASES[name]()
    finally:
        for where, kernel in zip(KERNELS, real, strict=True):
            setattr(*where, kernel)
    return launches


def variants_of_a_copy(counts):
    """How many kernels Triton makes of launches of so many moves each."""
    kernel = triton_copy.copy_moves
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    bound = create_function_from_signature(kernel.signature, kernel.params, backend)
    ends = (torch.zeros(3, count, dtype=torch.int64) for count in counts)
    return len({tuple(bound(*rows, WIDE=True, PART=triton_copy.PART)[1]) for rows in ends})


if __name__ == "__main__":
    name, *some = sys.argv[1:]
    for kernel, values, options in launches_of(name):
        for capability in map(int, some or CAPABILITIES):
            print(json.dumps(measured(kernel, values, options, capability)), flush=True)
