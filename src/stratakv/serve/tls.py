"""Whether connections are encrypted, and with what. Owns the check of the files; uvicorn uses them.

Standard library alone: flags are refused before anything else is loaded.
"""

import ssl
from dataclasses import dataclass

from stratakv.core.config import ServerConfig
from stratakv.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. ``key`` None: it is in the file of the ``certificate``. ``clients``: whose
    certificates clients must have one of, None: they need none."""

    certificate: str
    key: str | None
    clients: str | None


def tls_files(server: ServerConfig) -> TlsFiles | None:
    """What the server was given; None where it is to speak plain HTTP. ConfigError where one of
    the files is not what its flag says."""
    if server.ssl_certfile is None:
        return None
    files = TlsFiles(
        certificate=server.ssl_certfile, key=server.ssl_keyfile, clients=server.ssl_ca_certs
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    where = f"--ssl-certfile {files.certificate}"
    if files.key is not None:
        where += f" --ssl-keyfile {files.key}"
    try:
        # An empty password: who starts a server is not asked for one.
        context.load_cert_chain(files.certificate, files.key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where}: {_why(error)}; allowed are PEM files of a certificate and its key, which "
            "has no password"
        ) from error
    if files.clients is not None:
        _check_authorities(context, files.clients)
    return files


def _check_authorities(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ssl-ca-certs {path}: {_why(error)}; allowed is a PEM file of certificates"
        ) from error


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason.replace("_", " ").lower() if error.reason else "not readable as PEM"
    return str(error)
