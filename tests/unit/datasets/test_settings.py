"""Settings and addresses of a sync."""

import dataclasses
import random
import string
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.settings import options_of
from kfp_ddp.storage.http.origin import Origin, display
from kfp_ddp.storage.kinds import open_source
from tests.commands import call

ODD = string.ascii_letters + string.digits + ":@?#&=%[]!$'()*+,;\\ \t\n\0é\u202e"


@pytest.mark.parametrize("flags", [["--max-delete", "1.1"], ["-j", "0"], ["--verify", "ful"]])
def test_the_command_line_refuses_wrong_values(flags: list[str], tmp_path: Path) -> None:
    answer = call("sync", "/no/source", tmp_path / "new", *flags)
    assert answer.exit_code == 2
    assert f"'{flags[0]}'" in answer.output.replace("'-j' / '--concurrency'", "'-j'")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], dataclasses.asdict(SyncOptions())),
        (["-n", "--dataset", "photos"], {"dataset": "photos", "dry_run": True}),
        (["--pack", "tar", "--verify", "full"], {"pack": "tar", "verify": "full"}),
        (["--include", "a,b", "--include", "c"], {"include": ("a,b", "c")}),
        (["-j", "8", "--timeout", "3"], {"concurrency": 8, "timeout": 3.0}),
    ],
)
def test_flags_of_the_command_line_are_options(
    flags: list[str], wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SyncOptions] = []

    class Stopped(Exception):  # noqa: N818
        pass

    def sync(source: str, target: object, options: SyncOptions, watch: object) -> None:
        seen.append(options)
        raise Stopped

    monkeypatch.setattr("kfp_ddp.datasets.sync.sync", sync)
    answer = call("sync", "gs://bucket/ds", "t", "-q", *flags)
    assert isinstance(answer.exception, Stopped), answer.output
    assert {name: getattr(seen[0], name) for name in wanted} == wanted


def test_numbers_arrive_as_floats_and_globs_as_one_text() -> None:
    given = {"lock_wait": 60.0, "concurrency": 8, "max_delete": 1, "include": "*.png, *.jpg"}
    result = options_of("photos", given)
    wanted = dict[str, Any](lock_wait=60, concurrency=8, max_delete=1.0, include=("*.png", "*.jpg"))
    assert result == SyncOptions(dataset="photos", **wanted)
    assert [type(result.lock_wait), type(result.max_delete)] == [int, float]
    assert options_of("", {"include": ["a", "b"]}).include == ("a", "b")
    assert options_of("", {"max_delete": "1e-1"}).max_delete == 0.1  # as YAML reads it


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"max_delet": 1}, "sync has no setting 'max_delet'; did you mean 'max_delete'?"),
        ({"dataset": "x"}, "sync sets dataset, which the step sets itself"),
        ({"keep_versions": True}, "keep_versions=True cannot be used: it should be a number"),
        ({"max_delete": "a"}, "max_delete='a' cannot be used: it should be a valid number"),
        ({"max_delete": 2}, r"max_delete=2 cannot be used: it should be less than .* 1 \(Refuse"),
        ({"verify": None}, "verify=None is unknown: it is one of list, quick, full"),
        ({"verify": "ful"}, "verify='ful' is unknown: .*; did you mean 'full'?"),
    ],
)
def test_what_the_sync_cannot_use_is_named(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        options_of("", given)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a/x.jsonl?X-Signature=s#part", "https://host/a/x.jsonl"),
        ("http://host:81/a@b/x.jsonl", "http://host:81/a@b/x.jsonl"),
        ("http://me:pass@host/x.jsonl", "http://host/x.jsonl"),
        ("http://me:pa/ss@host/x.jsonl", "http://…"),
        ("me:pass@proxy:3128", "proxy:3128"),
        ("https://[::1]:8/x?y", "https://[::1]:8/x"),
    ],
)
def test_what_is_shown_has_neither_login_nor_query(url: str, shown: str) -> None:
    assert display(url) == shown


def test_login_in_an_address_is_refused_with_where_to_put_it() -> None:
    for url in ("https://me:hunter2@host/x.jsonl", "http://me@host/x.jsonl", "s3://k:hunter2@b/p"):
        with pytest.raises(InputError, match=r"^[^\n]* netrc [^\n]*NETRC[^\n]*$") as caught:
            open_source(url)
        assert "hunter2" not in str(caught.value)


def test_header_host_is_of_host_and_port_alone() -> None:
    assert Origin.of("https://me:pass@host:8443/x").authority == b"host:8443"
    assert Origin.of("https://me:pass@host/x").authority == b"host"


def test_3000_addresses_show_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9")
    choose = random.Random(7)
    opened, refused = [], []

    def odd(most: int) -> str:
        return "".join(choose.choices(ODD, k=choose.randint(0, most)))

    for _ in range(3000):
        scheme = choose.choice(["http", "https", "https", "HTTPS", "ftp", "gs", "file", ""])
        login = choose.choice(["", "", f"u{odd(2)}:hunter2{odd(3)}@"])
        place = choose.choice(["host", "host:81", "[::1]", "[::1", "", "h:port", f"h{odd(2)}"])
        query = "" if scheme in ("gs", "file", "") else choose.choice(["", f"?{odd(3)}s=hunter2"])
        path = choose.choice(["/a/_MANIFEST.jsonl", "/a", f"/{odd(3)}.jsonl", ""])
        url = f"{scheme}{'://' if scheme else ''}{login}{place}{path}{query}"
        if not scheme and login:
            continue
        try:
            source = open_source(url)
        except InputError as error:
            refused.append(str(error))
        else:
            opened.append(source.url)
    assert not [text for text in opened + refused if "hunter2" in text]
    assert not [text for text in refused if "\n" in text]
    assert min(len(opened), len(refused)) > 500
