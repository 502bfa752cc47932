"""Stores as they run elsewhere, without a cluster: as source, destination and champion."""

from collections.abc import Iterator
from typing import Any

import pytest

from kfp_ddp.components.shared.destination import Destination, open_destination
from tests.destinations import Conditional, OfBuckets
from tests.stores import azurite, versitygw

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Not a secret: every Azurite has this account."""


@pytest.fixture(scope="session")
def s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with versitygw(tmp_path_factory.mktemp("s3"), "access", "secret") as url:
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
    from azure.storage.blob import BlobServiceClient

    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"BlobEndpoint={azure_url}/{ACCOUNT};"
    )
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
    with BlobServiceClient.from_connection_string(connection) as client:
        container = client.create_container("bucket")
        yield client
        container.delete_container()


class TestS3(OfBuckets, Conditional):
    @pytest.fixture
    def where(self, s3: Any) -> Destination:
        return open_destination("s3://bucket/results/of/")


class TestAzure(OfBuckets, Conditional):
    @pytest.fixture
    def where(self, azure: Any) -> Destination:
        return open_destination("az://bucket/results/of/")
