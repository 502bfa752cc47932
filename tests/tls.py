"""Keys: of servers on the loopback interface that speak TLS, and of an account at Google."""

import contextlib
import datetime
import ipaddress
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from kfp_ddp.storage.http import origin


def google_account(folder: Path, token_uri: str, patch: pytest.MonkeyPatch) -> Path:
    """Let the environment name a service account whose tokens come from this address."""
    key = rsa.generate_private_key(65537, 2048)
    account = {
        "type": "service_account",
        "client_email": "reader@project.iam.gserviceaccount.com",
        "private_key": private(key).decode(),
        "private_key_id": "1",
        "token_uri": token_uri,
    }
    file = folder / "account.json"
    file.write_text(json.dumps(account))
    patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    patch.setenv("GOOGLE_CLOUD_PROJECT", "project")
    return file


def private(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    """Return a key in the form of a PEM file."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def server_context(certificate: Path) -> ssl.SSLContext:
    """What a server with this certificate speaks TLS by."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


@contextlib.contextmanager
def trusted(folder: Path) -> Iterator[ssl.SSLContext]:
    """Trust a new certificate for 127.0.0.1; yields what a server with it speaks TLS by."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), 7, now - day, now + day)
    signed = made.add_extension(here, critical=False).sign(key, hashes.SHA256())
    certificate = folder / "peer.pem"
    certificate.write_bytes(private(key) + signed.public_bytes(serialization.Encoding.PEM))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(certificate))
        origin.tls.cache_clear()
        yield server_context(certificate)
    origin.tls.cache_clear()
