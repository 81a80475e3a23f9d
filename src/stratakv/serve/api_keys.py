"""Keys that open the API, each with its client's name. Owns the form of ``--api-key-file``."""

import re
from collections.abc import Mapping
from typing import Final

from stratakv.core.config import ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.core.secret_file import ALLOWED, read_secret

FLAG: Final = "--api-key-file"
MOST_BYTES: Final = 1 << 20
UNNAMED: Final = "default"
"""The name of --api-key's."""
_LINE: Final = re.compile(r"([\w.@-]{1,64})\s+(\S+)")
_FORM: Final = "allowed are lines of NAME KEY, each name and each key once"


def api_keys(server: ServerConfig) -> Mapping[str, str]:
    """Key by name; none: anyone may ask. ConfigError where the file is none, or none of ours
    alone; no refusal shows a key."""
    found = {} if server.api_key is None else {UNNAMED: server.api_key}
    if server.api_key_file is None:
        return found
    for number, line in enumerate(_text(server.api_key_file).splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        where = f"{FLAG} {server.api_key_file}, line {number}"
        parts = _LINE.fullmatch(line.strip())
        if parts is None:
            raise ConfigError(f"{where}: that is no name and a key; {_FORM}")
        if parts[1] in found or parts[2] in {*found.values(), server.admin_key}:
            raise ConfigError(f"{where}: its name or key is taken; {_FORM}")
        found[parts[1]] = parts[2]
    if not found:
        raise ConfigError(f"{FLAG} {server.api_key_file}: there is no key in it; {_FORM}")
    return found


def join_key(keys: Mapping[str, str]) -> str | None:
    """Which of them a server names to others that have the same: the first one, which is that of
    --api-key where there is one. None: they ask for none."""
    return next(iter(keys.values()), None)


def _text(path: str) -> str:
    try:
        data = read_secret(path, MOST_BYTES)
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        return data.decode()
    except UnicodeDecodeError:
        why = "it is no text in UTF-8"
    except ValueError as error:
        why = str(error)
    raise ConfigError(f"{FLAG} {path}: {why}; allowed is a regular file {ALLOWED} (chmod 600)")
