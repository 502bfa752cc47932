"""A folder of code as a job: packed the same each time, and the same in the worker, or refused."""

import ast
import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.packed import ARCHIVE, pack
from kfp_ddp.jobs.shipping import code
from kfp_ddp.jobs.shipping.authoring import as_folder, as_script
from kfp_ddp.jobs.shipping.payload import PROGRAM
from tests import workers
from tests.files import write
from tests.workers import specification

MODULES = {"pkg.train": "pkg/train.py", "pkg": "pkg/__main__.py"}
CASES = [25, pytest.param(250, marks=pytest.mark.soak)]
ODD = [
    *("a b", "$HOME", "$(PATH)", "$$", "'", '"', "∑", "#", "-x", "é\u0301", "\\", "`id`"),
    "new\nline",
]
TELL = """
import hashlib, json, os, sys
contents = {}
for above, _, files in os.walk("."):
    for name in files:
        path = os.path.join(above, name)
        digest = hashlib.sha256(open(path, "rb").read()).hexdigest()
        contents[os.path.relpath(path)] = [digest, os.access(path, os.X_OK)]
import beside.deep as deep
json.dump([sys.argv[1:], contents, __name__, deep.X], sys.stdout)
"""


def filled(folder: Path, chance: random.Random, entry: str) -> dict[str, list[Any]]:
    """Files by chance and the entry in a folder; each one's digest, and whether it may run."""
    contents = {f"{name}/{name}": chance.randbytes(99) for name in chance.sample(ODD, 3)}
    contents |= {n: chance.randbytes(9) for n in chance.sample(ODD, 2) if n not in contents}
    contents = {name: text for name, text in contents.items() if f"{name}/{name}" not in contents}
    mark = b"\xef\xbb\xbf" if chance.random() < 0.5 else b""
    end = chance.choice((b"\n", b"\r\n"))
    contents[entry] = mark + TELL.encode().replace(b"\n", end)
    contents["beside/deep.py"] = b"X = '$$ $(PATH)'"
    result = {}
    for name, content in contents.items():
        path = write(folder / name, content)
        path.chmod(chance.choice((0o644, 0o755, 0o600)))
        result[name] = [hashlib.sha256(content).hexdigest(), os.access(path, os.X_OK)]
    return result


@pytest.mark.parametrize("cases", CASES)
def test_random_folders_run_in_a_worker(tmp_path: Path, cases: int) -> None:
    chance = random.Random(cases)
    for number in range(cases):
        folder = tmp_path / f"code-{number}"
        entry = chance.choice(["train.py", "sub/$a.py", *MODULES])
        files = filled(folder, chance, MODULES.get(entry, entry))
        args = ["--lr", *chance.sample(ODD, 4), ""]
        inputs = as_folder(folder, entry, args)
        write(folder / ".git" / "secret")
        write(folder / "__pycache__" / "x.pyc")
        assert as_folder(folder, entry, args) == inputs
        done = workers.run(specification(inputs), tmp_path / str(number), number % 2 == 0)
        assert done.returncode == 0, done.stderr.decode()
        argv, result, name, deep = json.loads(done.stdout)
        result = {name: report for name, report in result.items() if "__pycache__" not in name}
        assert (argv, result, name, deep) == (args, files, "__main__", "$$ $(PATH)")


def test_torchrun_runs_a_folder_in_its_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    (folder / "pkg").mkdir(parents=True)
    (folder / "help.py").write_text("SAY = 'said'")
    (folder / "pkg" / "$train.py").write_text(
        "import os, sys, help\nrank = os.environ['LOCAL_RANK']\n"
        "line = f'{help.SAY} {rank} {sys.argv[1:]}\\n'\n"
        "os.write(1, line.encode())  # at once, as both ranks have one pipe"
    )
    hard = ["--", "--nnodes=7", "$(RANK)", "$$", "${local_rank}"]
    spec = specification(as_folder(folder, "pkg/$train.py", hard), "pytorchjob")
    done = workers.run(spec, tmp_path / "worker", PET_NPROC_PER_NODE="2", PET_STANDALONE="1")
    assert done.returncode == 0, done.stderr.decode()
    assert sorted(done.stdout.decode().splitlines()) == [f"said {rank} {hard}" for rank in (0, 1)]


