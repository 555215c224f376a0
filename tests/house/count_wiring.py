"""Count how the objects of the product are wired, to compare before and after a change.

.venv/bin/python tests/house/count_wiring.py [ROOT]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

PACKAGES = ("swarmnet", "protocols", "peers")
PATHS = ("peers/worker/pipeline/pipeline_service.py", "peers/worker/rounds/round_service.py")
"""The two services that carry microbatches and contributions."""
WORKER = "peers/worker/worker.py"


def modules(root: Path) -> dict[str, ast.Module]:
    """Return path relative to `root` -> syntax tree, of every module of the product."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            found[path.relative_to(root).as_posix()] = ast.parse(path.read_text())
    return found


def classes(trees: dict[str, ast.Module]) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield each class with the path of its module."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield path, node


def constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    """Return the `__init__` that a class writes itself, or None."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return item
    return None


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that a class's methods assign on `self`."""
    names = set()
    for item in ast.walk(node):
        targets: list[ast.expr] = []
        if isinstance(item, ast.Assign):
            targets = item.targets
        elif isinstance(item, (ast.AnnAssign, ast.AugAssign)):
            targets = [item.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                    names.add(part.attr)
    return names


def none_tests(tree: ast.Module) -> Iterator[str]:
    """Yield the attributes of `self` that a module compares with None."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            right, left = node.comparators[0], ast.unparse(node.left)
            if isinstance(right, ast.Constant) and right.value is None and left.startswith("self."):
                yield left


def imported(tree: ast.Module) -> set[str]:
    """Return the product's modules that a module imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            names.add(node.module)
    return names


def first_six(counted: list[tuple[int, str]]) -> str:
    """Return the first six counts as text."""
    return "; ".join(f"{count} {name}" for count, name in counted[:6])


def main(root: Path) -> None:
    """Print the counts."""
    trees = modules(root)
    written = [(path, node, init) for path, node in classes(trees) if (init := constructor(node)) is not None]
    positional = {f"{node.name} ({path})": len(init.args.args) - 1 for path, node, init in written}
    print(f"constructors: {len(positional)}, median {median(positional.values()):g} positional arguments")
    over = sorted(((count, name) for name, count in positional.items() if count > 3), reverse=True)
    print(f"  over three positional: {len(over)}; most: {first_six(over)}")
    sized = [(len(attributes(node)), f"{node.name} ({path})") for path, node in classes(trees)]
    print(f"attributes of the six largest classes: {first_six(sorted(sized, reverse=True))}")
    in_worker = [tree for path, tree in trees.items() if path.startswith("peers/worker/")]
    tests = sum(len(list(none_tests(tree))) for tree in in_worker)
    print(f"`self.X is None` and `is not None` in peers/worker: {tests}")
    for path in PATHS:
        print(f"  of these in {path}: {len(list(none_tests(trees[path])))}")
    print(f"modules that {WORKER} imports: {len(imported(trees[WORKER]))}")
    text = "".join((root / path).read_text() for path in trees)
    print(f"`# fmt: skip`: {len(re.findall(r'# fmt: skip', text))}")
    several = sum(
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
        and all(isinstance(each, ast.Attribute) for each in node.targets[0].elts)
        for tree in trees.values() for node in ast.walk(tree)
    )  # fmt: skip
    print(f"assignments to several attributes at once: {several}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd())
