"""The program of the pod that reads a PVC: lists a folder, or writes its files to stdout as tar.

It is sent as text and imports nothing of this package, so that any image with Python will do.
"""

import errno
import json
import os
import stat
import sys
import tarfile
from collections.abc import Iterator


def walk(root: str) -> Iterator[tuple[str, int]]:
    """Yield the names and sizes of the regular files below a folder, without hidden ones."""
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = os.path.join(parent, name)
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode) and not name.startswith("."):
                yield os.path.relpath(path, root), status.st_size


def send(root: str, names: list[str]) -> None:
    """Write the existing files to stdout; links are skipped."""
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
                member = tarfile.TarInfo(name)  # gettarinfo would store a hard link as a link
                member.size = os.fstat(file.fileno()).st_size
                archive.addfile(member, file)


if __name__ == "__main__":
    request = json.loads(sys.stdin.readline())
    if request["names"] is None:
        print(json.dumps(dict(walk(request["root"]))))
    else:
        send(request["root"], request["names"])
