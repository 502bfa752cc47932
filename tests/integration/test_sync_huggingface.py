"""A dataset of the hub as a source, of a server that answers as the hub does."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.sync import sync as sync_stubbornly
from kfp_ddp.storage.kinds import open_source
from tests.serving import Handler, serving
from tests.sync_runs import RETRY, content

QUICK = Options(concurrency=4, timeout=5)
sync = partial(sync_stubbornly, retry=RETRY)
COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """The dataset owner/pets."""

    files: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    """Those in large file storage, which another server sends."""
    wrong: set[str] = field(default_factory=set)
    """Those that are sent with another byte."""
    gated: bool = False
    page: bytes = b""
    """A page of the listing in place of the right one."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Paths, and what authorised them."""

    def described(self, name: str) -> dict[str, Any]:
        """A file in a listing."""
        body = self.files[name]
        oid = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        row: dict[str, Any] = {"type": "file", "path": name, "size": len(body), "oid": oid}
        if name in self.large:
            sha256 = hashlib.sha256(body).hexdigest()
            row["lfs"] = {"oid": sha256, "size": len(body), "pointerSize": 130}
        return row


def handler(hub: Hub, stored_at: list[str]) -> type[BaseHTTPRequestHandler]:
    """What the hub answers; large files are at the first of `stored_at`."""

    class Visit(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((path, self.headers.get("Authorization", "")))
            kind, _, rest = path.partition("/owner/pets")
            if not rest and kind != "/api/datasets":
                self.answer(404, b"{}", X_Error_Code="RepoNotFound")
            elif hub.gated:
                self.answer(403, b"{}", X_Error_Code="GatedRepo")
            elif kind == "/api/datasets" and rest in ("", "/revision/main"):
                self.answer(200, {"id": "owner/pets", "sha": COMMIT})
            elif rest.startswith("/revision/"):
                self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            elif rest.startswith(f"/tree/{COMMIT}"):
                folder = rest.removeprefix(f"/tree/{COMMIT}").strip("/")
                rows = [hub.described(name) for name in hub.files if name.startswith(folder)]
                rows.append({"type": "directory", "path": "train", "oid": "0" * 40})
                self.answer(200, hub.page or rows, Content_Type="application/json")
            else:
                self.send_file(rest.removeprefix(f"/resolve/{COMMIT}/").removeprefix("/stored/"))

        def send_file(self, name: str) -> None:
            if name in hub.large and not self.path.startswith("/owner/pets/stored/"):
                self.answer(302, b"", Location=f"{stored_at[0]}/owner/pets/stored/{name}")
                return
            body = hub.files[name]
            self.answer(200, body[:-1] + b"?" if name in hub.wrong else body)

    return Visit


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, and a second server for its large files."""
    hub, stored_at = Hub(), list[str]()
    made = handler(hub, stored_at)
    with (
        serving(ThreadingHTTPServer(("127.0.0.1", 0), made)) as url,
        serving(ThreadingHTTPServer(("127.0.0.1", 0), made)) as elsewhere,
    ):
        stored_at.append(elsewhere.replace("127.0.0.1", "localhost"))
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr("huggingface_hub.utils._auth._get_token_from_environment", "t".strip)
        yield hub
        from huggingface_hub import close_session

        close_session()


def test_a_dataset_of_the_hub_is_synced_and_its_token_stays(hub: Hub, tmp_path: Path) -> None:
    hub.files = {
        "train/cat/ä b.jpg": b"x" * 3000,
        "train/dog/1.jpg": b"y" * 700_000,
        "val/cat/1.jpg": b"",
        ".gitattributes": b"*.jpg filter=lfs",
    }
    hub.large = {"train/dog/1.jpg"}
    wanted = {name: body for name, body in hub.files.items() if name[0] != "."}
    first = sync("hf://datasets/owner/pets", tmp_path, QUICK)
    assert content(first.path) == wanted
    assert sync("hf://datasets/owner/pets@main", tmp_path, QUICK).digest == first.digest
    part = sync("hf://datasets/owner/pets/train/", tmp_path / "part", QUICK)
    assert sorted(content(part.path)) == ["cat/ä b.jpg", "dog/1.jpg"]
    sent = {path.partition("/stored/")[1]: token for path, token in hub.asked}
    assert sent == {"": "Bearer t", "/stored/": ""}


@pytest.mark.parametrize(("large", "found_by"), [(True, "SHA256"), (False, "SHA1")])
def test_a_changed_file_is_refused(hub: Hub, tmp_path: Path, large: bool, found_by: str) -> None:
    hub.files, hub.wrong = {"x": b"x" * 3000}, {"x"}
    hub.large = {"x"} if large else set()
    with pytest.raises(StorageError, match=f"cannot read 'x' of hf://datasets/.*: {found_by}"):
        sync("hf://datasets/owner/pets", tmp_path, QUICK)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("hf://owner/pets", "write hf://datasets/owner/name"),
        ("hf://datasets/pets", "write hf://datasets/owner/name"),
        ("hf://datasets/owner/absent", "dataset owner/absent does not exist .* give HF_TOKEN"),
        ("hf://datasets/owner/pets@old", "has no revision 'old'"),
        ("hf://datasets/owner/pets/none", "holds no objects below 'none/'"),
    ],
)
def test_a_dataset_that_is_not_there_is_one_line(hub: Hub, url: str, says: str) -> None:
    hub.files = {"train/a/1.jpg": b"1"}
    with pytest.raises(InputError, match=says) as told:
        open_source(url).listing()
    assert "\n" not in str(told.value)


def test_a_gated_dataset_says_what_to_do(hub: Hub) -> None:
    hub.gated = True
    with pytest.raises(InputError, match=r"is gated: accept its terms .* give HF_TOKEN"):
        open_source("hf://datasets/owner/pets").listing()


@pytest.mark.parametrize(
    "page",
    [
        *(
            json.dumps([{"type": "file", "path": "x", "oid": oid, "size": size}]).encode()
            for oid, size in [("0" * 40, -5), ("0" * 40, 1e300), ("0" * 40, "5"), (7, 5), ("0", 5)]
        ),
        b'[{"type": "file", "path": "x"}]',
        b'{"error": "x"}',
        b"[" * 100_000,
        b"<html>",
    ],
)
def test_invalid_listing_of_the_hub_fails_with_one_line(hub: Hub, page: bytes) -> None:
    hub.page = page
    with pytest.raises(InputError, match="listing of hf://datasets/owner/pets is invalid") as told:
        open_source("hf://datasets/owner/pets").listing()
    assert "\n" not in str(told.value)
