"""What runs in the pod that reads a claim: lists a folder, or writes files of it to stdout as tar.

It is sent as text, so that any image with a Python will do; it imports nothing of ours.
"""

import errno
import json
import os
import stat
import sys
import tarfile
from collections.abc import Iterator


def found(root: str) -> Iterator[tuple[str, int]]:
    """Plain files below a folder and their bytes, but for hidden ones."""
    for at, folders, names in os.walk(root):
        folders[:] = [each for each in folders if not each.startswith(".")]
        for name in names:
            path = os.path.join(at, name)
            try:
                about = os.lstat(path)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(about.st_mode) and not name.startswith("."):
                yield os.path.relpath(path, root), about.st_size


def send(root: str, names: list[str]) -> None:
    """Write the files that are still there to stdout; a link is none."""
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for name in names:
            path = os.path.join(root, name)
            try:
                file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP):
                    continue
                raise
            with file:
                about = tarfile.TarInfo(name)  # its own would make a link of a second name
                about.size = os.fstat(file.fileno()).st_size
                archive.addfile(about, file)


if __name__ == "__main__":
    asked = json.loads(sys.stdin.readline())
    if asked["names"] is None:
        print(json.dumps(dict(found(asked["root"]))))
    else:
        send(asked["root"], asked["names"])
