"""`kfp-ddp sign`: vouch for a bundle that is published."""

from pathlib import Path

import click

from kfp_ddp.cli.verify import FILE, content_of

PASSWORD = "KFP_DDP_SIGN_PASSWORD"  # noqa: S105


@click.command("sign")
@click.argument("bundle")
@click.option(
    "--key", type=FILE, help=f"Private key in PEM; {PASSWORD} holds its password, if it has one."
)
@click.option("--signature", type=FILE, help="A signature made elsewhere, as by model_signing.")
def command(bundle: str, key: Path | None, signature: Path | None) -> None:
    """Put a signature into BUNDLE.

    BUNDLE is a folder or an address (gs://, s3://, az://): a bundle, the output of a run, or the
    folder of a model's exports, of which it is the champion's. All of it is read and held against
    its manifest before. One by Sigstore is made of a downloaded bundle by `model_signing sign
    sigstore`, and put there by --signature.

    kfp-ddp sign gs://bucket/models/flowers --key release.pem
    """
    import os
    import tempfile

    from kfp_ddp.core.errors import InputError
    from kfp_ddp.models.bundle import SIGNATURE
    from kfp_ddp.models.open_bundle import open_bundle
    from kfp_ddp.models.signature import by_key, check_fits, made, private_key
    from kfp_ddp.models.verified import ADVICE, verified

    if (key is None) == (signature is None):
        raise InputError("give --key to sign with, or --signature with one that is made")
    whose = "whoever made it"
    sealed = open_bundle(bundle, ADVICE)
    if key is not None:
        secret = private_key(content_of(key), os.environ.get(PASSWORD, ""), f"--key {key}")
        content, whose = made(sealed, secret), by_key(secret.public_key()).name
    elif signature is not None:
        content = content_of(signature)
        check_fits(sealed, content)
    verified(sealed.uri)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, SIGNATURE)
        file.write_bytes(content)
        sealed.where.put(file, sealed.folder + SIGNATURE)
    click.echo(f"{sealed.uri}: signed by {whose}")
