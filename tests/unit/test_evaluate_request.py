"""Errors of the ranks of an evaluation, and their command line."""

import json
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError, JobError, KfpDdpError, RunCancelledError
from kfp_ddp.core.failure import Failure
from kfp_ddp.evaluation import engine
from kfp_ddp.evaluation.request import Request
from kfp_ddp.jobs.local import Ended


@pytest.mark.parametrize(
    ("ended", "failure", "kind", "says"),
    [
        (Ended(2), Failure(2, 1, "5.png is torn: replace it", False), InputError, "5.png is torn"),
        (Ended(1), Failure(1, 1, "no room", False), JobError, "failed: rank 1: no room"),
        (Ended(137), Failure(137, 0, "ended by SIGKILL", True), JobError, "rank 0: ended by SIGK"),
        (Ended(1, None, "Segfault"), None, JobError, "failed: exit code 1: Segfault"),
        (Ended(143), None, RunCancelledError, "was stopped"),
        (Ended(0, 15), None, RunCancelledError, "was stopped"),
    ],
)
def test_the_first_cause_is_told(
    ended: Ended,
    failure: Failure | None,
    kind: type[KfpDdpError],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir, target = tmp_path / "run", tmp_path / "run" / "evaluation"
    target.mkdir(parents=True)
    (target / "evaluation.json").write_text("that of an earlier try")

    def run_ranks(flags: list[str], ranks: int, folder: Path, program: str) -> Ended:
        """What the launcher leaves, without processes."""
        assert not (target / "evaluation.json").exists()
        assert (ranks, folder) == (3, target)
        (folder / "logs").mkdir()
        if failure is not None:
            (folder / "logs" / "failure.json").write_text(failure.to_json())
        return ended

    monkeypatch.setattr(engine, "run_ranks", run_ranks)
    request = Request.create(checkpoint="c", run_dir=str(run_dir), data="d")
    with pytest.raises(kind, match=says):
        engine.run_local_ranks(request, 3)


def test_a_request_reaches_the_ranks_as_it_was_given() -> None:
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
