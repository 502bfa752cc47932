"""The steps of a release that need no network: `python -m release STEP`, in order of use.

notes [--tag v1.2.3]    print the changes of this version, if tag and CHANGELOG agree with it
packages OUT            build wheel and sdist
sboms OUT               write a bill of materials for the lock of each image
pipelines OUT IMAGE...  compile the pipelines for launcher and trainer, HOST/NAME@sha256:...
sums OUT                write SHA256SUMS
verify OUT IMAGE...     check all of it as it is on disk
"""

import argparse
import subprocess
import sys
from pathlib import Path

from release import artifacts, verify
from release.artifacts import ReleaseError


def main(arguments: list[str]) -> int:
    """Run a step; return the exit code."""
    parser = argparse.ArgumentParser("python -m release", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("step", choices=[*STEPS, "notes"])
    parser.add_argument("out", type=Path, nargs="?", help="folder of the release")
    parser.add_argument("images", nargs="*", help="launcher and trainer by digest")
    parser.add_argument("--tag", default="", help="tag that is to be released")
    options = parser.parse_args(arguments)
    if options.step != "notes" and options.out is None:
        parser.error(f"{options.step} needs a folder")
    try:
        if options.step == "notes":
            print(artifacts.notes(options.tag))
        else:
            STEPS[options.step](options.out, options.images)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: {error}\n{error.stdout or ''}{error.stderr or ''}", file=sys.stderr)
        return 1
    return 0


STEPS = {
    "packages": lambda out, _: artifacts.packages(out),
    "sboms": lambda out, _: artifacts.sboms(out),
    "pipelines": artifacts.pipelines,
    "sums": lambda out, _: artifacts.sums(out),
    "verify": verify.verify,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
