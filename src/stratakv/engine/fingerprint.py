"""Digests that tell one set of weights from another, for the namespace of page keys.

Owns the choice of samples. A model of 100 GB must not take minutes to name, so not everything is
read; every tensor is sampled, so that a fine-tune of one layer gets another digest. Not a defence
against someone who builds a collision on purpose: whoever can do that already chooses the weights.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import torch
from transformers import PreTrainedModel

SAMPLES: Final = 8
"""Places per tensor."""
SAMPLE_BYTES: Final = 64


class Digest(Protocol):
    """The part of hashlib's objects used here."""

    def update(self, data: bytes, /) -> None: ...


def directory_fingerprint(path: Path, dtype: str) -> bytes:
    """32 bytes from the config, the dtype it runs in, and the safetensors files: names, sizes,
    headers and samples of every tensor."""
    digest = hashlib.sha256()
    _frame(digest, dtype.encode())
    _frame(digest, (path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        _frame(digest, b"%s %d" % (file.name.encode(), file.stat().st_size))
        with file.open("rb") as weights:
            _sample_file(digest, weights)
    return digest.digest()


def module_fingerprint(module: PreTrainedModel, dtype: str) -> bytes:
    """The same for a model in memory (the digests of the two kinds never agree)."""
    digest = hashlib.sha256()
    _frame(digest, b"in memory " + dtype.encode())
    _frame(digest, json.dumps(module.config.to_dict(), sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        _frame(digest, f"{name} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1)
        places = torch.arange(SAMPLES * SAMPLE_BYTES // 4) * max(1, len(flat) // 128)
        some = flat[places[places < len(flat)].to(flat.device)]
        _frame(digest, some.double().cpu().numpy().tobytes())
    return digest.digest()


def _sample_file(digest: Digest, weights: BinaryIO) -> None:
    """Format: uint64 LE header length, JSON header, tensors at offsets after the header."""
    length = int.from_bytes(weights.read(8), "little")
    text = weights.read(length)
    _frame(digest, text)
    header: dict[str, Any] = json.loads(text)
    for name in sorted(header.keys() - {"__metadata__"}):
        begin, end = header[name]["data_offsets"]
        stride = max(SAMPLE_BYTES, (end - begin) // SAMPLES)
        for place in range(begin, end, stride):
            weights.seek(8 + length + place)
            _frame(digest, weights.read(min(SAMPLE_BYTES, end - place)))


def _frame(digest: Digest, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little") + part)
