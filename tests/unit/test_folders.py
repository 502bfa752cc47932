import pytest

from kfp_ddp.core.folders import data_dir, work_dir


def test_what_is_given_goes_before_the_environment_and_that_before_the_mount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for function, variable, mount in (
        (data_dir, "KFP_DDP_DATA_DIR", "/data"),
        (work_dir, "KFP_DDP_WORK_DIR", "/work"),
    ):
        monkeypatch.delenv(variable, raising=False)
        assert function() == mount
        monkeypatch.setenv(variable, "/elsewhere")
        assert function() == "/elsewhere"
        assert function("/given") == "/given"
