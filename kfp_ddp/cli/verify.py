"""`kfp-ddp verify`: is a bundle what was published, and who vouches for it?"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import AS_JSON, echo_json

if TYPE_CHECKING:
    from kfp_ddp.models.signature import Signer

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("verify")
@click.argument("bundle")
@click.option("--key", type=FILE, help="Public key in PEM that has to have signed it.")
@click.option("--identity", default="", help="Who has to have signed it by Sigstore, as an e-mail.")
@click.option("--issuer", default="", help="OpenID Connect issuer that knows --identity.")
@click.option("--trust-root", type=FILE, help="trusted_root.json of a Sigstore of your own.")
@click.option("--signature", type=FILE, help="A signature elsewhere; else the bundle's model.sig.")
@AS_JSON
def command(
    bundle: str,
    key: Path | None,
    identity: str,
    issuer: str,
    trust_root: Path | None,
    signature: Path | None,
    as_json: bool,
) -> None:
    """Read all of BUNDLE and hold each file against its manifest, and that against a signature.

    BUNDLE is a folder or an address (gs://, s3://, az://): a bundle, the output of a run, or the
    folder of a model's exports, of which it is the champion's. What is not whole, or not signed by
    whom you name, ends with exit code 2. Signatures are in the form of OpenSSF Model Signing.

    kfp-ddp verify gs://bucket/models/flowers --key release.pub
    """
    from dataclasses import asdict

    from kfp_ddp.core.errors import InputError
    from kfp_ddp.models.verified import verified

    signer = _signer(key, identity, issuer, trust_root)
    if signature is not None and signer is None:
        raise InputError("--signature is given, but not whose: give --key, or --identity")
    found = verified(bundle, signer, content_of(signature) if signature is not None else None)
    if as_json:
        echo_json(asdict(found))
        return
    click.echo(f"{found.uri}: whole, {found.files} files of {found.size / 1e6:.1f} MB")
    if found.by:
        click.echo(f"signed by {found.by}")
    elif found.signed:
        click.echo("signed, which was not looked at: give --key, or --identity and --issuer")
    else:
        click.echo("not signed")


def _signer(key: Path | None, identity: str, issuer: str, trust: Path | None) -> "Signer | None":
    """Who has to have signed; None where nobody is named.

    Raises:
        InputError: options that do not go together, or a key that cannot be used.
    """
    from kfp_ddp.core.errors import InputError
    from kfp_ddp.models.signature import by_identity, by_key, public_key

    if key is not None and (identity or issuer or trust):
        raise InputError("--key and --identity are two ways: give one of them")
    if key is not None:
        return by_key(public_key(content_of(key), f"--key {key}"))
    if not identity and not issuer:
        if trust is not None:
            raise InputError("--trust-root is for --identity and --issuer: give both")
        return None
    if not identity or not issuer:
        raise InputError("--identity and --issuer go together: an identity is one at its issuer")
    return by_identity(identity, issuer, trust)


def content_of(path: Path) -> bytes:
    """What a small file holds.

    Raises:
        InputError: it cannot be read.
    """
    from kfp_ddp.core.errors import InputError
    from kfp_ddp.models.bundle import LARGEST_SIGNATURE

    try:
        with path.open("rb") as file:
            return file.read(LARGEST_SIGNATURE)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; correct its path") from None
