from pathlib import Path

import pytest

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.shared.launch.specification.script import PREFIX, packed, unpacked


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
def test_what_is_no_packed_file_is_one_line(bad: str) -> None:
    with pytest.raises(InputError, match="not a packed Python file") as error:
        unpacked(bad)
    assert "\n" not in str(error.value)
