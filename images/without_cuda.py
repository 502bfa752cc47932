"""Let a torch that was built for CUDA be installed and start without CUDA's libraries.

On Linux the default index has torch for CUDA alone. It is linked with libraries of 3 GB that a
machine without an NVIDIA GPU never calls into, but that have to be there, with their symbols, when
it starts. So `make install CPU=1` takes two steps:

    python without_cuda.py requirements.lock   prints the lock without them, and without triton
    python without_cuda.py                     puts a file of some pages in the place of each

Such a file has the names of the functions and no code: who calls one ends with a segfault.
"""

import re
import struct
import sys
import sysconfig
from pathlib import Path

SHARED, DYNAMIC, DYNSYM, VERSIONS = 3, 6, 11, 0x6FFFFFFE  # e_type, and kinds of sections
LOAD, PT_DYNAMIC, STACK, READ_WRITE = 1, 2, 0x6474E551, 6
NEEDED, HASH, STRTAB, SYMTAB, STRSZ, SYMENT, SONAME = 1, 4, 5, 6, 10, 11, 14
VERSYM, VERDEF, VERDEFNUM = 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFD
DROPPED = re.compile(r"nvidia-|cuda-|triton==")
KEPT = re.compile(r"nvidia-cuda-(runtime|cupti)|nvidia-cufile")  # called at the start, and small
CUDA = ("cublas", "cudnn", "cufft", "cusolver", "cusparse", "nccl", "nvrtc", "nvshmem")


def small(lock: str) -> str:
    """A lock without the entries of what a machine without an NVIDIA GPU does not need."""
    entries = re.split(r"^(?=[\w])", lock, flags=re.MULTILINE)
    return "".join(one for one in entries if KEPT.match(one) or not DROPPED.match(one))


def replace() -> None:
    """Write to torch/lib what the installed torch needs and lacks, which on a Mac is nothing."""
    if sys.platform != "linux":
        return
    site = Path(sysconfig.get_path("purelib"))
    libraries = [path.read_bytes() for path in sorted((site / "torch" / "lib").glob("*.so"))]
    wanted, names = dict[str, str](), set[str]()
    for library in libraries:
        needed, undefined = linked(library)
        wanted |= {name: needed[name] for name in needed if name[3:].startswith(CUDA)}
        names |= {name for name in undefined if name.startswith(CUDA)}
    there = {path.name for path in (site / "nvidia").glob("*/lib/*.so*")}
    (machine,) = struct.unpack_from("<H", libraries[0], 18)
    for name in wanted.keys() - there:
        content = shell(name, wanted[name], sorted(names), machine)
        (site / "torch" / "lib" / name).write_bytes(content)


def linked(content: bytes) -> tuple[dict[str, str], list[str]]:
    """What a shared library of 64 bits needs and does not define.

    Returns:
        Libraries, with the version of their symbols that is asked for, as a rule their own name;
        and symbols.
    """
    (start,) = struct.unpack_from("<Q", content, 40)
    size, count = struct.unpack_from("<HH", content, 58)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", content, start + size * at) for at in range(count)
    ]

    def text(section: int, at: int) -> str:
        begin = sections[section][4] + at
        return content[begin : content.index(b"\0", begin)].decode()

    needed, undefined = dict[str, str](), list[str]()
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind == DYNAMIC:
            entries = struct.iter_unpack("<QQ", content[offset : offset + length])
            found = [text(link, value) for tag, value in entries if tag == NEEDED]
            needed = {name: name for name in found} | needed
        elif kind == DYNSYM:
            symbols = struct.iter_unpack("<IBBHQQ", content[offset : offset + length])
            undefined += [text(link, symbol[0]) for symbol in symbols if symbol[3] == 0]
        elif kind == VERSIONS:
            step = 1
            while step:
                _, _, file, aside, step = struct.unpack_from("<HHIII", content, offset)
                (version,) = struct.unpack_from("<I", content, offset + aside + 8)
                needed[text(link, file)] = text(link, version)
                offset += step
    return needed, undefined


def shell(soname: str, version: str, names: list[str], machine: int) -> bytes:
    """A shared library of this name that defines functions of these names, and holds none."""
    strings, places = bytearray(b"\0"), list[int]()
    for name in (*names, version, soname):
        places.append(len(strings))
        strings += name.encode() + b"\0"
    symbols, buckets, chains = bytearray(24), [0] * 1024, [0]
    for number, (name, place) in enumerate(zip(names, places, strict=False), start=1):
        symbols += struct.pack("<IBBHQQ", place, 0x12, 0, 1, 64, 0)
        bucket = _hash(name) % len(buckets)
        chains.append(buckets[bucket])
        buckets[bucket] = number
    numbers = (len(buckets), len(chains), *buckets, *chains)
    versions = b"".join(
        struct.pack("<HHHHIIIII", 1, base, index, 1, _hash(name), 20, following, places[-index], 0)
        for name, base, index, following in ((soname, 1, 1, 28), (version, 0, 2, 0))
    )
    contents = {
        SYMTAB: bytes(symbols),
        HASH: struct.pack(f"<{len(numbers)}I", *numbers),
        VERDEF: versions,
        VERSYM: struct.pack(f"<{len(chains)}H", 0, *[2] * len(names)),
        STRTAB: bytes(strings),
    }
    numbered = {SONAME: places[-1], STRSZ: len(strings), SYMENT: 24, VERDEFNUM: 2}
    at_dynamic = 64 + 3 * 56
    size = at_dynamic + 16 * (len(contents) + len(numbered) + 1)
    body = b""
    for tag, content in contents.items():
        numbered[tag] = size + len(body)
        body += content + bytes(-len(content) % 8)
    dynamic = b"".join(struct.pack("<QQ", tag, value) for tag, value in {**numbered, 0: 0}.items())
    segments = b"".join(
        struct.pack("<IIQQQQQQ", kind, READ_WRITE, begin, begin, begin, length, length, align)
        for kind, begin, length, align in (
            (LOAD, 0, size + len(body), 0x10000),
            (PT_DYNAMIC, at_dynamic, len(dynamic), 8),
            (STACK, 0, 0, 16),
        )
    )
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = struct.pack("<HHIQQQIHHHHHH", SHARED, machine, 1, 0, 64, 0, 0, 64, 56, 3, 0, 0, 0)
    return ident + header + segments + dynamic + body


def _hash(name: str) -> int:
    """The hash function of the System V ABI."""
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ high >> 24) & ~high
    return value


if __name__ == "__main__":
    if sys.argv[1:]:
        print(small(Path(sys.argv[1]).read_text()), end="")
    else:
        replace()
