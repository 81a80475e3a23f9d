"""Attention over rows that somebody has selected, with torch's dense kernels: latents, compressed
entries. A row is key and value at once. Owns the arithmetic, and cutting it into pieces.
"""

from collections.abc import Sequence

import torch

from stratakv.engine.attention.kernels import SelectedRows
from stratakv.engine.attention.paged_layer import Scratch
from stratakv.engine.attention.scratch_limit import ATTENDED_BYTES, pieces


def attend_selected(
    query: torch.Tensor,
    parts: Sequence[SelectedRows],
    value_dim: int,
    scale: float,
    sinks: torch.Tensor | None,
    scratch: Scratch,
) -> torch.Tensor:
    """As ``AttentionKernels.attend_selected``, some queries at a time."""
    out = query.new_empty(*query.shape[:2], value_dim)

    def read(at: int, rows: torch.Tensor) -> torch.Tensor:
        found = scratch.gather(f"selected {at}", parts[at].pool, rows.reshape(-1))
        return found.view(*rows.shape, -1).to(query.dtype)

    # What all share is read once.
    shared = [read(at, part.rows) if _shared(part) else None for at, part in enumerate(parts)]
    each_bytes = sum(_query_bytes(part, query.shape[1]) for part in parts)
    for some in pieces(len(query), each_bytes):
        keys = [
            read(at, part.rows[some]) if found is None else found
            for at, (part, found) in enumerate(zip(parts, shared, strict=True))
        ]
        hidden = [None if part.hidden is None else part.hidden[some] for part in parts]
        out[some] = _attend(query[some] * scale, keys, hidden, value_dim, sinks)
    return out


def _attend(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    hidden: list[torch.Tensor | None],
    value_dim: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [n, H, d], scaled; of each part keys [m, d] or [n, m, d] and hidden [n, m]. Returns
    [n, H, value_dim]."""
    logits: list[torch.Tensor] = []
    for part, hides in zip(keys, hidden, strict=True):
        scores = query @ part.mT
        if hides is not None:
            scores.masked_fill_(hides[:, None], -torch.inf)
        logits.append(scores)
    if sinks is not None:
        logits.append(sinks.view(1, -1, 1).expand(len(query), -1, 1))
    whole = torch.cat(logits, -1) if len(logits) > 1 else logits[0]
    weights = whole.softmax(-1, dtype=torch.float32).to(query.dtype)
    # A sink takes weight and gives nothing: the last share has no keys.
    shares = weights.split([part.shape[-1] for part in logits], -1)
    found = [share @ part[..., :value_dim] for share, part in zip(shares, keys)]  # noqa: B905
    return sum(found[1:], found[0])


def _shared(part: SelectedRows) -> bool:
    return part.rows.dim() == 1


def _query_bytes(part: SelectedRows, heads: int) -> int:
    """Scratch of attending with one query."""
    own = 0 if _shared(part) else part.pool.shape[1] * 2 * part.pool.element_size()
    return part.rows.shape[-1] * (ATTENDED_BYTES * heads + own)
