"""A user's Python file as the value of a pipeline parameter that arrives to the byte.

Text on its way to a step is an argument of a container, where Kubernetes makes one `$` of two and
expands `$(NAME)` (kubeflow/pipelines#10370), and KFP compiles no default with a line break. So a
file can travel packed, as a data URL (RFC 2397).
"""

import base64
import binascii
from pathlib import Path

from kfp_ddp.base.errors import InputError

PREFIX = "data:text/x-python;base64,"


def packed(path: str | Path) -> str:
    """The file as one line of plain characters, for the input `script` of a component."""
    return PREFIX + base64.b64encode(Path(path).read_bytes()).decode()


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
        if not script.startswith(PREFIX):
            raise ValueError(f"it does not begin with {PREFIX}")
        return base64.b64decode(script.removeprefix(PREFIX), validate=True).decode()
    except (ValueError, binascii.Error) as error:
        raise InputError(
            f"script={script[:40]!r}... is not a packed Python file in UTF-8 ({error}); "
            "make it with kfp_ddp.components.shared.launch.specification.script.packed"
        ) from None
