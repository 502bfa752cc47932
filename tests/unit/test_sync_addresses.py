"""What an address may show, wherever it is stored or printed, and what of it stays with us."""

import random
import string

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage.http.origin import Origin, display
from kfp_ddp.storage.kinds import open_source

ODD = string.ascii_letters + string.digits + ":@?#&=%[]!$'()*+,;\\ \t\n\0é\u202e"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a/x.jsonl?X-Signature=s#part", "https://host/a/x.jsonl"),
        ("http://host:81/a@b/x.jsonl", "http://host:81/a@b/x.jsonl"),
        ("http://me:pass@host/x.jsonl", "http://host/x.jsonl"),
        ("http://me:pa/ss@host/x.jsonl", "http://…"),
        ("http://me:pa?ss@host/x.jsonl", "http://…"),
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
