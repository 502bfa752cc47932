"""Who vouches for a bundle, and what a signature does not let through."""

import base64
import importlib.resources
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from kfp_ddp.core.errors import InputError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models import bundle, signature
from kfp_ddp.models.bundle import Bundle
from kfp_ddp.models.release import Signing
from kfp_ddp.storage.kinds import open_store
from tests.exports import exported

KEYS: dict[str, Any] = {
    "P-256": ec.generate_private_key(ec.SECP256R1()),
    "P-384": ec.generate_private_key(ec.SECP384R1()),
    "P-521": ec.generate_private_key(ec.SECP521R1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate(),
}
KEY, OTHER = KEYS["P-256"], ec.generate_private_key(ec.SECP256R1())


def pem(key: Any, password: str = "") -> bytes:
    """The text of a private key."""
    locked: KeySerializationEncryption = NoEncryption()
    if password:
        locked = BestAvailableEncryption(password.encode())
    text: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked)
    return text


def public(key: Any) -> bytes:
    """The text of the public half."""
    text: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return text


def made(tmp_path: Path, key: Any = None) -> Path:
    """A bundle in a folder, signed where there is a key."""
    folder = tmp_path / "bundle"
    exported(open_store(str(tmp_path / "models")), "flowers", folder, 3, Lineage("r1"))
    if key is not None:
        signature.sign(folder, key)
    return folder


def check(folder: Path, key: Any = KEY) -> None:
    sealed = Bundle.at(open_store(str(folder)), "", "the bundle", "export again")
    signature.check(sealed, signature.by_key(key.public_key()))


@pytest.mark.parametrize("kind", KEYS)
def test_what_was_signed_holds_for_this_key_and_for_no_other(tmp_path: Path, kind: str) -> None:
    folder = made(tmp_path, KEYS[kind])
    check(folder, KEYS[kind])
    with pytest.raises(InputError, match=r"model\.sig was made by another key"):
        check(folder, OTHER)
    assert bundle.intact(folder)


def test_a_signed_bundle_is_uploaded_with_its_signature_and_found_whole(tmp_path: Path) -> None:
    where = open_store(str(tmp_path / "bucket"))
    uri = bundle.upload(made(tmp_path, KEY), "flowers", where)
    check(Path(uri))


def test_signing_again_by_the_same_key_changes_nothing(tmp_path: Path) -> None:
    folder = made(tmp_path, KEY)
    before = (folder / bundle.SIGNATURE).read_bytes()
    signature.sign(folder, KEY)
    assert (folder / bundle.SIGNATURE).read_bytes() == before
    signature.sign(folder, OTHER)
    check(folder, OTHER)


def test_a_bundle_sealed_again_has_no_signature_of_what_it_was(tmp_path: Path) -> None:
    folder = made(tmp_path, KEY)
    (folder / "verdict.json").write_text("{}")
    for name in (bundle.MANIFEST, bundle.SUCCESS):
        (folder / name).unlink()
    bundle.seal(folder)
    assert bundle.intact(folder)
    with pytest.raises(InputError, match=r"is not signed: it has no model\.sig; publish it with"):
        check(folder)


def resealed(folder: Path, change: str) -> None:
    """Change a signed bundle and make its manifest fit, as who may write but has no key."""
    content = (folder / bundle.SIGNATURE).read_bytes()
    if change == "gone":
        (folder / "model.safetensors").unlink()
    else:
        (folder / {"changed": "model.safetensors", "more": "more"}[change]).write_bytes(b"mine")
    for name in (bundle.MANIFEST, bundle.SUCCESS):
        (folder / name).unlink()
    bundle.seal(folder)
    (folder / bundle.SIGNATURE).write_bytes(content)
    assert bundle.intact(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("changed", "MANIFEST.sha256 differs from the signed one"),
        ("more", "MANIFEST.sha256 differs from the signed one"),
        ("gone", "MANIFEST.sha256 differs from the signed one"),
    ],
)
def test_a_manifest_made_to_fit_a_changed_bundle_is_told(
    tmp_path: Path, change: str, words: str
) -> None:
    folder = made(tmp_path, KEY)
    resealed(folder, change)
    with pytest.raises(InputError, match=words):
        check(folder)


def envelope(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / bundle.SIGNATURE).read_text())
    return found


