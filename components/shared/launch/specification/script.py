"""A user's Python file as the value of a pipeline parameter that arrives to the byte.

Text on its way to a step is an argument of a container, where Kubernetes makes one `$` of two and
expands `$(NAME)` (kubeflow/pipelines#10370), and KFP compiles no default with a line break. So a
file can travel packed, as a data URL (RFC 2397).
"""

from pathlib import Path

from kfp_ddp.base import packed as packing
from kfp_ddp.base.errors import InputError
from kfp_ddp.base.packed import PREFIX

__all__ = ["PREFIX", "packed", "unexpanded", "unpacked"]


def packed(path: str | Path) -> str:
    """The file as one line of plain characters, for the input `script` of a component."""
    return packing.pack(Path(path).read_bytes())


def unexpanded(text: str) -> str:
    """Text that Kubernetes leaves as it was, in an argument or a variable of a container.

    It expands $(NAME) there, and makes $$ one $.
    """
    return text.replace("$", "$$")


def unpacked(script: str) -> str:
    """The text of a file that `packed` made; any other text as it is.

    Raises:
        InputError: for a data URL of another kind, or one that was cut.
    """
    if not script.startswith("data:"):
        return script
    try:
        return packing.unpack(script)
    except ValueError as error:
        raise InputError(
            f"script={script[:40]!r}... is not a packed Python file in UTF-8 ({error}); "
            "make it with kfp_ddp.components.shared.launch.specification.script.packed"
        ) from None
