"""The request of an evaluation, and errors of its ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, JobError, KfpDdpError, RunCancelledError
from kfp_ddp.core.failure import Failure
from kfp_ddp.evaluation import engine
from kfp_ddp.evaluation.request import Request
from kfp_ddp.evaluation.results import split_digest
from kfp_ddp.jobs.local import Ended


@pytest.mark.parametrize(
    ("ended", "failure", "kind", "message"),
    [
        (Ended(2), Failure(2, 1, "5.png is torn: replace it", False), InputError, "5.png is torn"),
        (Ended(1), Failure(1, 1, "no room", False), JobError, "failed: rank 1: no room"),
        (Ended(137), Failure(137, 0, "ended by SIGKILL", True), JobError, "rank 0: ended by SIGK"),
        (Ended(1, None, "Segfault"), None, JobError, "failed: exit code 1: Segfault"),
        (Ended(143), None, RunCancelledError, "was stopped"),
        (Ended(0, 15), None, RunCancelledError, "was stopped"),
    ],
)
def test_the_error_is_the_first_failure_of_a_rank(
    ended: Ended,
    failure: Failure | None,
    kind: type[KfpDdpError],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir, target = tmp_path / "run", tmp_path / "run" / "evaluation"
    target.mkdir(parents=True)
    (target / "evaluation.json").write_text("of an earlier attempt")

    def run_ranks(flags: list[str], ranks: int, folder: Path, program: str) -> Ended:
        """Write the record of the launcher, without processes."""
        assert not (target / "evaluation.json").exists()
        assert (ranks, folder) == (3, target)
        (folder / "logs").mkdir()
        if failure is not None:
            (folder / "logs" / "failure.json").write_text(failure.to_json())
        return ended

    monkeypatch.setattr(engine, "run_ranks", run_ranks)
    request = Request.create(checkpoint="c", run_dir=str(run_dir), data="d")
    with pytest.raises(kind, match=message):
        engine.run_local_ranks(request, 3)


def test_the_command_line_of_ranks_has_the_complete_request() -> None:
    request = Request.create(
        checkpoint="gs://models/a b/$(X)",
        of_run=False,
        run_dir="gs://runs/1/evaluate",
        data='each-node:{"source": "gs://x"}',
        split="drift",
        champion="--no flag",
        options={"tags": "tags.csv", "resamples": 10},
    )
    assert Request.parse(request.to_argv()) == request
    for wrong in ([], ["--request"], ["--request", "{"], ["--request", json.dumps({"split": 1})]):
        with pytest.raises(InputError):
            Request.parse(wrong)


@pytest.mark.parametrize(
    ("field", "value"), [("split", "../train"), ("batch_size", 0), ("worst", -1)]
)
def test_an_invalid_input_is_named(field: str, value: Any) -> None:
    inputs = {"checkpoint": "c", "run_dir": "r", "data": "d", field: value}
    with pytest.raises(InputError, match=f"^{field}="):
        Request.create(**inputs)


def test_the_digest_of_a_split_is_of_all_samples_and_their_content(tmp_path: Path) -> None:
    def digest(paths: list[str], folder: str, *rows: object) -> str:
        lines = [json.dumps(row) for row in ({"format": 1}, *rows)]
        (tmp_path / "_MANIFEST.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return split_digest(tmp_path, paths, folder)

    row = ["cat/1.png", 5, "00000001", "00000001", 0]
    known = digest(["1.png"], "cat", row)
    assert known
    assert digest(["cat/1.png"], "", row)
    assert digest(["1.png"], "cat", [row[0], 5, "00000001", "00000002", 0]) not in (known, "")
    assert digest(["1.png", "2.png"], "cat", row) == digest(["1.png"], "", row) == ""
    (tmp_path / "_MANIFEST.jsonl").unlink()
    assert split_digest(tmp_path, ["1.png"], "cat") == ""
