"""Stores as they run elsewhere, without a cluster: as source, destination and champion."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from azure.storage.blob import BlobServiceClient, ContentSettings
from PIL import Image

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.models.champion import find
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store
from tests.destinations import Contract, OfBuckets
from tests.local_pipeline import pipeline
from tests.stores import azurite, versitygw
from tests.sync_runs import content, sync

QUICK = SyncOptions(concurrency=4, timeout=5)

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Not a secret: every Azurite has this account."""


@pytest.fixture(scope="session")
def s3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s3")


@pytest.fixture(scope="session")
def s3_url(s3_folder: Path) -> Iterator[str]:
    with versitygw(s3_folder, "access", "secret") as url:
        yield url


@pytest.fixture
def s3(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of versitygw, and an empty bucket `bucket`."""
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_url)
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield client
    for page in client.get_paginator("list_objects_v2").paginate(Bucket="bucket"):
        for item in page.get("Contents", []):
            client.delete_object(Bucket="bucket", Key=item["Key"])
    client.delete_bucket(Bucket="bucket")
    client.close()


@pytest.fixture(scope="session")
def azure_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with azurite(tmp_path_factory.mktemp("azure") / "log") as url:
        yield url


@pytest.fixture
def azure(azure_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of Azurite, and an empty container `bucket`."""
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"BlobEndpoint={azure_url}/{ACCOUNT};"
    )
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
    with BlobServiceClient.from_connection_string(connection) as client:
        container = client.create_container("bucket")
        yield client
        container.delete_container()


class TestS3(OfBuckets, Contract):
    @pytest.fixture
    def where(self, s3: Any) -> Store:
        return open_store("s3://bucket/results/of/")


class TestAzure(OfBuckets, Contract):
    @pytest.fixture
    def where(self, azure: Any) -> Store:
        return open_store("az://bucket/results/of/")


def test_azure_with_checked_unchecked_and_folder_blobs(azure: Any, tmp_path: Path) -> None:
    objects = {"a/x.png": b"x" * 3000, "a/sum.png": b"y" * 300, "large": os.urandom(5 << 20)}
    container = azure.get_container_client("bucket")
    container.upload_blob("ds/a/x.png", objects["a/x.png"])
    summed = ContentSettings(content_md5=bytearray(hashlib.md5(objects["a/sum.png"]).digest()))
    container.upload_blob("ds/a/sum.png", objects["a/sum.png"], content_settings=summed)
    container.upload_blob("ds/a", b"", metadata={"hdi_isfolder": "true"})
    (tmp_path / "large").write_bytes(objects["large"])
    open_store("az://bucket/ds").put(tmp_path / "large", "large")
    target = tmp_path / "target"
    first = sync("az://bucket/ds", target, QUICK)
    assert content(first.path) == objects
    assert sync("az://bucket/ds", target, QUICK).unchanged
    container.upload_blob("ds/a/x.png", b"z" * 3000, overwrite=True)
    second = sync("az://bucket/ds", target, QUICK)
    assert (second.downloaded, second.linked) == (1, 2)
    assert content(second.path) == objects | {"a/x.png": b"z" * 3000}


@pytest.mark.parametrize("found_by", ["SHA256", "MD5"])
def test_azure_blob_with_a_wrong_digest_fails(azure: Any, tmp_path: Path, found_by: str) -> None:
    blob = azure.get_blob_client("bucket", "ds/x")
    blob.upload_blob(b"x" * 3000)
    if found_by == "SHA256":
        blob.set_blob_metadata({"sha256": hashlib.sha256(b"y").hexdigest()})
    else:
        blob.set_http_headers(ContentSettings(content_md5=bytearray(16)))
    with pytest.raises(StorageError, match=f"cannot read 'x' of az://bucket/ds: {found_by}"):
        sync("az://bucket/ds", tmp_path, QUICK)
    assert not (tmp_path / "current").exists()


