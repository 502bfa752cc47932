"""A folder of code as one archive named by its SHA-256: a data URL (RFC 2397), or a file."""

import gzip
import hashlib
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from kfp_ddp.core.errors import InputError

SUFFIX = ".tar.gz"
CODE = (
    r"^$|^data:application/gzip;base64,[A-Za-z0-9+/]+=*$"
    r"|^(/|[a-z][a-z0-9]*://)(\S*/)?[0-9a-f]{64}\.tar\.gz$"
)
MOST_PACKED = 64 << 20
MOST_UNPACKED = 512 << 20


def archive_of(folder: str | Path) -> bytes:
    """Return a folder's files, except hidden ones, as a tar.gz: the same for the same content."""
    root = Path(folder)
    if not root.is_dir():
        raise InputError(f"{root} is no folder: give the one that holds the code")
    return gzip.compress(tar_of(_files(root)), mtime=0)


def tar_of(files: Iterable[tuple[str, bytes, int]]) -> bytes:
    """Return files, by name, content and mode, as an uncompressed tar of nothing else."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content, mode in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = mode
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def _files(root: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yield the relative names, the contents and the modes, sorted by name."""
    names = _visible_names(root)
    if not names:
        raise InputError(f"{root} has no files to run: name the folder that holds the code")
    total = 0
    for name in sorted(names):
        path = root / name
        content = _content(root, name)
        total += len(content)
        if total > MOST_UNPACKED:
            raise InputError(
                f"{root} has more than {MOST_UNPACKED >> 20} MiB: name the folder that holds "
                "the code alone, and bring data by a claim"
            )
        yield name, content, 0o755 if os.access(path, os.X_OK) else 0o644


def _visible_names(root: Path) -> list[str]:
    """Return the relative names of the files and links below a folder, except hidden ones."""
    names: list[str] = []
    for above, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
        # The walk does not enter a link to a folder: it is refused later, as a link to a file is.
        links = [name for name in folders if Path(above, name).is_symlink()]
        visible = [name for name in files if name[0] != "."]
        paths = [Path(above, name) for name in links + visible]
        names += [path.relative_to(root).as_posix() for path in paths]
    return names


def _content(root: Path, name: str) -> bytes:
    """Return the content of a regular file; InputError for anything else."""
    path = root / name
    if not stat.S_ISREG(path.lstat().st_mode):
        raise InputError(f"{path} is a link or not a regular file: copy its content there")
    try:
        name.encode()
        return path.read_bytes()
    except UnicodeEncodeError:
        raise InputError(f"{name!r} in {root} is not a name in UTF-8: rename it") from None
    except OSError as error:
        raise InputError(f"{path} cannot be packed: {error.strerror}") from None


def digest_of(archive: bytes) -> str:
    """Return the SHA-256 of an archive, in hex."""
    return hashlib.sha256(archive).hexdigest()


def digest_in(address: str) -> str:
    """Return the digest in the name of an archive."""
    return PurePosixPath(address).name.removesuffix(SUFFIX)


def is_module(entry: str) -> bool:
    """Return whether an entry is a module, not a file."""
    return not entry.endswith(".py")


def check(archive: bytes, entry: str) -> None:
    """Raise InputError unless workers can unpack the archive, and it contains the entry."""
    if len(archive) > MOST_PACKED:
        raise InputError(
            f"the folder of code is packed into {len(archive) >> 20} MiB, and at most "
            f"{MOST_PACKED >> 20} MiB are possible: put data on a PVC"
        )
    names = _names(archive)
    base = entry.replace(".", "/")
    wanted = {f"{base}.py", f"{base}/__main__.py"} if is_module(entry) else {entry}
    if entry and not wanted & names:
        programs = sorted(name for name in names if name.endswith(".py"))
        near = ", ".join(programs[:5])
        raise InputError(
            f"entry={entry!r} is not in the folder of code, which has {near or 'none'}"
        )


def _names(archive: bytes) -> set[str]:
    """Return the names of the files, each of which can be created below one new folder."""
    total = 0
    names: set[str] = set()
    folders = {"", "."}
    try:
        with (
            gzip.open(io.BytesIO(archive)) as unzipped,
            tarfile.open(fileobj=unzipped, mode="r:") as opened,
        ):
            for member in opened:
                path = PurePosixPath(member.name)
                total += member.size
                if total > MOST_UNPACKED:
                    raise ValueError(f"it unpacks to more than {MOST_UNPACKED >> 20} MiB")
                if not member.isreg() or not _is_below(member.name):
                    raise ValueError(f"{member.name!r} is not a regular file below its folder")
                above = {str(folder) for folder in path.parents} - {"."}
                is_taken = member.name in names | folders
                if is_taken or above & names:
                    raise ValueError(f"{member.name!r} is in it twice, or below a file")
                names.add(member.name)
                folders |= above
            while unzipped.read(1 << 20):  # the checksum follows the last byte
                if unzipped.tell() > MOST_UNPACKED:
                    raise ValueError(f"it unpacks to more than {MOST_UNPACKED >> 20} MiB")
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        raise InputError(
            f"the archive of code cannot be used: {error}; make it with as_folder"
        ) from None
    return names


def _is_below(name: str) -> bool:
    """Return whether a name is a plain relative path, in the form that we write."""
    path = PurePosixPath(name)
    return name == str(path) and not path.is_absolute() and ".." not in path.parts
