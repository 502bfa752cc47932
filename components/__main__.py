"""The program of a compiled step: KFP's executor, with a component of this package.

`_KFP_RUNTIME` spares a step the import of KFP's compiler, without which decorators do not exist.
"""

import argparse
import ast
import json
import os
from pathlib import Path
from typing import Any

os.environ["_KFP_RUNTIME"] = "true"


def function(name: str) -> Any:
    """Return the function of a component without its decorator."""
    path = Path(__file__).parent / name / "component.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    module: dict[str, Any] = {}
    exec(compile(tree, path, "exec"), module)  # noqa: S102  a file of this package
    return module[name]


if __name__ == "__main__":
    from kfp.dsl.executor import Executor

    parser = argparse.ArgumentParser()
    for option in ("--executor_input", "--function_to_execute"):
        parser.add_argument(option, required=True)
    options, _ = parser.parse_known_args()
    Executor(json.loads(options.executor_input), function(options.function_to_execute)).execute()
