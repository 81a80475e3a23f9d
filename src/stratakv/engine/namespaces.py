"""Which namespace a prompt's pages live in: of the model, its adapter and its salt.

Owns the names of the loaded adapters. Torch-free; must not know what an adapter does.
"""

from collections.abc import Mapping
from typing import Final

from stratakv.core.errors import RequestError
from stratakv.core.ids import NONE
from stratakv.core.page_keys import Namespace


class Namespaces:
    """``base``: of the model without adapter and salt. ``digests``: of the adapters by name, in the
    order in which a ``StepBatch`` numbers them."""

    def __init__(self, base: Namespace, digests: Mapping[str, bytes]) -> None:
        self._base = base
        self._digests: Final = dict(digests)
        self._places = {name: place for place, name in enumerate(digests)}

    def of(self, adapter: str, salt: str) -> Namespace:
        """Where pages of a prompt belong; "" is no adapter, and no salt. RequestError for an
        adapter that is not loaded."""
        salted = self._base.salted(salt)
        if not adapter:
            return salted
        digest = self._digests.get(adapter)
        if digest is None:
            raise RequestError(f"the adapter '{adapter}' does not exist")
        return salted.adapted(digest)

    def place(self, adapter: str) -> int:
        """Number of a loaded adapter, NONE for ""."""
        return self._places[adapter] if adapter else NONE
