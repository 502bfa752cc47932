"""The pages of documentation and their commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^ *```(\w+)\n(.*?)^ *```", re.S | re.M)
INLINE = re.compile(r"`(kfp-ddp [^`]+)`")
SETTINGS_FILE = re.compile(r"<!-- settings file: (\S+) -->\n```yaml\n(.*?)```", re.S)


def fences(page: Path, language: str) -> Iterator[str]:
    return (text for kind, text in FENCE.findall(page.read_text()) if kind == language)


def typed(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command in a console block; continued lines are one command."""
    for block in fences(page, "console"):
        for line in re.sub(r"\\\n *", "", block).splitlines():
            if line.startswith("$ "):
                yield from _single(line[2:])


def commands(page: Path) -> Iterator[list[str]]:
    """Yield these and the commands in the text."""
    yield from typed(page)
    for text in INLINE.findall(page.read_text()):
        yield shlex.split(text, comments=True)


def _single(line: str) -> Iterator[list[str]]:
    """Yield the commands of a line, which && and | separate."""
    words: list[str] = []
    for word in shlex.split(line.replace("…", "x"), comments=True):
        if word in ("&&", "|", "||", "&"):
            yield words
            words = []
        else:
            words.append(word)
    yield words


def of_ours(words: list[str]) -> list[str] | None:
    """Return the words after kfp-ddp; None for another program."""
    return words[1:] if words and words[0] == "kfp-ddp" else None
