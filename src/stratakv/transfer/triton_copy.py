"""Copies between any two addresses that a GPU may follow, as a Triton kernel.

One program moves a part of one move, in words of 16 bytes where everything is aligned to them and
byte by byte elsewhere. Host memory is read and written where it lies, mapped and pinned. Owns the
kernel and its launch; must not import torch.
"""

# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
from typing import Any, Final

import triton
import triton.language as tl

WORD = tl.constexpr(16)
NUMBERS = tl.constexpr(tl.pointer_type(tl.int64))
BYTES = tl.constexpr(tl.pointer_type(tl.uint8))
PART: Final = 1024
"""Words of a program, or bytes: 8 bytes each are one number to Triton, two are read at once."""


# Rows of one tensor are aligned to 16 bytes or not by its length: no kernel of its own for each.
@triton.jit(do_not_specialize_on_alignment=["targets", "sources", "sizes"])
def copy_moves(targets, sources, sizes, WIDE: tl.constexpr, PART: tl.constexpr):
    """Move ``program_id(0)``, part ``program_id(1)``; addresses and sizes are int64."""
    move = tl.program_id(0)
    at = tl.program_id(1) * PART + tl.arange(0, PART)
    source, target = tl.load(sources + move), tl.load(targets + move)
    size = tl.load(sizes + move)
    if WIDE:
        source = tl.multiple_of(source.to(NUMBERS, bitcast=True), WORD)
        target = tl.multiple_of(target.to(NUMBERS, bitcast=True), WORD)
        inside = at < tl.multiple_of(size // 8, WORD // 8)
        found = tl.load(source + at, inside, 0)
        tl.store(target + at, found, inside)
    else:
        found = tl.load(source.to(BYTES, bitcast=True) + at, at < size, 0)
        tl.store(target.to(BYTES, bitcast=True) + at, found, at < size)


def launch_moves(targets: Any, sources: Any, sizes: Any, largest: int, *, wide: bool) -> None:
    """All moves, [n] each in the device's memory, on its current stream; ``largest``: bytes of
    the longest one."""
    parts = -(-largest // (PART * (8 if wide else 1)))
    copy_moves[len(sizes), parts](targets, sources, sizes, WIDE=wide, PART=PART, num_warps=4)
