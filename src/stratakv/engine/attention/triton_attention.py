"""Attention over pages and over selected rows, as Triton kernels.

Owns the arithmetic on the device. What a query sees comes as numbers (its first key, its position),
so that no kernel knows a rule. Keys are read in blocks that begin at multiples of their size, and
split at multiples of ``SPLIT`` tokens: what a query gets depends neither on who shares its batch
nor, in a chunk, on where the chunk was cut. Launches are ``triton_kernels``'; must not import torch.
"""

# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

WORK_FIELDS: tl.constexpr = tl.constexpr(8)
"""Numbers of a work item: request, first query (a token of the launch), queries, position of the
first one, first key that any of them sees, first page of the request's row in the table."""


@triton.jit
def _queries(source, real, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    """Rows [m] of queries in their two parts, zeros where no row is ``real``."""
    at = tl.arange(0, MAIN)
    main = tl.load(source + at[None, :], real[:, None] & (at[None, :] < DIM), 0.0)
    rest = main
    if REST > 0:
        more = MAIN + tl.arange(0, REST)
        rest = tl.load(source + more[None, :], real[:, None] & (more[None, :] < DIM), 0.0)
    return main, rest


@triton.jit
def _scored(
    q_main, q_rest, rows, there, keys, scale, softcap,
    KEY_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    CAPPED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Dot products [m, n] of queries with the keys at ``rows`` (elements from ``keys``), scaled."""
    at = tl.arange(0, MAIN)
    k = tl.load(keys + rows[None, :] + at[:, None], there[None, :] & (at[:, None] < KEY_DIM), 0.0)
    k = k.to(q_main.dtype)
    if UPCAST:  # the interpreter's dot is wrong in bfloat16
        scores = tl.dot(q_main.to(tl.float32), k.to(tl.float32), input_precision="ieee")
    else:
        scores = tl.dot(q_main, k, input_precision="ieee")
    if REST > 0:
        more = MAIN + tl.arange(0, REST)
        inside = there[None, :] & (more[:, None] < KEY_DIM)
        k = tl.load(keys + rows[None, :] + more[:, None], inside, 0.0).to(q_main.dtype)
        if UPCAST:
            scores += tl.dot(q_rest.to(tl.float32), k.to(tl.float32), input_precision="ieee")
        else:
            scores += tl.dot(q_rest, k, input_precision="ieee")
    scores *= scale
    if CAPPED:
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
    return scores


@triton.jit
def _weighed(scores, most, total, found, values, UPCAST: tl.constexpr):
    """One block more: scores [m, n], -inf where hidden; values [n, d]. ``most``, ``total`` [m] and
    ``found`` [m, d] are the largest score, the sum of weights, and what they have given so far."""
    larger = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(larger == float("-inf"), 0.0, larger)
    weights = tl.exp(scores - base[:, None])
    kept = tl.exp(most - base)
    if UPCAST:
        given = tl.dot(weights, values.to(tl.float32), input_precision="ieee")
    else:
        given = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return larger, total * kept + tl.sum(weights, 1), found * kept[:, None] + given


@triton.jit
def _kept(out, slot, real, found, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Write rows [m, WIDE] to their slots, of DIM numbers each."""
    at = tl.arange(0, WIDE)
    inside = real[:, None] & (at[None, :] < DIM)
    tl.store(out + slot[:, None] * DIM + at[None, :], found.to(out.dtype.element_ty), inside)


@triton.jit
def _sunk(most, total, found, sinks):
    """A logit per row more, which takes weight and gives nothing."""
    larger = tl.maximum(most, sinks)
    kept = tl.exp(most - larger)
    return total * kept + tl.exp(sinks - larger), found * kept[:, None]


@triton.jit
def attend_pages(
    out, stats, query, keys, values, table, firsts, work, sinks,
    scale, softcap, query_token, query_head, key_row, key_head, value_row, value_head,
    table_row, splits,
    PER_HEAD: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A work item, a key head's block of query heads, and a split, by program.

    Without SPLIT ``out`` is [T, H, VALUE_DIM]; with it float32 [T, H, splits, VALUE_DIM], and
    ``stats`` [T, H, splits, 2] are each split's largest score and sum of weights.
    """
    item = work + tl.program_id(0) * WORK_FIELDS
    request, token = tl.load(item), tl.load(item + 1)
    count, position = tl.load(item + 2), tl.load(item + 3)
    low, first_page = tl.load(item + 4), tl.load(item + 5)
    blocks = (PER_HEAD + BLOCK_H - 1) // BLOCK_H
    key_at, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    heads = tl.num_programs(1) // blocks * PER_HEAD

    row = tl.arange(0, BLOCK_Q * BLOCK_H)
    mine, inside = row // BLOCK_H, block * BLOCK_H + row % BLOCK_H
    head = key_at * PER_HEAD + inside
    real = (mine < count) & (inside < PER_HEAD)
    first = tl.load(firsts + token + mine, mine < count, 0)
    last = position + mine

    begin, end = low, position + count
    split = tl.program_id(2)
    if SPLIT > 0:
        begin = tl.maximum(low, (low // SPLIT + split) * SPLIT)
        end = tl.minimum(end, (low // SPLIT + split + 1) * SPLIT)

    source = query + (token + mine).to(tl.int64)[:, None] * query_token + head[:, None] * query_head
    q_main, q_rest = _queries(source, real, KEY_DIM, MAIN, REST)
    most = tl.full([BLOCK_Q * BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q * BLOCK_H], tl.float32)
    found = tl.zeros([BLOCK_Q * BLOCK_H, BLOCK_V], tl.float32)
    wide = tl.arange(0, BLOCK_V)
    for start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        there = (place >= begin) & (place < end)
        page = tl.load(table + request * table_row + place // PAGE - first_page, there, 0)
        slot = page.to(tl.int64) * PAGE + place % PAGE
        scores = _scored(
            q_main, q_rest, slot * key_row + key_at.to(tl.int64) * key_head, there, keys, scale, softcap,
            KEY_DIM, MAIN, REST, CAPPED, UPCAST,
        )  # fmt: skip
        seen = (place[None, :] >= first[:, None]) & (place[None, :] <= last[:, None])
        scores = tl.where(seen & there[None, :], scores, float("-inf"))
        rows = slot * value_row + key_at.to(tl.int64) * value_head
        read = there[:, None] & (wide[None, :] < VALUE_DIM)
        value = tl.load(values + rows[:, None] + wide[None, :], read, 0.0).to(q_main.dtype)
        most, total, found = _weighed(scores, most, total, found, value, UPCAST)

    slot = (token + mine).to(tl.int64) * heads + head
    if SPLIT > 0:
        slot = slot * splits + split
        tl.store(stats + slot * 2, most, real)
        tl.store(stats + slot * 2 + 1, total, real)
        real = real & (begin < end)  # nobody reads what a split has found that saw nothing
    else:
        if SUNK:
            sink = tl.load(sinks + head, real, 0.0).to(tl.float32)
            total, found = _sunk(most, total, found, sink)
        found /= total[:, None]
    _kept(out, slot, real, found, VALUE_DIM, BLOCK_V)


@triton.jit
def attend_rows(
    out, stats, query, pool, rows, hidden, scale, query_token, query_head, pool_row, rows_query,
    heads, count, slot, splits,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, SPLIT: tl.constexpr, HIDES: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One query's block of heads over a split of the ``count`` rows of ``pool`` that somebody has
    selected for it, which are keys and, their first VALUE_DIM, values. ``slot``: the first split
    of this pool among all ``splits``; ``out`` and ``stats`` as in ``attend_pages``."""
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = head < heads
    at = tl.arange(0, MAIN)
    source = query + token * query_token + head[:, None] * query_head
    q_main, q_rest = _queries(source, real, DIM, MAIN, REST)
    most = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    found = tl.zeros([BLOCK_H, MAIN], tl.float32)
    end = tl.minimum(count, (split + 1) * SPLIT)
    for start in range(split * SPLIT, end, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        there = place < end
        if HIDES:
            there = there & (tl.load(hidden + token * count + place, there, 1) == 0)
        row = tl.load(rows + token * rows_query + place, there, 0) * pool_row
        scores = _scored(
            q_main, q_rest, row, there, pool, scale, 1.0, DIM, MAIN, REST, False, UPCAST
        )
        scores = tl.where(there[None, :], scores, float("-inf"))
        read = there[:, None] & (at[None, :] < VALUE_DIM)
        value = tl.load(pool + row[:, None] + at[None, :], read, 0.0).to(q_main.dtype)
        most, total, found = _weighed(scores, most, total, found, value, UPCAST)
    place = (token * heads + head) * splits + slot + split
    tl.store(stats + place * 2, most, real)
    tl.store(stats + place * 2 + 1, total, real)
    _kept(out, place, real, found, VALUE_DIM, MAIN)


@triton.jit
def combine(
    out, partial, stats, sinks, splits,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    """The splits of one token and head, in order: partial float32 [T, H, splits, VALUE_DIM] to
    ``out`` [T, H, VALUE_DIM]. A split that saw nothing counts for nothing."""
    head = tl.program_id(1)
    slot = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head
    wide = tl.arange(0, BLOCK_V)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    found = tl.zeros([1, BLOCK_V], tl.float32)
    for split in range(splits):
        place = slot * splits + split
        weight = tl.load(stats + place * 2 + 1)
        if weight != 0.0:
            one = tl.load(stats + place * 2)
            larger = tl.maximum(most, one)
            kept, share = tl.exp(most - larger), tl.exp(one - larger)
            given = tl.load(partial + place * VALUE_DIM + wide, wide < VALUE_DIM, 0.0)
            total = total * kept + weight * share
            found = found * kept[:, None] + given[None, :] * share[:, None]
            most = larger
    if SUNK:
        sink = tl.load(sinks + head).to(tl.float32)
        total, found = _sunk(most, total, found, tl.full([1], 0.0, tl.float32) + sink)
    found /= total[:, None]
    result = found.to(out.dtype.element_ty)
    tl.store(out + slot * VALUE_DIM + wide[None, :], result, wide[None, :] < VALUE_DIM)