@pytest.mark.parametrize(("kind", "by_map"), [("tfjob", True), ("pytorchjob", False)])
def test_a_script_gets_its_arguments(tmp_path: Path, kind: str, by_map: bool) -> None:
    file = tmp_path / "train.py"
    file.write_bytes("\ufeffimport sys\r\nprint(ascii(sys.argv[1:]))\r\n".encode())
    spec = specification(as_script(file, ["--", *ODD]), kind)
    done = workers.run(spec, tmp_path / "worker", by_map, PET_STANDALONE="1")
    assert done.stdout.decode().strip() == ascii(["--", *ODD]), done.stderr.decode()


def test_an_archive_has_no_time_and_no_user(tmp_path: Path) -> None:
    packed = code.archive_of(folder_with(tmp_path, "train.py", "b/a.py"))
    assert packed[4:8] == bytes(4)  # gzip's time
    os.utime(tmp_path / "code" / "train.py", (1, 1))
    assert code.archive_of(tmp_path / "code") == packed
    with tarfile.open(fileobj=io.BytesIO(packed)) as opened:
        assert [member.name for member in opened] == ["b/a.py", "train.py"]
        assert {(item.mtime, item.uid, item.uname) for item in opened} == {(0, 0, "")}


def folder_with(tmp_path: Path, *files: str) -> Path:
    folder = tmp_path / "code"
    for name in files:
        write(folder / name)
    return folder


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ("trian.py", "'trian.py' is not in the folder of code, which has pkg/train.py, train.py"),
        ("pkg", "entry='pkg' is not in the folder"),
        ("../train.py", "entry='../train.py' is not in the folder"),
    ],
)
def test_a_missing_entry_is_an_input_error(tmp_path: Path, entry: str, part: str) -> None:
    with pytest.raises(InputError, match=part):
        as_folder(folder_with(tmp_path, "train.py", "pkg/train.py"), entry)


def test_an_invalid_folder_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    file, linked = tmp_path / "file", tmp_path / "linked"
    file.write_bytes(random.Random(1).randbytes(100_000))
    (linked / "sub").mkdir(parents=True)
    (linked / "sub" / "data").symlink_to(file)
    (tmp_path / "name").mkdir()
    (tmp_path / os.fsdecode(b"name/a\xff.py")).touch()
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "train.py")
    (tmp_path / "large").mkdir()
    file.rename(tmp_path / "large" / "train.py")
    for name, part in {
        "missing": "is no folder",
        "empty": "has no files to run",
        "linked": "sub/data is a link or not a regular file",
        "name": "is not a name in UTF-8",
        "pipe": "train.py is a link or not a regular file",
        "large": r"is packed into 13\d,\d{3} bytes, and at most 120,000 fit .* use as_folder",
    }.items():
        with pytest.raises(InputError, match=part):
            as_folder(tmp_path / name, "train.py")


