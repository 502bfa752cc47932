"""The signature of a bundle, `model.sig`: somebody vouches for exactly these files.

Its form is that of OpenSSF Model Signing 1.0, an in-toto statement in a DSSE envelope in a Sigstore
bundle, so that `model_signing verify key BUNDLE --signature BUNDLE/model.sig --public_key KEY`
takes it too. The digests are those of the bundle's manifest, and so no file is read again.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.files import atomic_write, read_below
from kfp_ddp.core.step import needed_secret
from kfp_ddp.core.text import one_line
from kfp_ddp.models.bundle import (
    LARGEST_MANIFEST,
    LARGEST_SIGNATURE,
    LARGEST_SUCCESS,
    MANIFEST,
    SIGNATURE,
    SUCCESS,
    listed_in,
)
from kfp_ddp.models.release import Signing
from kfp_ddp.models.sealed import Sealed

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        ECDSA,
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

    PrivateKey = EllipticCurvePrivateKey | Ed25519PrivateKey
    PublicKey = EllipticCurvePublicKey | Ed25519PublicKey

_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
_DIGESTS = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
"""The digest that goes with each curve that is used to sign."""
_KINDS = "an EC key on P-256, P-384 or P-521, or an Ed25519 key, in PEM"

Opener = Callable[[bytes], bytes]
"""Returns what a signature vouches for; raises ValueError with why it is not believed."""


class Signer(NamedTuple):
    """Who has to have signed: a key, or an identity at an issuer, and how that is found out."""

    name: str
    open: Opener


def sign(folder: Path, key: "PrivateKey") -> None:
    """Write the signature of a sealed bundle, unless it has one by this key.

    Args:
        folder: The bundle.
        key: As `private_key` returns it.

    Raises:
        InputError: the bundle cannot be read.
        StorageError: its folder cannot be written.
    """
    ends = (
        read_below(folder, MANIFEST, LARGEST_MANIFEST),
        read_below(folder, SUCCESS, LARGEST_SUCCESS),
    )
    files = _vouched(*ends)
    try:
        _compare(
            by_key(key.public_key()).open(read_below(folder, SIGNATURE, LARGEST_SIGNATURE)), files
        )
    except (OSError, ValueError):
        content = _signed(_statement(folder.name, files), key)
        try:
            with atomic_write(folder / SIGNATURE) as file:
                file.write(content)
        except OSError as error:
            raise StorageError(
                f"{folder / SIGNATURE} cannot be written: {error.strerror}; make room for it"
            ) from None


def made(sealed: Sealed, key: "PrivateKey") -> bytes:
    """A signature of a bundle where it lies, as its manifest lists it.

    Raises:
        InputError: it cannot be read.
    """
    return _signed(_statement(sealed.version, _vouched_at(sealed)), key)


def check_fits(sealed: Sealed, content: bytes) -> None:
    """Refuse a signature, whoever made it, that is not of this bundle.

    Raises:
        InputError: saying why.
    """
    try:
        envelope = _json(content)["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"], validate=True)
    except (KeyError, TypeError, ValueError):
        raise InputError(
            "that is no signature in the form of OpenSSF Model Signing: make one by "
            "model_signing sign"
        ) from None
    try:
        _compare(payload, _vouched_at(sealed))
    except ValueError as error:
        raise InputError(f"that is no signature of {sealed.uri}: {error}") from None


def check(sealed: Sealed, signer: Signer, content: bytes | None = None) -> None:
    """Refuse a bundle that the signer does not vouch for, as its manifest lists it.

    Args:
        sealed: The bundle.
        signer: As `by_key` or `by_identity` returns it.
        content: A signature that lies elsewhere; None for the one in the bundle.

    Raises:
        InputError: saying why.
    """
    if content is None:
        content = sealed.where.read(sealed.folder + SIGNATURE, LARGEST_SIGNATURE)
    if content is None:
        raise InputError(
            f"{sealed.called} {sealed.uri} is not signed: it has no {SIGNATURE}; publish it with "
            "sign_key, or sign it with kfp-ddp sign"
        )
    files = _vouched_at(sealed)
    try:
        _compare(signer.open(content), files)
    except ValueError as error:
        raise InputError(
            f"{sealed.called} {sealed.uri} is not what {signer.name} vouches for: {error}; do not "
            "use it"
        ) from None


def key_of(signing: Signing) -> "PrivateKey | None":
    """The key that the settings name, from the bucket's secret; None where they name none.

    Raises:
        InputError: the secret lacks it, or it cannot be used.
    """
    if not signing.sign_key:
        return None
    pem, password = needed_secret(signing.sign_key, "sign_key"), ""
    if signing.sign_password:
        password = needed_secret(signing.sign_password, "sign_password")
    return private_key(pem.encode(), password, f"sign_key ({signing.sign_key})")


def private_key(pem: bytes, password: str, called: str) -> "PrivateKey":
    """A key to sign with.

    Args:
        pem: Its text.
        password: '' for none.
        called: What it is in an error.

    Raises:
        InputError: it is none, or of a kind that is not used to sign.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(pem, password.encode() or None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        locked = "the right password" if b"ENCRYPTED" in pem else "no password"
        raise InputError(f"{called} is no private key: give {_KINDS}, with {locked}") from None
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in _DIGESTS:
        return key
    raise InputError(f"{called} is a key of another kind: give {_KINDS}")


def public_key(pem: bytes, called: str) -> "PublicKey":
    """A key to check signatures with, from its text; `called` is what it is in an error.

    Raises:
        InputError: it is none, or of a kind that is not used to sign.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        private = b"PRIVATE KEY" in pem
        advice = "openssl pkey -in KEY -pubout prints it" if private else f"give {_KINDS}"
        raise InputError(f"{called} is no public key: {advice}") from None
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _DIGESTS:
        return key
    raise InputError(f"{called} is a key of another kind: give {_KINDS}")


def by_key(key: "PublicKey") -> Signer:
    """Who holds the private half of a key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec

    name = fingerprint(key)

    def opened(content: bytes) -> bytes:
        bundle = _json(content)
        try:
            hint = bundle["verificationMaterial"].get("publicKey", {}).get("hint", "")
            envelope = bundle["dsseEnvelope"]
            payload = base64.b64decode(envelope["payload"], validate=True)
            made = base64.b64decode(envelope["signatures"][0]["sig"], validate=True)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"{SIGNATURE} is no signature by a key") from None
        try:
            if isinstance(key, ec.EllipticCurvePublicKey):
                key.verify(made, _encoded(payload), _ecdsa(key.curve.name))
            else:
                key.verify(made, _encoded(payload))
        except InvalidSignature:
            other = (
                f"by another key, {str(hint)[:12]}" if hint and hint != name else "not by this key"
            )
            raise ValueError(f"{SIGNATURE} was made {other}") from None
        return payload

    return Signer(f"the key {name[:12]}", opened)


