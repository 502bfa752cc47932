"""List the files of tests/e2e that the changes of the last day reach, the nearest first.

The last day ends with the committer's date of HEAD, so the list depends on nothing but the commit.
A test reaches what it imports, and what that imports, and so on. Names of modules and folders in
texts count as imports: commands, code for pods, and compiled pipelines have these. A file that
cannot be placed is reached by every test, and so is everything where the history is not there.
"""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
E2E = "tests/e2e"
IN_ANY_CASE = {f"{E2E}/test_stores.py"}
"""Run by .ci/run whatever has changed."""
LINKED = ("compiled", "components", "deploy", "images", "pipelines", "training")
"""Folders that kfp_ddp/ has links to."""
ROOMS = ("kfp_ddp", *LINKED, "benchmarks", "examples", "tests")
FREE = (".github/", "docs/", "release/", "tests/unit/", "tests/integration/", "LICENSE")
"""What no test on a cluster reads; `make test` does."""
FIXTURES = {
    **dict.fromkeys(("begin", "local_run", "scene"), f"{E2E}/harness/fixtures.py"),
    "bucket_url": f"{E2E}/harness/bucket.py",
}
SHARED = re.compile(r"kfp_ddp/__init__|tests/(e2e/)?conftest|tests/e2e/harness/fixtures")
MODULE = re.compile(r"\b(?:kfp_ddp|tests|benchmarks)(?:\.\w+)+\.?")
TEST = re.compile(rf"{E2E}/test_\w+\.py")
LAST = 20
"""The distance of what only may reach a test."""


def git(*arguments: str) -> list[str] | None:
    """Return the lines that git prints; None if it fails."""
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else None


def changed() -> list[str] | None:
    """Return the paths that differ from the main line a day before HEAD; None if unknown."""
    date = git("log", "-1", "--format=%ct")
    if not date:
        return None
    until = f"--before={int(date[0]) - 24 * 60 * 60}"
    base = git("rev-list", "-1", "--first-parent", until, "HEAD")
    return git("diff", "--name-only", "--no-renames", base[0], "HEAD") if base else None


@cache
def files() -> frozenset[str]:
    """Return the paths of the rooms that a test can reach."""
    paths = (path for room in ROOMS for path in (ROOT / room).rglob("*"))
    own = (path for path in paths if path.is_file() and "__pycache__" not in path.parts)
    return frozenset(path.relative_to(ROOT).as_posix() for path in own)


def below(folder: str) -> set[str]:
    """Return the paths in a folder, and in those below it."""
    return {path for path in files() if path.startswith(f"{folder}/")}


def modules(name: str) -> set[str]:
    """Return the files of a dotted name: of a module, of what it lies in, or of a whole folder."""
    parts = name.rstrip(".").split(".")
    if parts[1:2] and parts[1] in LINKED:
        parts = parts[1:]
    if name.endswith("."):  # the start of a name that is completed when it is used
        return below("/".join(parts))
    result = set()
    for count in range(len(parts)):
        place = "/".join(parts[: count + 1])
        result |= {f"{place}.py", f"{place}/__init__.py"} & files()
    # The package itself imports Client only when it is asked for it.
    return result - {"kfp_ddp/__init__.py"} or result


@cache
def reads(path: str) -> frozenset[str]:
    """Return the paths that a file imports or names."""
    if PurePosixPath(path).suffix not in (".py", ".yaml", ".toml", ".sh"):
        return frozenset()
    text = (ROOT / path).read_text(encoding="utf-8")
    names = set(MODULE.findall(text))
    result = below(str(PurePosixPath(path).parent)) if "import_module" in text else set()
    for node in ast.walk(ast.parse(text)) if path.endswith(".py") else ():
        if isinstance(node, ast.ImportFrom):
            above = "kfp_ddp." + ".".join(Path(path).parent.parts) + "." if node.level else ""
            names |= {f"{above}{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Constant) and node.value in (*LINKED, "examples"):
            result |= below(node.value)
        elif isinstance(node, ast.Constant) and node.value == "kfp_ddp":  # python -m kfp_ddp
            result.add("kfp_ddp/__main__.py")
        elif isinstance(node, ast.arg) and node.arg in FIXTURES and path.startswith(E2E):
            result.add(FIXTURES[node.arg])
    return frozenset(result.union(*map(modules, names - {"kfp_ddp.__version__"})))


@cache
def distances(test: str) -> dict[str, int]:
    """Return how many imports lie between a test and each file that it reaches."""
    result = {test: 0}
    waiting = [test]
    for path in waiting:
        for near in sorted(reads(path) - result.keys()):
            result[near] = result[path] + 1
            waiting.append(near)
    return result


def places(path: str) -> set[str]:
    """Return the files that stand for a changed one; none for one that every test reaches."""
    if path in files() and path.endswith((".py", ".yaml")):
        return {path}
    folder = PurePosixPath(path).parent
    while str(folder) != ".":  # data, or a file that was deleted: all modules beside it
        beside = {one for one in files() if PurePosixPath(one).parent == folder}
        if modules_beside := {one for one in beside if one.endswith((".py", ".yaml"))}:
            return modules_beside
        folder = folder.parent
    return set()


def select(paths: Iterable[str] | None) -> list[str]:
    """Return the tests that changed paths reach; all where no paths are known.

    A test whose own file has changed is first, then that which imports most that has.
    """
    tests = sorted(path for path in files() if TEST.fullmatch(path) and path not in IN_ANY_CASE)
    near = {test: Counter[int]() for test in tests}
    for path in paths or ():
        if path.startswith(FREE) or (path.endswith(".md") and not path.startswith("deploy/")):
            continue
        stands = places(path)
        for test in tests:
            steps = [distances(test)[one] for one in stands if one in distances(test)]
            if SHARED.match(path) or not stands:
                steps = [LAST]
            if steps:
                near[test][min(*steps, LAST)] += 1

    reached = (test for test in tests if near[test] or paths is None)
    return sorted(reached, key=lambda test: [-near[test][step] for step in range(LAST + 1)])


if __name__ == "__main__":
    print("\n".join(select(changed())))
