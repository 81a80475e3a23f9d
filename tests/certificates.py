"""Certificates for tests, of an authority of their own. Owns how they are made."""

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PLAIN = serialization.NoEncryption()
PEM = serialization.Encoding.PEM


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Writes below ``path``."""

    def __init__(self, path: Path, name: str = "authority") -> None:
        self._path = path
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = path / f"{name}.pem"
        made = self._sign(name, self._key, own=True)
        self.certificate.write_bytes(made.public_bytes(PEM))

    def issue(self, name: str, password: bytes = b"") -> Pair:
        """For 127.0.0.1."""
        key = ec.generate_private_key(ec.SECP256R1())
        pair = Pair(self._path / f"{name}.crt", self._path / f"{name}.key")
        pair.certificate.write_bytes(self._sign(name, key, own=False).public_bytes(PEM))
        locked = serialization.BestAvailableEncryption(password) if password else PLAIN
        form = serialization.PrivateFormat.PKCS8
        pair.key.write_bytes(key.private_bytes(PEM, form, locked))
        return pair

    def _sign(self, name: str, key: ec.EllipticCurvePrivateKey, *, own: bool) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        day = dt.timedelta(days=1)
        addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        authority = self._key.public_key()
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
             "encipher_only", "decipher_only"), False,
        )  # fmt: skip
        made = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.BasicConstraints(ca=own, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(digital_signature=True, key_cert_sign=own, crl_sign=own, **usage),
                critical=True,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority), False)
        )
        if not own:
            made = made.add_extension(addresses, critical=False)
        return made.sign(self._key, hashes.SHA256())
