"""What an operator says of the tier, inside another engine's own settings. Owns the record, and the
refusals of what it cannot hold."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

from stratakv.core.errors import ConfigError
from stratakv.storage.urls import TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """``storage``: a URL as ``--storage`` takes it. ``storage_key_file``: holds the secret that
    pages are sealed with. ``timeout_s``: what the store has not answered by then is a miss."""

    storage: str
    storage_key_file: str | None = None
    timeout_s: float = TIMEOUT_S

    @classmethod
    def of(
        cls, flag: str, given: Mapping[str, object], others: Collection[str] = ()
    ) -> "TierSettings":
        """``given``: as it stands in the JSON of ``flag``. ``others``: what else may stand there,
        which is not ours."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(given.keys() - {*known, *others}):
            allowed = ", ".join([*known, *sorted(others)])
            raise ConfigError(f"{flag} {', '.join(unknown)}: allowed are {allowed}")
        storage, key_file = given.get("storage"), given.get("storage_key_file")
        if not isinstance(storage, str):
            raise ConfigError(f"{flag} storage {storage}: allowed is a URL, as --storage takes it")
        if key_file is not None and not isinstance(key_file, str):
            raise ConfigError(f"{flag} storage_key_file {key_file}: allowed is the path of a file")
        timeout_s = seconds(flag, "timeout_s", given, TIMEOUT_S)
        return cls(storage=storage, storage_key_file=key_file, timeout_s=timeout_s)


def seconds(flag: str, name: str, given: Mapping[str, object], default: float) -> float:
    """A limit that stands in the JSON of ``flag`` as ``name``."""
    value = given.get(name, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < math.inf  # nor NaN, of which nothing is ever late
    ):
        raise ConfigError(f"{flag} {name} {value}: allowed is a number above 0")
    return float(value)
