"""How one side describes itself to a peer, as bytes that travel in a handshake.

Owns the format. Comes from another machine: nothing in it is believed before it was checked.
"""

import base64
import json
from dataclasses import dataclass
from typing import Any, Final

from stratakv.core.errors import TransportError
from stratakv.disagg.ranges import Regions

VERSION: Final = 1
DESCRIPTION_BYTES: Final = 1 << 20
"""The longest description that is read."""


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """``transport``: which one it is. ``regions``: of the side that describes itself. ``wire``:
    what that transport's ``connect`` needs."""

    transport: str
    regions: Regions
    wire: bytes

    def encode(self) -> bytes:
        fields = {
            "version": VERSION,
            "transport": self.transport,
            "regions": self.regions.places(),
            "wire": base64.b64encode(self.wire).decode(),
        }
        return json.dumps(fields).encode()


def decode(data: bytes, transport: str) -> Description:
    """TransportError where it is none, or of another transport or version."""
    if len(data) > DESCRIPTION_BYTES:
        raise TransportError(f"the peer's description has {len(data)} bytes, at most 1 MiB is read")
    try:
        fields: Any = json.loads(data)
        version, name = int(fields["version"]), str(fields["transport"])
        places = [(int(address), int(size)) for address, size in fields["regions"]]
        found = Description(
            name, Regions.of(places), base64.b64decode(fields["wire"], validate=True)
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise TransportError(f"the peer's description cannot be read: {error!r}") from error
    if name != transport:
        raise TransportError(f"the peer's transport is {name!r}, this side's {transport!r}")
    if version != VERSION:
        raise TransportError(f"the peer describes itself by version {version}, not {VERSION}")
    return found