def text(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


@pytest.mark.parametrize("part", ["payload", "signature"])
def test_a_signature_of_which_a_bit_was_changed_does_not_hold(tmp_path: Path, part: str) -> None:
    folder = made(tmp_path, KEY)
    said = envelope(folder)
    inner = said["dsseEnvelope"] if part == "payload" else said["dsseEnvelope"]["signatures"][0]
    name = "payload" if part == "payload" else "sig"
    content = bytearray(base64.b64decode(inner[name]))
    content[len(content) // 2] ^= 1
    inner[name] = text(bytes(content))
    (folder / bundle.SIGNATURE).write_text(json.dumps(said))
    with pytest.raises(InputError, match="was made not by this key"):
        check(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "not a signature by a key"),
        ("{}", "not a signature by a key"),
        ('{"verificationMaterial": {}, "dsseEnvelope": {}}', "not a signature by a key"),
        (
            '{"verificationMaterial": {"publicKey": 1}, "dsseEnvelope": {"payload": "e30="}}',
            "not a signature by a key",
        ),
        (
            '{"verificationMaterial": {}, "dsseEnvelope": {"payload": "!", "signatures": []}}',
            "not a signature by a key",
        ),
        (
            '{"verificationMaterial": {"publicKey": {"hint": 7}}, "dsseEnvelope": '
            '{"payload": "e30=", "payloadType": "application/vnd.in-toto+json", '
            '"signatures": [{"sig": "e30="}]}}',
            "was made by another key, 7",
        ),
    ],
)
def test_what_is_no_signature_is_refused_in_one_line(
    tmp_path: Path, content: str, words: str
) -> None:
    folder = made(tmp_path)
    (folder / bundle.SIGNATURE).write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        check(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("payload", [b"1", b"{}", b'{"_type": "x", "predicateType": "y"}'])
def test_what_the_key_signed_of_something_else_vouches_for_no_bundle(
    tmp_path: Path, payload: bytes
) -> None:
    folder = made(tmp_path)
    (folder / bundle.SIGNATURE).write_bytes(signature._sign(payload, KEY))
    with pytest.raises(InputError, match="does not sign a model"):
        check(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.safetensors": ""}, r"model\.safetensors is not signed"),
        ({"more": "0" * 64}, "more, which is signed, is missing"),
        ({"model.safetensors": "0" * 64}, r"model\.safetensors differs from the signed one"),
    ],
)
def test_what_the_key_signed_of_other_files_vouches_for_no_bundle(
    tmp_path: Path, change: dict[str, str], words: str
) -> None:
    folder = made(tmp_path)
    sealed = Bundle.at(open_store(str(folder)), "", "the bundle", "")
    files = sealed.signed_files | change
    payload = signature._statement("x", {name: each for name, each in files.items() if each})
    (folder / bundle.SIGNATURE).write_bytes(signature._sign(payload, KEY))
    with pytest.raises(InputError, match=words):
        check(folder)


