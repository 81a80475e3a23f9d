"""An indexer's scores and choice as Triton kernels: heads vote on keys, and the best are chosen.

Owns the arithmetic on the device. A score depends on its query and its key alone, wherever either
lies: programs read keys in tiles of one size, and heads are summed in one order. In float32 it is
that of ``common_votes`` to the last bit, and what is chosen of the same scores is always that of
``common_topk``. Nothing here goes back to the host, and no shape follows from what a tensor holds.
Launches are ``triton_best_keys``'; must not import torch.
"""

# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

BINS: tl.constexpr = tl.constexpr(256)
"""What a digit of eight bits may be."""
EXPONENT: tl.constexpr = tl.constexpr(0x7FF0000000000000)
"""Of a float64."""
INFINITY: tl.constexpr = tl.constexpr(0x7F800000)
LEAST: tl.constexpr = tl.constexpr(-0x80000000)
"""The sign of a number of 32 bits."""
SIGNLESS: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _rows(
    table, hidden, token, place, there, table_row, width, PAGE: tl.constexpr, HIDES: tl.constexpr
):
    """Rows of the pool behind places, and which of them are there to be read."""
    if HIDES:
        there = there & (tl.load(hidden + token * width + place, there, 1) == 0)
    page = tl.load(table + token * table_row + place // PAGE, there, 0).to(tl.int64)
    return page * PAGE + place % PAGE, there


@triton.jit
def vote(
    found, query, weights, keys, table, hidden, counts, query_token, query_head, key_row, table_row,
    width,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, HIDES: tl.constexpr,
    COUNTED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A query and TILES tiles of its keys, by program: ``found`` float32 [m, width] are the sums
    over heads of weight * relu(query . key), -inf where a key is hidden and NaN where one is not
    finite. ``table`` [m, pages]: where the pages of each query's keys lie, PAGE rows of ``keys``
    each. With HIDES ``hidden`` is uint8 [m, width], with COUNTED ``counts`` int64 [m]."""
    token = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = at < DIM
    source = query + token * query_token + head[:, None] * query_head + at[None, :]
    asked = tl.load(source, (head < HEADS)[:, None] & inside[None, :], 0.0)
    weight = tl.load(weights + token * HEADS + head, head < HEADS, 0.0)
    # 0, or NaN where a number is not finite: a relu would hide that.
    wide = asked.to(tl.float32)
    broken = tl.sum(tl.sum(wide - wide, 1), 0)
    end = width
    if COUNTED:
        end = tl.minimum(tl.load(counts + token), width).to(tl.int32)
    begin = tl.program_id(1) * (TILES * BLOCK_N)
    for start in range(begin, tl.minimum(begin + TILES * BLOCK_N, width), BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        row, there = _rows(table, hidden, token, place, place < end, table_row, width, PAGE, HIDES)
        read = inside[:, None] & there[None, :]
        key = tl.load(keys + row[None, :] * key_row + at[:, None], read, 0.0).to(asked.dtype)
        if UPCAST:  # the interpreter's dot is wrong in bfloat16
            dots = tl.dot(wide, key.to(tl.float32), input_precision="ieee")
        else:
            dots = tl.dot(asked, key)
        score = tl.sum(tl.where(dots < 0, 0.0, dots) * weight[:, None], 0)
        wide_key = key.to(tl.float32)
        score += tl.sum(wide_key - wide_key, 0) + broken
        score = tl.where(there, score, float("-inf"))
        tl.store(found + token * width + place, score, place < width)


@triton.jit
def _magnitude(numbers):
    """Of float32, as whole numbers in the same order; NaN is above all."""
    return numbers.to(tl.int32, bitcast=True) & SIGNLESS


@triton.jit
def _coarse(largest, UNIT: tl.constexpr):
    """What leaves of a float64 beside it only whole multiples of its row's grid: ``on_grid`` in
    ``common_exact``. ``largest``: magnitude of a row."""
    wide = largest.to(tl.float32, bitcast=True).to(tl.float64)
    power = (wide.to(tl.int64, bitcast=True) & EXPONENT).to(tl.float64, bitcast=True)
    return power * UNIT


@triton.jit
def _folded(terms, COUNT: tl.constexpr, BLOCK_N: tl.constexpr, LEVELS: tl.constexpr):
    """The sum of [n, COUNT] over heads, in the order of ``folded`` in ``common_exact``."""
    for level in tl.static_range(LEVELS):
        halves = tl.reshape(terms, [BLOCK_N, 2, COUNT >> (level + 1)])
        low, high = tl.split(tl.permute(halves, (0, 2, 1)))
        terms = low + high
    return tl.reshape(terms, [BLOCK_N])


@triton.jit
def vote_exactly(
    found, query, weights, keys, table, hidden, counts, query_token, query_head, key_row, table_row,
    width,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, HIDES: tl.constexpr,
    COUNTED: tl.constexpr, LEVELS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """As ``vote``, in fixed point: both sides of a product on grids of UNIT, so that no order
    rounds its sum; BLOCK_D dims at a time. BLOCK_H is 2**LEVELS."""
    token = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    source = query + token * query_token + head[None, :] * query_head
    weight = tl.load(weights + token * HEADS + head, head < HEADS, 0.0).to(tl.float64)
    largest = tl.zeros([BLOCK_H], tl.int32)
    for part in range(0, DIM, BLOCK_D):
        dim = part + at
        real = (dim < DIM)[:, None] & (head < HEADS)[None, :]
        some = tl.load(source + dim[:, None], real, 0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(_magnitude(some), 0))
    query_grid = _coarse(largest, UNIT)[None, :]
    end = width
    if COUNTED:
        end = tl.minimum(tl.load(counts + token), width).to(tl.int32)
    begin = tl.program_id(1) * (TILES * BLOCK_N)
    for start in range(begin, tl.minimum(begin + TILES * BLOCK_N, width), BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        row, there = _rows(table, hidden, token, place, place < end, table_row, width, PAGE, HIDES)
        lies = keys + row[:, None] * key_row
        largest_key = tl.zeros([BLOCK_N], tl.int32)
        for part in range(0, DIM, BLOCK_D):
            dim = part + at
            real = there[:, None] & (dim < DIM)[None, :]
            some = tl.load(lies + dim[None, :], real, 0.0).to(tl.float32)
            largest_key = tl.maximum(largest_key, tl.max(_magnitude(some), 1))
        key_grid = _coarse(largest_key, UNIT)[:, None]
        dots = tl.zeros([BLOCK_N, BLOCK_H], tl.float64)
        for part in range(0, DIM, BLOCK_D):
            dim = part + at
            real = (dim < DIM)[:, None] & (head < HEADS)[None, :]
            asked = tl.load(source + dim[:, None], real, 0.0).to(tl.float32).to(tl.float64)
            real = there[:, None] & (dim < DIM)[None, :]
            key = tl.load(lies + dim[None, :], real, 0.0).to(tl.float32).to(tl.float64)
            asked = (asked + query_grid) - query_grid
            key = (key + key_grid) - key_grid
            dots += tl.dot(key, asked, out_dtype=tl.float64)
        terms = tl.where(dots < 0, 0.0, dots) * weight[None, :]
        score = _folded(terms, BLOCK_H, BLOCK_N, LEVELS).to(tl.float32)
        score = tl.where(there, score, float("-inf"))
        tl.store(found + token * width + place, score, place < width)


@triton.jit
def _ordered(scores):
    """Whole numbers in the order of the floats: zeros are one, NaN is as high as infinity."""
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where((bits & SIGNLESS) > INFINITY, INFINITY, bits)
    bits = tl.where(bits == LEAST, 0, bits)
    return tl.where(bits < 0, bits ^ SIGNLESS, bits)


@triton.jit
def _digit(
    source, width, count, least, room, SHIFT: tl.constexpr, KNOWN: tl.constexpr, BLOCK: tl.constexpr
):
    """One digit more of the room-th best, of those whose KNOWN bits are those of ``least``; how
    many of the ones that share it all are among the best."""
    held = tl.zeros([BINS], tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        key = _ordered(tl.load(source + at, at < width, 0.0)) ^ LEAST
        alike = (at < count) & ((key & KNOWN) == least)
        held += tl.histogram((key >> SHIFT) & (BINS - 1), BINS, alike)
    above = tl.sum(held, 0) - tl.cumsum(held, 0)
    here = (above < room) & (above + held >= room)
    least |= tl.sum(tl.where(here, tl.arange(0, BINS), 0), 0) << SHIFT
    return least, room - tl.sum(tl.where(here, above, 0), 0)


@triton.jit
def choose(
    places, scores, counts, width, scores_row,
    K: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """The K best of each query's scores, the first of equal ones, by program: ``places`` int64
    [m, K], ascending. width >= K. What lies at ``counts`` [m] and beyond is as if it were -inf."""
    token = tl.program_id(0).to(tl.int64)
    source = scores + token * scores_row
    out = places + token * K
    count = width
    if COUNTED:
        count = tl.minimum(tl.load(counts + token), width).to(tl.int32)
    if count <= K:  # all that count, and the first of those that are equal
        for start in range(0, K, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(out + at, at.to(tl.int64), at < K)
    else:
        # The K-th best, and how many like it belong to the K.
        least, room = 0, K
        least, room = _digit(source, width, count, least, room, 24, 0, BLOCK)
        least, room = _digit(source, width, count, least, room, 16, -(1 << 24), BLOCK)
        least, room = _digit(source, width, count, least, room, 8, -(1 << 16), BLOCK)
        least, room = _digit(source, width, count, least, room, 0, -(1 << 8), BLOCK)
        least = least ^ LEAST
        chosen, equals = 0, 0
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            key = _ordered(tl.load(source + at, at < width, 0.0))
            equal = ((at < count) & (key == least)).to(tl.int32)
            mine = ((at < count) & (key > least)) | (
                (equal == 1) & (equals + tl.cumsum(equal, 0) <= room)
            )
            rank = chosen + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(out + rank, at.to(tl.int64), mine)
            chosen += tl.sum(mine.to(tl.int32), 0)
            equals += tl.sum(equal, 0)
