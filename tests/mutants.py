"""`python -m tests.mutants [part ...]`: change the code that decides, and see that tests notice.

Each part is mutated by mutmut in a copy of its own below build/mutants, and tried with the fast
tests that cover it; a second call tries again what the first left alive. Prints the share of
mutants that were noticed, and the others by name: `mutmut show NAME` in the copy shows one.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "mutants"
NOTICED = {1: "killed", 3: "killed", **dict.fromkeys((24, -24, 36, 152, 255), "timeout")}
"""What mutmut's exit codes of a test run mean; the others are mutants that live."""


class Part(NamedTuple):
    """Modules of the package and the tests that cover them, both below their folders."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


PARTS = {
    "sampler": Part(("training/sampler",), ("unit/test_training_sampler",)),
    "manifest": Part(
        ("training/manifest",), ("unit/test_training_checkpoint", "unit/test_training_manifest")
    ),
    "checkpoint": Part(
        ("training/checkpoint",),
        tuple(f"unit/test_training_{name}" for name in ("checkpoint", "damage", "writer")),
    ),
    "resume": Part(
        ("training/resume",), ("unit/test_training_begins", "unit/test_training_checkpoint")
    ),
    "optim": Part(("training/optim",), ("unit/test_training_start", "unit/test_training_optim")),
    "follow": Part(
        ("jobs/follow/decisions", "jobs/follow/pods"),
        (
            "unit/test_launch_follower",
            "unit/test_launch_limits",
            "unit/test_launch_lost_pods",
            "unit/test_launch_pending",
            "unit/test_launch_pod_status",
            "unit/test_launch_standing",
        ),
    ),
    "names": Part(
        ("datasets/names",), ("unit/test_sync_names", "unit/test_sync_name_forms")
    ),
    "versions": Part(
        ("datasets/versions",),
        ("unit/test_sync_store", "integration/test_sync_versions", "integration/test_sync_leases"),
    ),
    "lease": Part(("core/lease",), ("unit/test_lease", "unit/test_lease_edges")),
    "gate": Part(
        tuple(f"evaluation/gate/{name}" for name in ("rules", "checks", "against", "bundled")),
        tuple(f"unit/test_gate_{name}" for name in ("classes", "rules", "table", "words")),
    ),
    "measure": Part(
        tuple(f"evaluation/{name}" for name in ("measure", "roc")),
        ("unit/test_evaluate_measure", "unit/test_evaluate_roc"),
    ),
    "intervals": Part(("evaluation/intervals",), ("unit/test_evaluate_intervals",)),
    "slices": Part(("evaluation/slices",), ("unit/test_evaluate_slices",)),
    "comparison": Part(("evaluation/comparison",), ("unit/test_comparison",)),
    "prove": Part(("export/prove",), ("unit/test_export_prove",)),
}

# Prose is no decision: lines that are one string, and a message on the line of its error.
SETTINGS = """
[tool.mutmut]
source_paths = ["kfp_ddp"]
only_mutate = {modules}
pytest_add_cli_args = ["-p", "no:cacheprovider"]
pytest_add_cli_args_test_selection = {tests}
do_not_mutate_patterns = ['^\\s*f?"[^"]* [^"]*"$', 'raise \\w+\\(f?"']
process_isolation = "forkserver"
use_git_change_detection = false
"""


def main(argv: list[str]) -> int:
    """Mutate the parts named, or all."""
    unknown = sorted(set(argv) - set(PARTS))
    if unknown:
        print(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    lives: list[str] = []
    for name in argv or PARTS:
        folder = prepare(name, PARTS[name])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        with (folder / "mutmut.log").open("w") as log:
            command = [str(Path(sys.executable).parent / "mutmut"), "run", "--max-children", "2"]
            done = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log)
        ended, left = results(folder)
        if done.returncode or not ended:
            print(f"{name}: mutmut ended with {done.returncode}, see {log.name}", file=sys.stderr)
            return 1
        noticed, whole = ended["killed"] + ended["timeout"], sum(ended.values())
        print(f"{name:12} {noticed:4} of {whole:4} noticed, {noticed / whole:.1%}", flush=True)
        lives += left
    print(*lives, sep="\n")
    return 0


def prepare(name: str, part: Part) -> Path:
    """A copy in which the package's folders are no links, with mutmut's settings for the part."""
    folder = BUILD / name
    for tree in ("kfp_ddp", "tests"):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / tree, folder / tree, ignore=unwanted, dirs_exist_ok=True)
    shutil.rmtree(folder / "mutants" / "tests", ignore_errors=True)
    (folder / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)
    for meta in folder.glob("mutants/**/*.py.meta"):
        said = json.loads(meta.read_text())
        codes = said["exit_code_by_key"]
        said["exit_code_by_key"] = {m: c if c in NOTICED else None for m, c in codes.items()}
        meta.write_text(json.dumps(said))
    modules = [f"{module}.py" for module in part.modules]
    tests = [f"tests/{test}.py" for test in part.tests]
    settings = SETTINGS.format(modules=json.dumps(modules), tests=json.dumps(tests))
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + settings)
    return folder


def results(folder: Path) -> tuple[Counter[str], list[str]]:
    """How many mutants ended how, and the names of those that nobody noticed."""
    ended: Counter[str] = Counter()
    left: list[str] = []
    for meta in sorted((folder / "mutants").rglob("*.py.meta")):
        for name, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            how = NOTICED.get(code, "lives")
            ended[how] += 1
            left += [name] if how == "lives" else []
    return ended, left


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
