"""What a reader must take apart: the folds that CONTRIBUTING.md shows, counted in the product."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_DECISIONS = 19
"""Of one function."""
AT_MOST = {"pairs": 6, "texts times a truth": 0, "dense lines": 52}
"""How many there are. Lower a number when it falls; never raise one to land a change."""
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)


def trees() -> Iterator[tuple[str, ast.Module]]:
    for room in ("components", "kfp_ddp", "pipelines", "training"):
        for path in (ROOT / room).rglob("*.py"):
            linked = any(part.is_symlink() for part in path.parents)
            if not linked and "tests" not in path.parts:
                yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def decisions_of(node: ast.AST) -> int:
    """Return the decisions of a node, without those of the nodes in it."""
    if isinstance(node, BRANCHES):
        return 1
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    return 1 + len(node.ifs) if isinstance(node, ast.comprehension) else 0


def line_of(node: ast.AST) -> int:
    """Return the line of a node; a comprehension and a case have that of their target."""
    place = getattr(node, "target", None) or getattr(node, "pattern", None) or node
    return getattr(node, "lineno", 0) or getattr(place, "lineno", 0)


def is_pair(node: ast.AST) -> bool:
    """Return whether several values get several names in one statement."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def is_text_times_truth(node: ast.AST) -> bool:
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    sides = (node.left, node.right)
    return any(map(is_text, sides)) and any(map(is_truth, sides))


def is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, ast.List | ast.ListComp | ast.Tuple | ast.JoinedStr)


def is_truth(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "bool"
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Compare | ast.BoolOp)


def folds(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the kind and the line of each fold of a file."""
    lines: Counter[int] = Counter()
    for node in ast.walk(tree):
        lines[line_of(node)] += decisions_of(node)
        if is_pair(node):
            yield "pairs", line_of(node)
        if is_text_times_truth(node):
            yield "texts times a truth", line_of(node)
    yield from (("dense lines", line) for line, count in lines.items() if count >= 3)


def test_no_function_has_twenty_decisions() -> None:
    functions = {
        f"{path}:{node.lineno} {node.name}": sum(map(decisions_of, ast.walk(node)))
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(functions) > 3000
    assert {name: count for name, count in functions.items() if count > MOST_DECISIONS} == {}


def test_there_are_no_new_folds() -> None:
    places: dict[str, list[str]] = {kind: [] for kind in AT_MOST}
    for path, tree in trees():
        for kind, line in folds(tree):
            places[kind].append(f"{path}:{line}")
    for kind, most in AT_MOST.items():
        assert len(places[kind]) <= most, "\n".join(places[kind])


def test_each_fold_is_seen() -> None:
    text = "a, b = 1, 2\nc = [a] * bool(b)\nd = a if b and a else b if a else c\ne, f = c\n"
    assert sorted(folds(ast.parse(text))) == [
        ("dense lines", 3),
        ("pairs", 1),
        ("texts times a truth", 2),
    ]
