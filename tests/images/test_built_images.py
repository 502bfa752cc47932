"""The built images: user, content, and that they work read-only.

`make images-test` builds them and runs these tests beside their files; elsewhere they are skipped.
"""

import json
import re
import subprocess
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.container_images import lock_of
from kfp_ddp.jobs.shipping.worker_start import MORE

REPOSITORY = Path(__file__).parents[2]
BUILT = REPOSITORY / "build" / "images"
NAMES = sorted(path.parent.name for path in BUILT.glob("*/root") if path.is_dir())
MEGABYTES = {"launcher": 640, "server": 720, "trainer": 7000, "trainer-cpu": 2200}
"""The most that the files of an image, its base among them, may take."""
COMPILERS = ("as", "c++", "cc", "g++", "gcc", "ld", "make")
LEFTOVERS = (
    *("build", "dist", "src", "tmp/*", "var/tmp/*", "var/lib/apt/lists/*_*"),
    *("root/.cache/*", "home/*/.cache", "var/cache/apt/archives/*.deb"),
)
OF_THE_BASE = {"kfp-ddp", "pip", "setuptools", "wheel"}
# Read-only as a cluster can mount it, with a /tmp, which Python and torch cannot be without.
ENTER = """
set -e
cp /etc/hosts "$0/etc/hosts"
mount --bind "$0" "$0"
mount -o remount,ro,bind "$0"
mount --rbind /dev "$0/dev"
mount -t tmpfs tmpfs "$0/tmp"
exec chroot --userspec=1000:1000 "$0" "$@"
"""
TRAIN = """
import subprocess, sys
from pathlib import Path
from PIL import Image
for split in ("train", "val"):
    for at, name in enumerate(("dark", "light")):
        folder = Path("/tmp/data", split, name)
        folder.mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (8, 8), (200 * at,) * 3).save(folder / f"{i}.png")
flags = "--data /tmp/data --output-dir /tmp/run --model cifar_resnet8 --image-size 8 --epochs 1"
flags += " --batch-size 4 --workers 1 --warmup-epochs 0"
command = [sys.executable, "-m", "kfp_ddp.training.node", "--nproc-per-node", "2", "--"]
sys.exit(subprocess.run([*command, *flags.split()]).returncode)
"""

pytestmark = [
    pytest.mark.skipif(not NAMES, reason="no image is built: make images-test builds them"),
    pytest.mark.parametrize("name", NAMES),
]


def inside(name: str, *command: str) -> str:
    """What a command writes that the image's user runs in it, the root read-only."""
    settings = config(name)["config"]
    variables = ["/usr/bin/env", "-i", f"HOME={settings['WorkingDir']}", *settings["Env"]]
    enter = ["unshare", "--mount", "sh", "-c", ENTER, str(root(name))]
    whole = [*enter, *variables, *command]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def root(name: str) -> Path:
    return (BUILT / name / "root").resolve()


def config(name: str) -> Any:
    return json.loads((BUILT / name / "config.json").read_text())["OCIv1"]


def installed(name: str) -> dict[str, str]:
    """Version by name of each Python package below /usr/local, where ours are."""
    found = {}
    for path in root(name).glob("usr/local/lib/python3*/*-packages/*.dist-info/METADATA"):
        fields = HeaderParser().parsestr(path.read_text(errors="replace"), headersonly=True)
        found[re.sub(r"[-_.]+", "-", fields["Name"]).lower()] = fields["Version"]
    return found


def test_image_runs_as_a_user_without_settings_of_its_build(name: str) -> None:
    settings = config(name)["config"]
    assert settings["User"] == "1000"
    names = {variable.partition("=")[0] for variable in settings["Env"]}
    assert "PYTHONUNBUFFERED" in names
    assert not [each for each in names if re.match(r"(?i)PIP_|SSL_|.*PROXY|.*CA_BUNDLE", each)]
    assert not [path for path in root(name).glob("etc/pip.conf") if path.stat().st_size]


def test_image_is_not_too_large(name: str) -> None:
    used = subprocess.run(["du", "-sxm", root(name)], capture_output=True, text=True, check=True)
    assert int(used.stdout.split()[0]) <= MEGABYTES[name]


def test_image_has_no_files_of_its_build(name: str) -> None:
    left = [str(path) for pattern in LEFTOVERS for path in root(name).glob(pattern)]
    assert left == []
    assert not list(root(name).glob("usr/local/lib/python3*/*-packages/kfp_ddp/tests"))
    programs = [path.name for path in root(name).glob("usr/*bin/*")]
    programs += [path.name for path in root(name).glob("usr/local/bin/*")]
    # torch.compile compiles the launchers of its GPU kernels where they run.
    assert sorted({*COMPILERS} & {*programs} - {"make"}) == (
        ["as", "c++", "cc", "g++", "gcc", "ld"] if name == "trainer" else []
    )


def test_image_has_the_packages_of_its_lock(name: str) -> None:
    kind = name.removesuffix("-cpu")
    locks = [kind, *MORE.get(kind, ())]
    text = "".join(lock_of(lock).read_text() for lock in locks)
    locked = set(re.findall(r"^([a-z0-9.-]+)==(\S+)", text, re.MULTILINE))
    found = installed(name)
    assert {each for each in found.items() if each[0] not in OF_THE_BASE} <= locked
    assert found["kfp-ddp"] in inside(name, "kfp-ddp", "--version")
    assert ("torch" in found) == name.startswith("trainer")
    assert ("triton" in found) == (name == "trainer")


def test_engines_can_be_imported_read_only(name: str) -> None:
    image = name.removesuffix("-cpu")
    texts = [path.read_text() for path in REPOSITORY.glob("components/*/component.py")]
    engines = [
        module
        for text in texts
        if f"kfp-ddp/{image}:" in text.partition("def ")[0]
        for module in re.findall(r"from (kfp_ddp\.\S+) import", text)
    ]
    if image == "server":
        engines = ["kserve", "onnxruntime", "kfp_ddp.cli.serve"]
    assert engines
    probe = "import importlib, os, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    probe += "; print(os.getuid(), os.access('/var/tmp', os.W_OK), os.access('/tmp', os.W_OK))"
    told = inside(name, "python3", "-W", "error", "-c", probe, "kfp.dsl.executor_main", *engines)
    assert told == "1000 False True\n"


def test_two_ranks_train_on_the_cpu_read_only(name: str) -> None:
    if not name.startswith("trainer"):
        pytest.skip("it holds no torch")
    assert "rank 1 of 2" in inside(name, "python3", "-c", TRAIN)