def archive(members: Iterable[tuple[str, bytes, bytes]]) -> bytes:
    """A tar.gz of members: name, kind and content."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as opened:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc"
            member.size = len(content) if kind == tarfile.REGTYPE else 0
            opened.addfile(member, io.BytesIO(content))
    return packed.getvalue()


FILE = tarfile.REGTYPE
GOOD = ("train.py", FILE, b"print('ran')")
BAD = {
    "absolute": archive([GOOD, ("/tmp/absolute.py", FILE, b"")]),
    "above": archive([GOOD, ("../above.py", FILE, b"")]),
    "inside": archive([GOOD, ("a/../../inside.py", FILE, b"")]),
    "dot": archive([GOOD, ("./dot.py", FILE, b"")]),
    "link": archive([GOOD, ("link", tarfile.SYMTYPE, b""), ("link/passwd", FILE, b"")]),
    "hard link": archive([GOOD, ("link", tarfile.LNKTYPE, b"")]),
    "folder": archive([GOOD, ("folder", tarfile.DIRTYPE, b"")]),
    "device": archive([GOOD, ("device", tarfile.CHRTYPE, b"")]),
    "twice": archive([GOOD, GOOD]),
    "below a file": archive([GOOD, ("train.py/more.py", FILE, b"")]),
    "on a folder": archive([("train.py/more.py", FILE, b""), GOOD]),
    "cut": archive([GOOD, ("b", FILE, bytes(9999))])[:-40],
    "no archive": b"PK\x03\x04",
}


@pytest.mark.parametrize("bad", list(BAD))
def test_a_hostile_archive_is_refused_by_step_and_worker(tmp_path: Path, bad: str) -> None:
    with pytest.raises(InputError, match=r"^the archive of code cannot be used: "):
        code.check(BAD[bad], "train.py")
    spec = specification({"code": pack(BAD[bad], ARCHIVE), "entry": "train.py"})
    done = workers.run(spec, tmp_path / "worker")
    (line,) = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (1, b"")
    assert line.startswith("error: ")
    created = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    inside = {name for name in created if name.startswith("worker/tmp/kfp-ddp-")}
    ours = {"worker", "worker/tmp", "worker/cwd", "worker/mounted"}
    assert {n for n in created - inside if "mounted/" not in n} == ours


def test_the_first_program_of_a_worker_needs_only_python_3_8() -> None:
    tree = ast.parse(PROGRAM.read_text(), feature_version=(3, 8))
    nodes = list(ast.walk(tree))
    assert not [item for item in nodes if isinstance(item, ast.Match | ast.TryStar)]
    names = {alias.name for item in nodes if isinstance(item, ast.Import) for alias in item.names}
    names |= {str(item.module) for item in nodes if isinstance(item, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_a_too_large_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MOST_UNPACKED", 1 << 20)
    large = archive([("train.py", FILE, bytes(1 << 21))])
    with pytest.raises(InputError, match="it unpacks to more than 1 MiB"):
        code.check(large, "train.py")
    with pytest.raises(InputError, match="it unpacks to more than 1 MiB"):
        code.check(gzip.compress(bytes(1 << 22)), "")
    (tmp_path / "data.bin").write_bytes(bytes(1 << 21))
    with pytest.raises(InputError, match="has more than 1 MiB: name the folder that holds the"):
        code.archive_of(tmp_path)
    monkeypatch.setattr(code, "MOST_PACKED", 1000)
    with pytest.raises(InputError, match=r"^the folder of code is packed into 0 MiB, and"):
        code.check(large, "train.py")


def test_workers_verify_the_digest_of_code_on_a_pvc(tmp_path: Path) -> None:
    inputs = as_folder(folder_with(tmp_path, "train.py"), "train.py", upload=f"{tmp_path}/claim")
    assert "claim/" in inputs["code"]
    spec = specification(inputs)
    assert workers.run(spec, tmp_path / "a").returncode == 0
    another = archive([GOOD])
    Path(inputs["code"]).write_bytes(another)
    changed = workers.run(spec, tmp_path / "b")
    result = code.digest_of(another)[:12]
    expected = code.digest_in(inputs["code"])[:12]
    message = f"error: the code has SHA-256 {result}..., not {expected}... as packed\n"
    assert (changed.returncode, changed.stdout, changed.stderr.decode()) == (1, b"", message)
    Path(inputs["code"]).unlink()
    gone = workers.run(spec, tmp_path / "c").stderr.decode()
    assert gone == f"error: cannot read {inputs['code']}: No such file or directory\n"


def test_ranks_that_one_process_starts_share_one_folder(tmp_path: Path) -> None:
    """As the ranks of an MPIJob do, where nothing of ours runs before them in a pod."""
    (tmp_path / "tmp").mkdir()
    write(tmp_path / "code" / "train.py", "import os\nprint(os.getcwd(), flush=True)")
    packed = code.archive_of(tmp_path / "code")
    env = {
        "TMPDIR": str(tmp_path / "tmp"),
        "KFP_DDP_CODE": pack(packed, ARCHIVE).partition(",")[2],
        "KFP_DDP_CODE_SHA256": code.digest_of(packed),
    }
    rank = [sys.executable, str(PROGRAM), "together", sys.executable, "train.py"]
    starter = (
        f"import subprocess\nranks = [subprocess.Popen({rank!r}) for _ in range(4)]\n"
        "print([rank.wait() for rank in ranks])"
    )
    for _ in range(2):
        started = [sys.executable, "-c", starter]
        done = subprocess.run(started, env=env, capture_output=True, text=True, check=True)
        *folders, codes = done.stdout.splitlines()
        assert codes == "[0, 0, 0, 0]", done.stderr
        assert len(set(folders)) == 1
        assert Path(folders[0]).is_relative_to(tmp_path / "tmp")
    (shared,) = (tmp_path / "tmp").iterdir()
    assert len([path for path in shared.iterdir() if path.is_dir()]) == 2


def test_a_missing_command_fails_with_one_line(tmp_path: Path) -> None:
    inputs = as_folder(folder_with(tmp_path, "train.py"), "train.py")
    spec = specification({"code": inputs["code"], "command": ["no-such"]})
    done = workers.run(spec, tmp_path / "worker")
    line = "error: cannot start no-such: No such file or directory\n"
    assert (done.returncode, done.stderr.decode()) == (1, line)
