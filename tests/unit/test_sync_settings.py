from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kfp_ddp.cli import app
from kfp_ddp.core.errors import InputError
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.settings import options_of


@pytest.mark.parametrize("flags", [["--max-delete", "1.1"], ["-j", "0"], ["--verify", "ful"]])
def test_the_command_line_refuses_wrong_values(flags: list[str], tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["sync", "/no/source", str(tmp_path / "new"), *flags])
    assert answer.exit_code == 2
    assert f"'{flags[0]}'" in answer.output.replace("'-j' / '--concurrency'", "'-j'")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], {"mirror": True, "verify": "quick", "delete": False}),
        (["--delete", "--verify", "full"], {"mirror": True, "verify": "full", "delete": True}),
        (["--versions"], {"mirror": False, "verify": "list", "delete": True}),
        (["--versions", "--no-delete", "-n"], {"mirror": False, "delete": False, "dry_run": True}),
        (["--include", "a,b", "--include", "c"], {"include": ("a,b", "c")}),
        (["-j", "8", "--timeout", "3"], {"concurrency": 8, "timeout": 3.0}),
    ],
)
def test_a_plain_folder_has_other_defaults_than_versions(
    flags: list[str], wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Options] = []

    class Stopped(Exception):  # noqa: N818
        pass

    def sync(source: str, target: object, options: Options, watch: object) -> None:
        seen.append(options)
        raise Stopped

    monkeypatch.setattr("kfp_ddp.datasets.sync.sync", sync)
    answer = CliRunner().invoke(app, ["sync", "gs://bucket/ds", "t", "-q", *flags])
    assert isinstance(answer.exception, Stopped), answer.output
    assert {name: getattr(seen[0], name) for name in wanted} == wanted


def test_numbers_arrive_as_floats_and_globs_as_one_text() -> None:
    given = {"lock_wait": 60.0, "concurrency": 8, "max_delete": 1, "include": "*.png, *.jpg"}
    found = options_of("photos", given)
    wanted: dict[str, Any] = {
        "lock_wait": 60,
        "concurrency": 8,
        "max_delete": 1.0,
        "include": ("*.png", "*.jpg"),
    }
    assert found == Options(dataset="photos", **wanted)
    assert [type(found.lock_wait), type(found.max_delete)] == [int, float]
    assert options_of("", {"include": ["a", "b"]}).include == ("a", "b")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"max_delet": 1}, "sync has no setting 'max_delet'; did you mean 'max_delete'?"),
        ({"source": "gs://x"}, "sync has no setting 'source'"),
        ({"dataset": "x"}, "sync sets dataset, which the step sets itself"),
        ({"mirror": True}, "sync sets mirror, which the step sets itself"),
        ({"keep_versions": True}, "keep_versions=True cannot be used: it should be a number"),
        ({"max_delete": 2}, r"max_delete=2 cannot be used: it should be less than .* 1 \(Refuse"),
        ({"verify": None}, "verify=None is unknown: it is one of list, quick, full"),
        ({"verify": "ful"}, "verify='ful' is unknown: .*; did you mean 'full'?"),
    ],
)
def test_what_the_sync_cannot_use_is_named(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        options_of("", given)


def test_what_a_plain_folder_cannot_be_is_named() -> None:
    with pytest.raises(InputError, match=r"^pack=tar makes versions; leave mirroring off"):
        Options(mirror=True, pack="tar")
