from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.script import PREFIX, packed, unpacked


def test_a_packed_file_is_one_plain_line_and_comes_back_to_the_byte(tmp_path: Path) -> None:
    text = "print('∑ $$ $(A) \\n')\r\n\t# no newline at the end"
    file = tmp_path / "train.py"
    file.write_bytes(text.encode())
    line = packed(file)
    assert not set(line) & set("$\n\"'\\{}")
    assert unpacked(line) == text


def test_text_that_is_not_packed_stays_as_it_is() -> None:
    assert unpacked("print('$$')") == "print('$$')"


@pytest.mark.parametrize("bad", ["data:,x", PREFIX + "=", PREFIX + "a$b=", PREFIX + "//79"])
def test_an_invalid_packed_file_is_an_input_error(bad: str) -> None:
    with pytest.raises(InputError, match="not a packed Python file"):
        unpacked(bad)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be packed: .*No such file or directory.*; give a Python file in UTF-8"),
        (b"# \xe9", "cannot be packed: .*can't decode byte 0xe9.*; give a Python file in UTF-8"),
        (b"print(0)\0", "contains a NUL"),
        (b"#" * 100_000, "is packed into 133,362 bytes, .* at most 120,000"),
    ],
    ids=["missing", "latin-1", "NUL", "large"],
)
def test_an_unpackable_file_is_refused(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "train.py"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=says):
        packed(file)
