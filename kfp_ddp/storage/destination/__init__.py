"""A place that results go to and come from: a folder, `file://`, `gs://`, `s3://` or `az://`.

Writing is verified end to end, and a name that is there with the same content stays as it is.
Reading ends at a limit, whatever size is told. Below a folder no link is followed.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage.destination.azure import AzureBucket
from kfp_ddp.storage.destination.folder import Folder
from kfp_ddp.storage.destination.gcs import GcsBucket
from kfp_ddp.storage.destination.place import Destination, sha256, sha256_of
from kfp_ddp.storage.destination.s3 import S3Bucket

__all__ = ["Destination", "Folder", "open_destination", "sha256", "sha256_of"]


def open_destination(uri: str) -> Destination:
    """The place that `uri` names.

    Raises:
        InputError: for a scheme that is not one of ours, or a URI without bucket.
    """
    scheme, rest = uri.split("://", 1) if "://" in uri else ("", uri)
    if scheme == "gs":
        return GcsBucket(uri)
    if scheme == "s3":
        return S3Bucket(uri)
    if scheme == "az":
        return AzureBucket(uri)
    if scheme == "file":
        parts = urlsplit(uri)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InputError(f"{uri} is not a file URI; write file:///folder with three slashes")
        return Folder(Path(unquote(parts.path)), uri)
    if scheme:
        raise InputError(
            f"{uri} cannot be used: give gs://, s3:// or az://bucket/prefix, file:// or a path"
        )
    if not rest.strip():
        raise InputError("an empty path names no place: give gs://bucket/prefix or a folder")
    return Folder(Path(uri), uri)