def by_identity(identity: str, issuer: str, trust: Path | None = None) -> Signer:
    """Who proved to be somebody at an OpenID Connect issuer, as Sigstore's log has it.

    Args:
        identity: Such as an e-mail address, or a workflow's URI.
        issuer: Such as https://accounts.google.com.
        trust: A trusted_root.json of another Sigstore than the public one.

    Raises:
        InputError: sigstore is not installed, or the root of trust cannot be read.
    """
    try:
        from sigstore.errors import Error
        from sigstore.models import Bundle, InvalidBundle, TrustedRoot
        from sigstore.verify import Verifier
        from sigstore.verify.policy import Identity
    except ImportError:
        raise InputError(
            "signatures by identity need sigstore: pip install 'kfp-ddp[sign]'"
        ) from None
    try:
        if trust is None:
            verifier = Verifier.production()
        else:
            verifier = Verifier(trusted_root=TrustedRoot.from_file(str(trust)))
    except (OSError, ValueError, Error) as error:
        raise InputError(
            f"Sigstore's root of trust cannot be had: {one_line(error)}; give --trust-root a "
            "trusted_root.json"
        ) from None

    def opened(content: bytes) -> bytes:
        try:
            bundle = Bundle.from_json(content)
            return verifier.verify_dsse(bundle, Identity(identity=identity, issuer=issuer))[1]
        except (Error, InvalidBundle, ValueError) as error:
            raise ValueError(f"{SIGNATURE} does not hold: {one_line(error)}") from None

    return Signer(f"{identity} at {issuer}", opened)


