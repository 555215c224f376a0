"""The modules of the product, each read and parsed once for all rules of tests/house."""

import ast
import gc
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for name in ("swarmnet", "protocols", "peers") for path in (ROOT / name).rglob("*.py"))


@cache
def text_of(path):
    return path.read_text()


@cache
def tree_of(path):
    """The tree of a module. It stays, and has no cycles: looking through all of them for garbage would take
    more time than parsing does."""
    gc.disable()
    try:
        tree = ast.parse(text_of(path))
        gc.freeze()
    finally:
        gc.enable()
    return tree


@cache
def nodes_of(path):
    """By kind, the nodes of a module: one walk through its tree serves every rule."""
    by_kind = defaultdict(list)
    for node in ast.walk(tree_of(path)):
        by_kind[type(node)].append(node)
    return dict(by_kind)
