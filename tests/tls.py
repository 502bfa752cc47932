"""Servers on the loopback interface that speak TLS, with a certificate to trust."""

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def loopback_certificate(folder: Path) -> Path:
    """A file with a key and its certificate for 127.0.0.1, written to this folder."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), 7, now - day, now + day)
    signed = made.add_extension(here, critical=False).sign(key, hashes.SHA256())
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    certificate = folder / "peer.pem"
    certificate.write_bytes(pem + signed.public_bytes(serialization.Encoding.PEM))
    return certificate


def server_context(certificate: Path) -> ssl.SSLContext:
    """What a server with this certificate speaks TLS by."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context
