"""What every case of ``stratakv bench transfer`` reports, and how its rates come about.

Owns the record and the arithmetic from seconds to ratios. Must not move a byte.
"""

from dataclasses import dataclass

import torch

from stratakv.bench.rig import Laps


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCase:
    """Medians; a ratio is that of the medians. GB are 10^9 bytes.

    ``page_bytes``: of a page of the anchor. ``segment_bytes``: what lies together on the device,
    one layer of one buffer of a page; the mean where these differ. ``bytes_moved``: by one copy;
    ``bytes_needed``: what the retention rules ask for; ``bytes_whole``: all pages of the prefix in
    every pool.
    """

    spec: str
    page_tokens: int
    page_bytes: int
    segment_bytes: int
    d2h_ratio: float
    h2d_ratio: float
    d2h_gb_s: float
    h2d_gb_s: float
    copy_gb_s: float
    bytes_moved: int
    bytes_needed: int
    bytes_whole: int


@dataclass(frozen=True, slots=True)
class TransferYardstick:
    """Single-threaded ``torch.Tensor.copy_`` between two tensors whose memory has been touched."""

    source: torch.Tensor
    target: torch.Tensor

    @classmethod
    def of(cls, size_bytes: int) -> "TransferYardstick":
        source, target = (torch.empty(size_bytes, dtype=torch.uint8).fill_(1) for _ in range(2))
        return cls(source, target)

    def time(self, laps: Laps) -> None:
        laps.time("copy", lambda: self.target.copy_(self.source))

    def rates(self, laps: Laps, size_bytes: int) -> dict[str, float]:
        """The five rates of a case, from the laps of "copy", "d2h" and "h2d"; both ways move
        ``size_bytes``."""
        copy_s, d2h_s, h2d_s = (laps.median_s(name) for name in ("copy", "d2h", "h2d"))
        copy_gb_s = self.source.nbytes / copy_s / 1e9
        d2h_gb_s, h2d_gb_s = (size_bytes / taken_s / 1e9 for taken_s in (d2h_s, h2d_s))
        return {
            "d2h_ratio": d2h_gb_s / copy_gb_s,
            "h2d_ratio": h2d_gb_s / copy_gb_s,
            "d2h_gb_s": d2h_gb_s,
            "h2d_gb_s": h2d_gb_s,
            "copy_gb_s": copy_gb_s,
        }
