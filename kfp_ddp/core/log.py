"""The logger of the package: a line is printed as it is, at once, unless the level is raised.

`logging.getLogger("kfp_ddp").setLevel("WARNING")` silences a notebook.
"""

import logging


class _Printer(logging.Handler):
    """Print each line to what stdout is now; raise OSError if that cannot be written."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            text = f"warning: {text}"
        print(text, flush=True)


log = logging.getLogger(__name__.partition(".")[0])
log.setLevel(logging.INFO)
log.addHandler(_Printer())
log.propagate = False  # KFP's executor would print each line again
