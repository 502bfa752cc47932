import os
from pathlib import Path

import pytest

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.shared import step as module
from kfp_ddp.components.shared.step import step


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")


def test_what_a_user_can_mend_ends_the_step_in_one_line() -> None:
    @step
    def run() -> None:
        raise InputError("no such bucket")

    with pytest.raises(SystemExit, match=r"^error: no such bucket$"):
        run()


def test_the_mounted_key_of_a_bucket_is_used_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @step
    def run() -> str:
        return os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")

    monkeypatch.setattr(module, "KEY", str(tmp_path / "key.json"))
    assert run() == ""
    (tmp_path / "key.json").write_text("{}")
    assert run() == module.KEY
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/own/key.json")
    assert run() == "/own/key.json"