def test_azure_refusals(azure_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = f"BlobEndpoint={azure_url}/{ACCOUNT};AccountName={ACCOUNT};AccountKey=d3Jvbmc=;"
    for connection, message in (
        (wrong, "no permission to .*Storage Blob Data Contributor"),
        ("nonsense", "correct AZURE_STORAGE_CONNECTION_STRING"),
        ("", "names no account: set AZURE_STORAGE_ACCOUNT"),
    ):
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
        for ask in (
            lambda: sync("az://bucket/ds", tmp_path, QUICK),
            open_store("az://bucket/ds").prepare,
        ):
            with pytest.raises(InputError, match=message):
                ask()


def test_an_s3_file_without_a_digest_is_unknown(s3: Any, s3_folder: Path, tmp_path: Path) -> None:
    """Two of one size would be one file for all that its listing tells."""
    s3.put_object(Bucket="bucket", Key="ds/a.png", Body=b"a")
    (s3_folder / "bucket" / "ds" / "b.png").write_bytes(b"b")
    with pytest.raises(InputError, match=r"s3://bucket/ds lists 'b.png' without an ETag"):
        sync("s3://bucket/ds", tmp_path, QUICK)
    assert list(tmp_path.iterdir()) == []


def test_an_s3_upload_in_parts_is_verified(s3: Any, s3_folder: Path, tmp_path: Path) -> None:
    """Its ETag is no digest, but S3 keeps a CRC-64/NVME of each new object."""
    where = {"Bucket": "bucket", "Key": "ds/x"}
    upload = {**where, "UploadId": s3.create_multipart_upload(**where)["UploadId"]}
    parts = [
        {"ETag": s3.upload_part(**upload, PartNumber=n, Body=part)["ETag"], "PartNumber": n}
        for n, part in enumerate([b"x" * (5 << 20), b"end"], 1)
    ]
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    sync("s3://bucket/ds", tmp_path / "right", QUICK)
    with (s3_folder / "bucket" / "ds" / "x").open("r+b") as stored:
        stored.write(b"y")
    with pytest.raises(StorageError, match="CRC64NVME"):
        sync("s3://bucket/ds", tmp_path / "wrong", QUICK)


def test_public_s3_needs_no_login(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put_object(Bucket="bucket", Key="ds/x", Body=b"x")
    everybody = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": ["s3:ListBucket", "s3:GetObject"],
        "Resource": ["arn:aws:s3:::bucket", "arn:aws:s3:::bucket/*"],
    }
    s3.put_bucket_policy(Bucket="bucket", Policy=json.dumps({"Statement": [everybody]}))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of another store")
    assert content(sync("s3://bucket/ds", tmp_path / "refused", QUICK).path) == {"x": b"x"}
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    assert content(sync("s3://bucket/ds", tmp_path / "nobody", QUICK).path) == {"x": b"x"}
    with pytest.raises(InputError, match="no permission to write s3://bucket/ds as anonymous"):
        open_store("s3://bucket/ds").prepare()
    s3.delete_bucket_policy(Bucket="bucket")
    with pytest.raises(InputError, match="no permission to list s3://bucket/ds as anonymous"):
        sync("s3://bucket/ds", tmp_path / "private", QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["s3", "azure"])
def test_the_pipeline_has_its_images_models_and_champion_in_a_store(
    request: pytest.FixtureRequest, store: str, tmp_path: Path
) -> None:
    """The second run finds what the first one exported, is compared with it and takes its place."""
    request.getfixturevalue(store)
    root = {"s3": "s3://bucket", "azure": "az://bucket"}[store]
    images, image = open_store(f"{root}/photos"), tmp_path / "given.png"
    for label, tint in (("cat", 20), ("dog", 200)):
        for number in range(16):
            Image.new("RGB", (9, 8), (15 * number, tint, 80)).save(image)
            images.put(image, f"{label}/{number}.png")
    versions = []
    for seed in (1, 2):
        done = pipeline(
            {
                "source": f"{root}/photos",
                "destination": f"{root}/models",
                "champion": "last",
                "model": "cifar_resnet8",
                "epochs": 2,
                "training": {"image_size": 8, "workers": 0, "seed": seed},
                "backend": "local",
                "gate": {"min_accuracy": 0, "min_improvement": -1},
            },
            tmp_path / str(seed),
        )
        assert done.returncode == 0, done.stdout
        result = find(f"{root}/models/resnet")
        assert result is not None
        versions.append(result.version)
    assert len(set(versions)) == 2
    models = open_store(f"{root}/models/resnet")
    names = [name for name, _ in models.list("")]
    assert {name.partition("/")[0] for name in names} == {"CHAMPION", "CHAMPIONS", *versions}
    assert all(f"{version}/_SUCCESS" in names for version in versions)
    assert models.read("CHAMPION", 99) == f"{versions[1]}\n".encode()
    assert versions[0] in done.stdout, "the gate says what it compared with"
