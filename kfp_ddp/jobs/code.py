"""A folder of code as one archive, known by its SHA-256: packed where it is written, checked here.

It travels in a pipeline's parameter, as a data URL (RFC 2397), or lies under its digest in a bucket
or on a claim.
"""

import base64
import binascii
import gzip
import hashlib
import io
import os
import stat
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from kfp_ddp.core.errors import InputError

PREFIX = "data:application/gzip;base64,"
SUFFIX = ".tar.gz"
CODE = (
    r"^$|^data:application/gzip;base64,[A-Za-z0-9+/]+=*$"
    r"|^(/|[a-z][a-z0-9]*://)(\S*/)?[0-9a-f]{64}\.tar\.gz$"
)
MOST_PACKED, MOST_UNPACKED = 64 << 20, 512 << 20
SKIPPED = "__pycache__"


def archive_of(folder: str | Path) -> bytes:
    """The plain files of a folder as a tar.gz, the same for the same content.

    Hidden files and `__pycache__` stay out; a file that may be executed stays one.

    Raises:
        InputError: no folder, an empty one, or something in it that is no plain file.
    """
    root = Path(folder)
    if not root.is_dir():
        raise InputError(f"{root} is no folder: give the one that holds the code")
    packed, total = io.BytesIO(), 0
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in sorted(_files(root)):
            content = _content(path)
            total += len(content)
            if total > MOST_UNPACKED:
                raise InputError(
                    f"{root} has more than {MOST_UNPACKED >> 20} MiB: name the folder that holds "
                    "the code alone, and bring data by a claim"
                )
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            archive.addfile(member, io.BytesIO(content))
        if not archive.getmembers():
            raise InputError(f"{root} has no files to run: name the folder that holds the code")
    return gzip.compress(packed.getvalue(), mtime=0)


def _files(root: Path) -> list[tuple[str, Path]]:
    found = []
    for above, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != SKIPPED and name[0] != "."]
        for name in (*folders, *files):
            path = Path(above, name)
            if name[0] == "." or (path.is_dir() and not path.is_symlink()):
                continue
            relative = path.relative_to(root).as_posix()
            try:
                relative.encode()
            except UnicodeEncodeError:
                raise InputError(f"{relative!r} in {root} is no name in UTF-8: rename it") from None
            found.append((relative, path))
    return found


def _content(path: Path) -> bytes:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise InputError(f"{path} is a link or no plain file, which is not packed: copy it there")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be packed: {error.strerror}; make it readable") from None


def digest_of(archive: bytes) -> str:
    """The SHA-256 by which an archive is known, in hex."""
    return hashlib.sha256(archive).hexdigest()


def as_data_url(archive: bytes) -> str:
    """An archive as one line of plain characters."""
    return PREFIX + base64.b64encode(archive).decode()


def from_data_url(code: str) -> bytes:
    """The archive that `as_data_url` made a line.

    Raises:
        InputError: for a line that was cut.
    """
    try:
        return base64.b64decode(code.removeprefix(PREFIX), validate=True)
    except binascii.Error as error:
        raise InputError(
            f"code={code[:40]!r}... is not whole ({error}): make it with "
            "kfp_ddp.jobs.authoring.as_folder"
        ) from None


def digest_in(address: str) -> str:
    """The digest in the name of an archive."""
    return PurePosixPath(address).name.removesuffix(SUFFIX)


def is_module(entry: str) -> bool:
    """Whether what is run is named as a module, not as a file."""
    return not entry.endswith(".py")


def check(archive: bytes, entry: str) -> None:
    """Make sure that workers can unpack the archive, and find in it what to run.

    Args:
        archive: A tar.gz of plain files.
        entry: A file such as train.py, or a module such as package.train; '' for neither.

    Raises:
        InputError: what is wrong with it, in one line.
    """
    if len(archive) > MOST_PACKED:
        raise InputError(
            f"the folder of code is packed into {len(archive) >> 20} MiB, and {MOST_PACKED >> 20} "
            "MiB travel: bring data by a claim"
        )
    names = _names(archive)
    if not entry:
        return
    place = entry.replace(".", "/")
    wanted = {f"{place}.py", f"{place}/__main__.py"} if is_module(entry) else {entry}
    if not wanted & names:
        near = ", ".join(sorted(name for name in names if name.endswith(".py"))[:5])
        raise InputError(
            f"entry={entry!r} is not in the folder of code, which has {near or 'none'}"
        )


def _names(archive: bytes) -> set[str]:
    """The files of an archive, each of which can be made below one new folder."""
    total, names, folders = 0, set[str](), set[str]()
    try:
        with (
            gzip.open(io.BytesIO(archive)) as unzipped,
            tarfile.open(fileobj=unzipped, mode="r:") as opened,
        ):
            for member in opened:
                path = PurePosixPath(member.name)
                total += member.size
                if not member.isreg() or member.name != str(path) or path.is_absolute():
                    raise InputError(_bad(f"{member.name!r} is no plain file below its folder"))
                if ".." in path.parts or member.name in names | folders | {"", "."}:
                    raise InputError(_bad(f"{member.name!r} leaves it, or stands there twice"))
                if total > MOST_UNPACKED:
                    raise InputError(_bad(f"it unpacks to more than {MOST_UNPACKED >> 20} MiB"))
                above = {str(folder) for folder in path.parents} - {"."}
                if above & names:
                    raise InputError(_bad(f"{member.name!r} lies below a file"))
                names.add(member.name)
                folders |= above
            while unzipped.read(1 << 20):  # at its end is the checksum of all
                if unzipped.tell() > MOST_UNPACKED:
                    raise InputError(_bad(f"it unpacks to more than {MOST_UNPACKED >> 20} MiB"))
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(_bad(f"it is not a whole tar.gz ({error})")) from None
    return names


def _bad(why: str) -> str:
    return f"the archive of code cannot be used: {why}; make it with as_folder"
