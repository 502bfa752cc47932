"""Files of tests."""

from pathlib import Path

import google_crc32c


def write(path: Path, content: str | bytes = b"") -> Path:
    """Write a file in a folder that may not exist yet, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def forged(content: bytes, crc: int) -> bytes:
    """Return the content with four bytes more that give it this crc32c."""
    # The register after each of the four bytes, backwards: its highest byte names the table's row.
    tops = {row >> 24: (number, row) for number, row in enumerate(_CRC_ROWS)}
    register = crc ^ 0xFFFFFFFF
    rows = []
    for _ in range(4):
        number, row = tops[register >> 24]
        rows.append(number)
        register = (register ^ row) << 8 & 0xFFFFFFFF
    register, tail = google_crc32c.value(content) ^ 0xFFFFFFFF, bytearray()
    for number in reversed(rows):
        tail.append((register ^ number) & 0xFF)
        register = register >> 8 ^ _CRC_ROWS[number]
    return content + tail


def _crc_row(number: int) -> int:
    for _ in range(8):
        number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
    return number


_CRC_ROWS = [_crc_row(number) for number in range(256)]
