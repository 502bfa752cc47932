import io
from pathlib import Path

import pytest

from kfp_ddp.local import results
from kfp_ddp.local.screen import CLEAR_LINE, Phase, bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_line_never_wraps(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    with Phase("dataset-volume", stream) as phase:
        phase.show("x" * 300)
    drawn = [line for line in stream.getvalue().replace("\n", CLEAR_LINE).split(CLEAR_LINE) if line]
    assert len(drawn) == 3
    assert max(len(line) for line in drawn) < columns


def test_a_log_gets_one_line_a_phase() -> None:
    stream = io.StringIO()
    with Phase("train", stream) as phase:
        phase.show("step 1")
        phase.show("step 2")
    assert stream.getvalue().startswith("  ✓ train")
    assert stream.getvalue().count("\n") == 1
    assert "step 2" in stream.getvalue()


def test_a_phase_that_raises_is_marked() -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError, match="no"), Phase("gate", stream):
        raise ValueError("no")
    assert stream.getvalue().startswith("  ✗ gate")


def test_a_path_is_told_as_a_shell_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert results.shown(tmp_path / "model" / "bundle") == "model/bundle"
    assert results.shown(tmp_path / "my model" / "bundle") == "'my model/bundle'"
    assert results.shown("/else where") == "'/else where'"


def test_the_bar_is_full_only_at_the_end() -> None:
    assert bar(0, 10, width=10) == "░" * 10
    assert bar(9, 10, width=10) == "█" * 9 + "░"
    assert bar(10, 10, width=10) == bar(11, 10, width=10) == "█" * 10
    assert bar(0, 0, width=10) == "░" * 10