def fingerprint(key: "PublicKey") -> str:
    """SHA-256 of a public key's PEM, in hex, as signatures name their key."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(pem).hexdigest()


def _vouched_at(sealed: Sealed) -> dict[str, str]:
    manifest = sealed.where.read(sealed.folder + MANIFEST, LARGEST_MANIFEST)
    success = sealed.where.read(sealed.folder + SUCCESS, LARGEST_SUCCESS)
    return _vouched(manifest or b"", success or b"")


def _vouched(manifest: bytes, success: bytes) -> dict[str, str]:
    """SHA-256 of each file that a signature is of, by its name."""
    ends = {MANIFEST: manifest, SUCCESS: success}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in ends.items()}
    return listed_in(manifest.decode(errors="replace")) | digests


def _statement(name: str, files: Mapping[str, str]) -> bytes:
    """Such as https://github.com/ossf/model-signing-spec describes: the digests in one order."""
    root = hashlib.sha256(b"".join(bytes.fromhex(files[each]) for each in sorted(files)))
    resources = [
        {"name": each, "algorithm": "sha256", "digest": files[each]} for each in sorted(files)
    ]
    serialization = {
        "method": "files",
        "hash_type": "sha256",
        "allow_symlinks": False,
        "ignore_paths": [SIGNATURE],
    }
    statement = {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": root.hexdigest()}}],
        "predicateType": _PREDICATE,
        "predicate": {"serialization": serialization, "resources": resources},
    }
    return json.dumps(statement).encode()


def _signed(payload: bytes, key: "PrivateKey") -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ec

    if isinstance(key, ec.EllipticCurvePrivateKey):
        made = key.sign(_encoded(payload), _ecdsa(key.curve.name))
    else:
        made = key.sign(_encoded(payload))
    hint = fingerprint(key.public_key())
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": _PAYLOAD_TYPE,
        "signatures": [{"sig": base64.b64encode(made).decode(), "keyid": ""}],
    }
    bundle = {
        "mediaType": _MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": envelope,
    }
    return json.dumps(bundle).encode()


def _compare(payload: bytes, files: Mapping[str, str]) -> None:
    """Refuse a statement that is not of exactly these files."""
    statement = _json(payload)
    try:
        if statement["_type"] != _STATEMENT or statement["predicateType"] != _PREDICATE:
            raise ValueError(f"{SIGNATURE} is of something else than a model")
        said = {
            str(each["name"]): str(each["digest"])
            for each in statement["predicate"]["resources"]
            if each["algorithm"] == "sha256"
        }
    except (KeyError, TypeError):
        raise ValueError(f"{SIGNATURE} is of something else than a model") from None
    for name in sorted(files.keys() | said.keys()):
        if name not in said:
            raise ValueError(f"{name} is not signed")
        if name not in files:
            raise ValueError(f"{name}, which is signed, is missing")
        if said[name] != files[name]:
            raise ValueError(f"{name} is another than was signed")


def _encoded(payload: bytes) -> bytes:
    """What is signed: https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md."""
    return f"DSSEv1 {len(_PAYLOAD_TYPE)} {_PAYLOAD_TYPE} {len(payload)} ".encode() + payload


def _ecdsa(curve: str) -> "ECDSA":
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    return ECDSA(getattr(hashes, _DIGESTS[curve])())


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(f"{SIGNATURE} is no JSON") from None
