"""Kills before each change of the disk of publish, promote, rollback and the deletion of versions.

After each kill the same or another command runs, and then the killed one again.
"""

import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.client import models
from kfp_ddp.components.publish.component import publish
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import VERDICT
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models import attempts, bundle
from kfp_ddp.models import champion as champions
from kfp_ddp.storage.kinds import open_store
from tests.evaluations import written
from tests.exports import exported
from tests.integration.export.test_publish_step import arguments

NAME = "squares"
CHANGES = ("rename", "remove", "mkdir", "rmdir", "link", "chmod", "truncate")
REFUSED = 2


def with_model(folder: Path) -> Path:
    (folder / "serving" / NAME / "1").mkdir(parents=True)
    (folder / "serving" / NAME / "1" / "model.onnx").write_bytes(bytes(9))
    return folder


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three champions in a row, and a run whose model was compared with the last."""
    base, version = tmp_path / "base", ""
    where, model = open_store(str(base / "models")), open_store(str(base / "models" / NAME))
    for wrong in (9, 8, 7):
        monkeypatch.setattr("time.time", lambda wrong=wrong: 10.0 - wrong)
        before, folder = version, with_model(tmp_path / str(wrong))
        version = exported(where, NAME, folder, wrong, Lineage())
        champions.move(where, NAME, version, before, "run")
        attempts.note(model, version, version=version, champion=before, reason="blessed")
    written(base / "run" / "evaluation", 3)
    verdict = {"blessed": True, "reason": "blessed", "champion": version}
    (base / "run" / "evaluation" / VERDICT).write_text(json.dumps(verdict))
    with bundle.replacing(base / "run") as folder:
        written(with_model(folder), 3, "metrics.json")
    return base


def publish_run(at: Path) -> None:
    publish.python_func(**arguments(at / "run", at, model_name=NAME, attempt="new", keep=1))


def model(at: Path) -> models.Model:
    return models.Model(models.open_models(str(at / "models")), NAME)


COMMANDS: dict[str, Callable[[Path], object]] = {
    "publish": publish_run,
    "promote": lambda at: model(at).promote(champions_of(at)[0]),
    "rollback": lambda at: model(at).rollback(),
    "keep": lambda at: attempts.prune(open_store(str(at / "models" / NAME)), 1),
}


def champions_of(at: Path) -> list[str]:
    return [one.version for one in champions.history(model(at).where, NAME)]


def ended(name: str, at: Path, kill: int = -1) -> int:
    """Return the exit code of a command; `kill` is how many changes it makes before SIGKILL."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            kill_before(kill)
            COMMANDS[name](at)
            code = 0
        except InputError:
            code = REFUSED
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_before(changes: int) -> None:
    left = changes

    def count() -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
            if isinstance(arguments[2], int) and arguments[2] & writes:
                count()
        elif event.removeprefix("os.") in CHANGES:
            count()

    os.fsync = lambda _: count()  # type: ignore[assignment]  # the content is written
    sys.addaudithook(hook)
    sys.stdout = io.StringIO()


class State:
    """What a destination has to be after the commands that moved its champion."""

    def __init__(self, at: Path) -> None:
        self.at, self.stack, self.half = at, champions_of(at), set[str]()
        self.first = self.stack[0]

    def pointer(self) -> str:
        return champions.read_pointer(model(self.at).where, NAME)

    def whole(self, version: str) -> bool:
        return bundle.intact(self.at / "models" / NAME / version)

    def follow(self, name: str) -> None:
        """Move the stack as a command moves CHAMPION."""
        new = {"promote": self.first, "publish": bundle.version(self.at / "run" / "bundle")}
        if name == "rollback":
            self.stack.pop()
        elif new.get(name, self.stack[-1]) != self.stack[-1]:
            self.stack.append(new[name])

    def run(self, name: str) -> None:
        """Run a command; one to a version that is deleted is refused."""
        target = {"promote": self.first, "rollback": self.stack[-2]}.get(name, self.stack[-1])
        whole, possible = {one for one in self.stack if self.whole(one)}, self.whole(target)
        assert ended(name, self.at) == (0 if possible else REFUSED)
        if possible:
            self.follow(name)
        # The next move replaces the history that a killed one had half written; a refused one not.
        self.half = set() if possible else {".CHAMPIONS.tmp"}
        self.check(whole)

    def check(self, whole: Collection[str]) -> None:
        """Check champion and history; `whole` were the complete versions before."""
        assert self.pointer() == self.stack[-1]
        known = champions.history(model(self.at).where, NAME)
        assert champions.replaced_by(known, self.stack[-1]) == self.stack[-2]
        assert self.whole(self.stack[-1])
        assert self.whole(self.stack[-2]) or self.stack[-2] not in whole

    def check_no_leftovers(self) -> None:
        records = {f".{one.name}.lock" for one in self.at.glob(f"models/{NAME}/tried/*.json")}
        hidden = {one.name for one in self.at.rglob(".*")}
        assert hidden <= {".CHAMPION.lock", ".CHAMPIONS.lock", *records, *self.half}
        folders = {one.name for one in (self.at / "models" / NAME).iterdir() if one.is_dir()}
        partial = {one for one in folders - {"tried"} if not self.whole(one)}
        assert partial <= {self.stack[-2]}, "the way back is spared, though it is half deleted"


@pytest.mark.soak
@pytest.mark.parametrize("first", COMMANDS)
def test_kills(first: str, base: Path, tmp_path: Path) -> None:
    kills = 0
    for second in COMMANDS:
        for changes in range(10_000):
            at = tmp_path / f"{second}-{changes}"
            shutil.copytree(base, at)
            state = State(at)
            code = ended(first, at, changes)
            if code == 0:
                break
            assert code == -signal.SIGKILL
            kills += 1
            if state.pointer() != state.stack[-1]:
                state.follow(first)
            state.check(state.stack)
            state.run(second)
            if second != first:
                state.run(first)
            state.check_no_leftovers()
            shutil.rmtree(at)
    print(f"{first}: {kills} kills")
