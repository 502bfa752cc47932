"""The signature of a bundle, `model.sig`, over all of its files.

The format is OpenSSF Model Signing 1.0: an in-toto statement in a DSSE envelope in a Sigstore
bundle, so `model_signing verify key BUNDLE --signature BUNDLE/model.sig --public_key KEY` accepts
it. The digests are those of the bundle's manifest, so no file is read again.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.machine import require
from kfp_ddp.core.step import needed_secret
from kfp_ddp.core.text import from_json, one_line
from kfp_ddp.models.bundle import SIGNATURE, Bundle, local_bundle
from kfp_ddp.models.release import Signing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
    from securesystemslib.dsse import Envelope

_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
_KINDS = "an EC key on P-256, P-384 or P-521, or an Ed25519 key, in PEM"


class Signer(NamedTuple):
    """The required signer: a key, or an identity at an issuer."""

    name: str
    open: Callable[[bytes], bytes]
    """Returns the verified statement of a signature; raises ValueError if it is invalid."""


def sign(folder: Path, key: "PrivateKeyTypes") -> None:
    """Write the signature of a sealed bundle, unless it has a valid one by this key."""
    bundle = local_bundle(folder)
    try:
        _compare(key_signer(key.public_key()).open(bundle.signature or b""), bundle.signed_files)
    except ValueError:
        bundle.where.write(SIGNATURE, make(bundle, key))


def make(bundle: Bundle, key: "PrivateKeyTypes") -> bytes:
    """Return a signature of a bundle by a key of `private_key`."""
    return _sign(_statement(bundle.model_name, bundle.signed_files), key)


def check_fits(bundle: Bundle, content: bytes) -> None:
    """Refuse a signature that is invalid or of another bundle; the signer is not checked."""
    try:
        payload = _envelope(_json(content)).payload
    except ValueError:
        raise InputError(
            "this is not a signature in the format of OpenSSF Model Signing: make one by "
            "model_signing sign"
        ) from None
    try:
        _compare(payload, bundle.signed_files)
    except ValueError as error:
        raise InputError(f"this is not a signature of {bundle.uri}: {error}") from None


def check(bundle: Bundle, signer: Signer | None, content: bytes | None = None) -> None:
    """Refuse a bundle, also one at another model's name, whose signature is not the signer's.

    Without a `signer` every bundle is accepted.
    """
    if signer is None:
        return
    content = bundle.signature if content is None else content
    if content is None:
        raise InputError(
            f"{bundle.title} {bundle.uri} is not signed: it has no {SIGNATURE}; publish it with "
            "sign_key, or sign it with kfp-ddp sign"
        )
    if bundle.model not in ("", bundle.model_name):
        raise InputError(
            f"{bundle.title} {bundle.uri}, which CHAMPION names, is of the model "
            f"{bundle.model_name}: do not use it, promote a version of {bundle.model}"
        )
    try:
        _compare(signer.open(content), bundle.signed_files)
    except ValueError as error:
        raise InputError(
            f"{bundle.title} {bundle.uri} has no valid signature of {signer.name}: {error}; do not "
            "use it"
        ) from None


def signer_of(key: str, setting: str) -> Signer | None:
    """Return the signer whose public key the bucket's secret has under `key`; None for no key."""
    if not key:
        return None
    pem = needed_secret(key, setting)
    return key_signer(public_key(pem.encode(), f"{setting} ({key})"))


def key_of(signing: Signing) -> "PrivateKeyTypes | None":
    """Return the key that the settings name, from the bucket's secret; None for no key."""
    if not signing.sign_key:
        return None
    pem = needed_secret(signing.sign_key, "sign_key")
    password = ""
    if signing.sign_password:
        password = needed_secret(signing.sign_password, "sign_password")
    return private_key(pem.encode(), password, f"sign_key ({signing.sign_key})")


