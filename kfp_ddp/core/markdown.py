"""Text of others in Markdown and on a terminal, where it can be nothing but text."""


def cell(text: str) -> str:
    """`text` as it stands in a Markdown table, whatever it holds."""
    marked = (f"&#{ord(c)};" if c in "&\\`*_[]|<>" else c for c in text)
    return printable(" ".join("".join(marked).split()))


def code(text: str) -> str:
    """`text` as it stands between two backticks, which it cannot end."""
    return printable(text).replace("`", "'")


def printable(text: str) -> str:
    """`text` in one line, with an escape for what would move the cursor or turn the writing."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
