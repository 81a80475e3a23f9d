"""Which index keys each query selects, on a GPU: two launches, and nothing goes back to the host.

Owns tiles and grids. Arithmetic is ``triton_indexer``'s; must not know requests.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from triton import knobs

from stratakv.engine.attention.kernels import IndexKeys
from stratakv.engine.attention.scratch_limit import pieces
from stratakv.engine.deepseek import triton_indexer
from stratakv.engine.deepseek.common_best_keys import hidden_votes
from stratakv.engine.deepseek.common_exact import MANTISSA_BITS, exact_bits

# What is launched takes options beside the function's own arguments, and numbers for its constants.
vote: Any = triton_indexer.vote
vote_exactly: Any = triton_indexer.vote_exactly
choose: Any = triton_indexer.choose
INTERPRETED: Final = bool(knobs.runtime.interpret)
LEAST: Final = 16
"""Of each side of a product of tiles."""
KEYS: Final = 64
TILES: Final = 8
"""A program's: its query is read once for all of them."""
EXACT_DIMS: Final = 16
"""At a time: a tile of float64 is large."""
EXACT_KEYS: Final = 32
SCORE_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class IndexTiles:
    """Tiles of one launch. heads, dims: of a query, rounded up, or dims of a turn; keys: of a tile,
    ``tiles`` of them a program; levels: of 2 by which heads are summed; warps: of a program."""

    heads: int
    dims: int
    keys: int
    tiles: int
    levels: int
    warps: int

    @classmethod
    def of(cls, heads: int, dim: int, *, exact: bool) -> "IndexTiles":
        rows = max(LEAST, _power_of_two(heads))
        return cls(
            heads=rows,
            dims=EXACT_DIMS if exact else max(LEAST, _power_of_two(dim)),
            keys=EXACT_KEYS if exact else KEYS,
            tiles=TILES,
            levels=rows.bit_length() - 1,
            warps=4 if rows <= KEYS else 8,
        )

    def programs(self, width: int) -> int:
        """Of a query over ``width`` keys."""
        return -(-width // (self.keys * self.tiles))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Reach:
    """How a row of scores is read: ``block`` at a time by ``warps``."""

    block: int
    warps: int

    @classmethod
    def of(cls, width: int) -> "Reach":
        block = min(4096, max(256, _power_of_two(width)))
        return cls(block, block // 256)


def best_keys(query: torch.Tensor, weights: torch.Tensor, keys: IndexKeys, k: int) -> torch.Tensor:
    """As ``AttentionKernels.best_keys``."""
    count, width = len(query), keys.rows.shape[-1]
    found = torch.empty(count, k, dtype=torch.int64, device=query.device)
    for some in pieces(count, SCORE_BYTES * width):
        part = keys if some.stop - some.start == count else keys.of(some)
        chosen(scores(query[some], weights[some], part), part.counts, found[some])
    return found


def scores(query: torch.Tensor, weights: torch.Tensor, keys: IndexKeys) -> torch.Tensor:
    """float32 [m, n], -inf where a key is hidden. In float32 ``common_votes``', to the bit."""
    count, heads, dim = query.shape
    exact = torch.float32 in {query.dtype, keys.pool.dtype}
    if exact and heads != _power_of_two(heads):
        # Heads would be summed in another order.
        return hidden_votes(query, weights, keys, slice(None), slice(None))
    query = query if query.stride(2) == 1 else query.contiguous()
    pool = keys.pool if keys.pool.stride(1) == 1 else keys.pool.contiguous()
    rows = keys.rows if keys.rows.stride(-1) == 1 else keys.rows.contiguous()
    width = rows.shape[-1]
    found = torch.empty(count, width, dtype=torch.float32, device=query.device)
    tiles = IndexTiles.of(heads, dim, exact=exact)
    hidden, counts = keys.hidden, keys.counts
    common: dict[str, Any] = {
        "HEADS": heads, "DIM": dim, "PAGE": 1, "BLOCK_H": tiles.heads, "BLOCK_D": tiles.dims,
        "BLOCK_N": tiles.keys, "TILES": tiles.tiles, "HIDES": hidden is not None,
        "COUNTED": counts is not None, "num_warps": tiles.warps,
    }  # fmt: skip
    given = (
        found, query, weights.float().contiguous(), pool, rows,
        rows if hidden is None else hidden.contiguous().view(torch.uint8),
        rows if counts is None else counts, query.stride(0), query.stride(1), pool.stride(0),
        0 if rows.dim() == 1 else rows.stride(0), width,
    )  # fmt: skip
    grid = (count, tiles.programs(width))
    if exact:
        unit = 1.5 * 2.0 ** (MANTISSA_BITS - exact_bits(dim))
        # What is multiplied and added in one is rounded once, and torch rounds twice.
        vote_exactly[grid](*given, **common, LEVELS=tiles.levels, UNIT=unit, enable_fp_fusion=False)
    else:
        upcast = INTERPRETED and query.dtype == torch.bfloat16
        vote[grid](*given, **common, UPCAST=upcast)
    return found


def chosen(found: torch.Tensor, counts: torch.Tensor | None, places: torch.Tensor) -> None:
    """Into ``places`` int64 [m, k] those of the k best of ``found`` float32 [m, n], ascending."""
    count, width = found.shape
    reach = Reach.of(width)
    choose[count,](
        places, found, places if counts is None else counts, width, found.stride(0),
        K=places.shape[1], BLOCK=reach.block, COUNTED=counts is not None, num_warps=reach.warps,
    )  # fmt: skip
