"""The pages of documentation, and what they tell a reader to type."""

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
    """The words of each command that a reader is to type, continued lines as one, no comments."""
    for block in fences(page, "console"):
        for line in re.sub(r"\\\n *", "", block).splitlines():
            if line.startswith("$ "):
                yield from _single(line[2:])


def commands(page: Path) -> Iterator[list[str]]:
    """These, and what stands in the text."""
    yield from typed(page)
    for text in INLINE.findall(page.read_text()):
        yield shlex.split(text, comments=True)


def _single(line: str) -> Iterator[list[str]]:
    """The commands of a line that && and | join."""
    words: list[str] = []
    for word in shlex.split(line.replace("…", "x"), comments=True):
        if word in ("&&", "|", "||", "&"):
            yield words
            words = []
        else:
            words.append(word)
    yield words


def of_ours(words: list[str]) -> list[str] | None:
    """What follows kfp-ddp; None for another program."""
    return words[1:] if words and words[0] == "kfp-ddp" else None
