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
        visible = [name for name in folders if not name.startswith(".")]
        folders[:] = visible  # os.walk goes only into these
        for name in names:
            if name.startswith("."):
                continue
            path = os.path.join(parent, name)
            try:
                status = os.lstat(path)
            except FileNotFoundError:  # a training replaces its files meanwhile
                continue
            if stat.S_ISREG(status.st_mode):
                relative = os.path.relpath(path, root)
                yield relative, status.st_size


def send(root: str, names: list[str]) -> None:
    """Write the existing files to stdout; links are skipped."""
    flags = os.O_RDONLY | os.O_NOFOLLOW
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for name in names:
            path = os.path.join(root, name)
            try:
                descriptor = os.open(path, flags)
            except OSError as error:
                deleted_or_link = error.errno in (errno.ENOENT, errno.ELOOP)
                if deleted_or_link:
                    continue
                raise
            with os.fdopen(descriptor, "rb") as file:
                member = tarfile.TarInfo(name)  # gettarinfo would store a hard link as a link
                member.size = os.fstat(file.fileno()).st_size
                archive.addfile(member, file)


if __name__ == "__main__":
    request = json.loads(sys.stdin.readline())
    folder = request["root"]
    wanted = request["names"]
    if wanted is None:
        sizes = dict(walk(folder))
        print(json.dumps(sizes))
    else:
        send(folder, wanted)
