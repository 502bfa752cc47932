"""The pipelines of a Python file of somebody's own."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from kfp.dsl.graph_component import GraphComponent

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.text import one_line


def pipelines_of(file: Path) -> dict[str, Any]:
    """The pipelines that a file defines, by the names of their functions; it is run.

    Raises:
        InputError: it is no Python, raises, or defines none; one line.
    """
    name = f"kfp_ddp_own_{file.stem}"
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise InputError(f"{file} is no Python file: give one that ends in .py")
    module = importlib.util.module_from_spec(module_spec)
    # As where Python runs the file: what stands beside it can be imported.
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except KfpDdpError as error:
        raise InputError(f"{_place(file, error)}: {error}") from error
    except (Exception, SystemExit) as error:
        said = error.msg if isinstance(error, SyntaxError) else one_line(error)
        raise InputError(f"{_place(file, error)}: {type(error).__name__}: {said}") from error
    finally:
        sys.path.pop(0)
    found = {
        each: value
        for each, value in vars(module).items()
        if isinstance(value, GraphComponent) and value.pipeline_func.__module__ == name
    }
    if not found:
        raise InputError(f"{file} defines no pipeline: decorate a function with @dsl.pipeline")
    return found


def _place(file: Path, error: BaseException) -> str:
    """The file, and the line in it that came to the error."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{file}, line {line}" if line else str(file)
