"""`python -m benchmarks NAME [--json]`: ours and each peer in turn, several rounds interleaved.

NAME is a module here with `run() -> dict[str, float]`, which prints a table and returns figures:
ratios > 1 where ours is faster, other units in the figure's name.
"""

import argparse
import importlib
import json
import pkgutil
from pathlib import Path

from benchmarks.rounds import machine

NAMES = sorted(
    module.name
    for module in pkgutil.iter_modules([str(Path(__file__).parent)])
    if not module.ispkg and module.name not in ("__main__", "rounds")
)


def main() -> None:
    """Run one benchmark and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    figures = importlib.import_module(f"benchmarks.{arguments.name}").run()
    for name, value in figures.items():
        print(f"{name:40} {value:10.3f}")
    if arguments.json:
        rounded = {name: round(value, 4) for name, value in figures.items()}
        line = {"benchmark": arguments.name, "machine": machine(), "figures": rounded}
        print(json.dumps(line))


if __name__ == "__main__":
    main()