def private_key(pem: bytes, password: str, title: str) -> "PrivateKeyTypes":
    """Return a key to sign with; InputError calls an invalid one by its `title`."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(pem, password.encode() or None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        locked = "the right password" if b"ENCRYPTED" in pem else "no password"
        raise InputError(f"{title} is not a private key: give {_KINDS}, with {locked}") from None
    _check_kind(key.public_key(), title)
    return key


def public_key(pem: bytes, title: str) -> "PublicKeyTypes":
    """Return a key to verify with; InputError calls an invalid one by its `title`."""
    require("verify", title)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        private = b"PRIVATE KEY" in pem
        advice = "openssl pkey -in KEY -pubout prints it" if private else f"give {_KINDS}"
        raise InputError(f"{title} is not a public key: {advice}") from None
    _check_kind(key, title)
    return key


def _check_kind(key: "PublicKeyTypes", title: str) -> None:
    from securesystemslib.signer import SSlibKey

    try:
        kind = SSlibKey.from_crypto(key).keytype
    except ValueError:
        kind = ""
    if kind not in ("ecdsa", "ed25519"):
        raise InputError(f"{title} is a key of another kind: give {_KINDS}")


def key_signer(key: "PublicKeyTypes") -> Signer:
    """Return the signer with this public key."""
    from securesystemslib.exceptions import UnverifiedSignatureError
    from securesystemslib.signer import SSlibKey

    name = fingerprint(key)
    verifier = SSlibKey.from_crypto(key)

    def open_(content: bytes) -> bytes:
        bundle = _json(content)
        try:
            envelope = _envelope(bundle, verifier.keyid)
            hint = str(bundle["verificationMaterial"].get("publicKey", {}).get("hint", ""))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(f"{SIGNATURE} is not a signature by a key") from None
        try:
            envelope.verify([verifier], threshold=1)
        except UnverifiedSignatureError:
            other = f"by another key, {hint[:12]}" if hint and hint != name else "not by this key"
            raise ValueError(f"{SIGNATURE} was made {other}") from None
        return envelope.payload

    return Signer(f"the key {name[:12]}", open_)


def identity_signer(identity: str, issuer: str, trust: Path | None = None) -> Signer:
    """Return the signer with an identity at an OpenID issuer, verified by Sigstore or `trust`."""
    require("sign", "a signature by identity")
    from sigstore.errors import Error
    from sigstore.models import Bundle, InvalidBundle, TrustedRoot
    from sigstore.verify import Verifier
    from sigstore.verify.policy import Identity

    try:
        if trust is None:
            verifier = Verifier.production()
        else:
            verifier = Verifier(trusted_root=TrustedRoot.from_file(str(trust)))
    except (OSError, ValueError, Error) as error:
        raise InputError(
            f"cannot load Sigstore's root of trust: {one_line(error)}; give --trust-root a "
            "trusted_root.json"
        ) from None

    def open_(content: bytes) -> bytes:
        try:
            bundle = Bundle.from_json(content)
            return verifier.verify_dsse(bundle, Identity(identity=identity, issuer=issuer))[1]
        except (Error, InvalidBundle, ValueError) as error:
            raise ValueError(f"{SIGNATURE} is invalid: {one_line(error)}") from None

    return Signer(f"{identity} at {issuer}", open_)


def fingerprint(key: "PublicKeyTypes") -> str:
    """Return the SHA-256 of a public key's PEM, in hex, as signatures name their key."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(pem).hexdigest()


def _statement(name: str, files: Mapping[str, str]) -> bytes:
    """Return the statement of https://github.com/ossf/model-signing-spec."""
    files = dict(sorted(files.items()))
    root = hashlib.sha256(b"".join(map(bytes.fromhex, files.values())))
    resources = [{"name": n, "algorithm": "sha256", "digest": sha} for n, sha in files.items()]
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


def _sign(payload: bytes, key: "PrivateKeyTypes") -> bytes:
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import CryptoSigner, Signature

    envelope = Envelope(payload, _PAYLOAD_TYPE, {})
    envelope.signatures[""] = Signature("", CryptoSigner(key).sign(envelope.pae()).signature)
    hint = fingerprint(key.public_key())
    document = {
        "mediaType": _MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": envelope.to_dict(),
    }
    return json.dumps(document).encode()


def _envelope(bundle: Any, key_id: str = "") -> "Envelope":
    """Return the DSSE envelope of a Sigstore bundle with `key_id`, which this format lacks."""
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import FormatError

    try:
        content = bundle["dsseEnvelope"]
        signatures = [{**content["signatures"][0], "keyid": key_id}]
        envelope = Envelope.from_dict({**content, "signatures": signatures})
    except (AttributeError, FormatError, LookupError, TypeError, ValueError):
        raise ValueError(f"{SIGNATURE} is not a DSSE envelope") from None
    if envelope.payload_type != _PAYLOAD_TYPE:
        raise ValueError(f"{SIGNATURE} is not of an in-toto statement")
    return envelope


def _compare(payload: bytes, files: Mapping[str, str]) -> None:
    """Raise ValueError if a statement is not of exactly these files."""
    statement = _json(payload)
    try:
        if statement["_type"] != _STATEMENT or statement["predicateType"] != _PREDICATE:
            raise ValueError(f"{SIGNATURE} does not sign a model")
        signed = {
            str(resource["name"]): str(resource["digest"])
            for resource in statement["predicate"]["resources"]
            if resource["algorithm"] == "sha256"
        }
    except (KeyError, TypeError):
        raise ValueError(f"{SIGNATURE} does not sign a model") from None
    for name in sorted(files.keys() | signed.keys()):
        if name not in signed:
            raise ValueError(f"{name} is not signed")
        if name not in files:
            raise ValueError(f"{name}, which is signed, is missing")
        if signed[name] != files[name]:
            raise ValueError(f"{name} differs from the signed one")


def _json(content: bytes) -> Any:
    try:
        return from_json(content)
    except ValueError:
        raise ValueError(f"{SIGNATURE} is not JSON") from None