@pytest.fixture
def model_signing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library of OpenSSF Model Signing, here as the judge of our signatures.

    1.1 imports pyOpenSSL, for certificates alone, without declaring that it needs it.
    """
    for name in ("OpenSSL", "OpenSSL.crypto"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["OpenSSL"], "crypto", sys.modules["OpenSSL.crypto"], False)
    import model_signing

    return model_signing


@pytest.mark.parametrize("kind", ["P-256", "P-384", "P-521"])
def test_the_library_of_openssf_takes_our_signature(
    tmp_path: Path, model_signing: Any, kind: str
) -> None:
    folder = made(tmp_path, KEYS[kind])
    (tmp_path / "key.pub").write_bytes(public(KEYS[kind]))
    judge = model_signing.verifying.Config()
    judge.use_elliptic_key_verifier(public_key=tmp_path / "key.pub")
    judge.verify(folder, folder / bundle.SIGNATURE)
    (folder / "model.safetensors").write_bytes(bytes(99))
    judge = model_signing.verifying.Config()
    judge.use_elliptic_key_verifier(public_key=tmp_path / "key.pub")
    with pytest.raises(ValueError, match="Hash mismatch for 'model"):
        judge.verify(folder, folder / bundle.SIGNATURE)


def test_a_signature_by_the_library_of_openssf_is_taken(tmp_path: Path, model_signing: Any) -> None:
    folder = made(tmp_path)
    (tmp_path / "key").write_bytes(pem(KEY))
    signer = model_signing.signing.Config().use_elliptic_key_signer(private_key=tmp_path / "key")
    signer.sign(folder, folder / bundle.SIGNATURE)
    check(folder)
    with pytest.raises(InputError, match="was made by another key"):
        check(folder, OTHER)


@pytest.mark.parametrize("password", ["", "open sesame"])
def test_the_key_comes_from_the_secret(monkeypatch: pytest.MonkeyPatch, password: str) -> None:
    monkeypatch.setenv("signing.pem", pem(KEY, password).decode())
    monkeypatch.setenv("signing.word", password)
    word = "signing.word" if password else ""
    found = signature.key_of(Signing(sign_key="signing.pem", sign_password=word))
    assert found is not None
    assert signature.fingerprint(found.public_key()) == signature.fingerprint(KEY.public_key())
    assert signature.key_of(Signing()) is None


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ("", "sign_key names the key signing.pem, which the bucket's secret"),
        ("no key", r"sign_key \(signing.pem\) is not a private key: give an EC key"),
        (public(KEY).decode(), "is not a private key: give an EC key.*with no password"),
        (pem(KEY, "word").decode(), "is not a private key: .*with the right password"),
        (pem(rsa.generate_private_key(65537, 1024)).decode(), "a key of another kind"),
        (pem(ec.generate_private_key(ec.SECP256K1())).decode(), "a key of another kind"),
    ],
)
def test_a_secret_without_a_usable_key_is_told(
    monkeypatch: pytest.MonkeyPatch, held: str, words: str
) -> None:
    monkeypatch.setenv("signing.pem", held)
    with pytest.raises(InputError, match=words) as caught:
        signature.key_of(Signing(sign_key="signing.pem"))
    assert "PRIVATE" not in str(caught.value)


def test_a_public_key_is_asked_for_where_another_is_given() -> None:
    signature.public_key(public(KEYS["Ed25519"]), "--key")
    with pytest.raises(InputError, match="--key is not a public key: openssl pkey -in KEY -pubout"):
        signature.public_key(pem(KEY), "--key")
    with pytest.raises(InputError, match="--key is not a public key: give an EC key on P-256"):
        signature.public_key(b"x", "--key")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of trust that sigstore brings for its public instance."""
    store = Path(str(importlib.resources.files("sigstore._store")))
    (found,) = (
        path for path in store.rglob("trusted_root.json") if "repo-cdn.sigstore" in str(path)
    )
    return found


def test_a_signature_by_key_is_none_by_an_identity(tmp_path: Path, root: Path) -> None:
    folder = made(tmp_path, KEY)
    signer = signature.by_identity("ana@example.com", "https://accounts.example.com", root)
    sealed = Bundle.at(open_store(str(folder)), "", "the bundle", "export again")
    for content in (None, b"{}", b"no"):
        with pytest.raises(
            InputError, match=r"no valid signature of ana@example\.com at https\S+: model\.sig is"
        ) as caught:
            signature.check(sealed, signer, content)
        assert "\n" not in str(caught.value)


def test_what_sigstore_vouches_for_is_held_against_the_bundle(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sigstore's own verdict is played here: it needs its log, and somebody who signs in."""
    from sigstore.models import Bundle as SigstoreBundle
    from sigstore.verify import Verifier

    folder = made(tmp_path, KEY)
    payload = base64.b64decode(envelope(folder)["dsseEnvelope"]["payload"])
    monkeypatch.setattr(SigstoreBundle, "from_json", lambda _: None)
    monkeypatch.setattr(
        Verifier, "verify_dsse", lambda *_, **__: ("application/vnd.in-toto+json", payload)
    )
    signer = signature.by_identity("ana@example.com", "https://accounts.example.com", root)
    signature.check(Bundle.at(open_store(str(folder)), "", "it", ""), signer)
    resealed(folder, "changed")
    with pytest.raises(InputError, match=r"MANIFEST\.sha256 differs from the signed one"):
        signature.check(Bundle.at(open_store(str(folder)), "", "it", ""), signer)


@pytest.mark.parametrize("content", [None, "", "{}", "no"])
def test_a_root_of_trust_that_cannot_be_read_is_told(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "root.json").write_text(content)
    with pytest.raises(InputError, match=r"Sigstore's root of trust: .* give --trust"):
        signature.by_identity("ana@example.com", "https://x", tmp_path / "root.json")
