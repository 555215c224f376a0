"""The rules of the house, checked on the syntax trees of every module of the three packages.

What breaks a rule fails with its row of docs/contributing.md, which says why and what to do, and each place.
"""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from syntax import MODULES, ROOT, nodes_of, text_of, tree_of

EVERYTHING = MODULES + sorted(path for name in ("tests", "scripts") for path in (ROOT / name).rglob("*.py"))
TEXTS = [
    path
    for folder in ("configs", "scripts", "docs", ".ci")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and path.suffix not in (".png", ".pyc")
]

FILE_LINES = 600
FOLDER_FILES = 16
FUNCTION_LINES = 80
CODE_FROM_DATA = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "yaml.load",
    "pickle.load",
    "pickle.loads",
}
FORBIDDEN_NAMES = re.compile(r"(^|_)(utils?|helpers?|managers?|common|base|misc|mixins?)(_|$)")
MACHINE_PATHS = re.compile(r"(?<![\w.])/(work|home|root|Users)/\w")

PAGE = ROOT / "docs/contributing.md"


@cache
def rules():
    """By name, the sentence of each rule, with its reason and what to do."""
    return dict(
        re.findall(r"^\| (\w+) \| ([^|]+, because [^|]+: [^|]+\.) \|$", PAGE.read_text(), re.MULTILINE)
    )


def keep(rule, broken):
    """Fail with the rule and every place that breaks it."""
    if broken:
        pytest.fail("\n".join([rules()[rule], *(f"    {place}" for place in broken)]), pytrace=False)


def name_of(path):
    return str(path.relative_to(ROOT))


def found(paths, *kinds):
    """(path, node) of every node of these kinds."""
    return [(path, node) for path in paths for kind in kinds for node in nodes_of(path).get(kind, [])]


def where(path, node):
    return f"{name_of(path)}:{node.lineno}"


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def test_there_is_something_to_check():
    assert len(MODULES) > 20
    assert len(TEXTS) > 10


def test_a_file_fits_in_the_head():
    lines = {name_of(path): len(text_of(path).splitlines()) for path in EVERYTHING}
    keep("file", [f"{name}: {count} lines" for name, count in lines.items() if count > FILE_LINES])


def test_a_decision_has_60_lines_at_most_and_the_lessons_150():
    most = dict.fromkeys((ROOT / "docs" / "decisions").glob("*.md"), 60) | {ROOT / "docs" / "lessons.md": 150}
    too_long = [name_of(path) for path, lines in most.items() if len(path.read_text().splitlines()) > lines]
    assert not too_long, "shorten what stands there, or drop what nobody needs any more"


def test_a_folder_fits_in_the_head():
    files = Counter(name_of(path.parent) for path in EVERYTHING if path.name != "__init__.py")
    keep("folder", [f"{name}: {count} files" for name, count in files.items() if count > FOLDER_FILES])


def test_every_room_stands_in_the_design_with_what_it_is():
    page = (ROOT / "docs/design.md").read_text()
    rooms = {path.parent for path in MODULES if path.name != "__init__.py" and path.parent.parent != ROOT}
    says = {room: ast.get_docstring(tree_of(room / "__init__.py")) for room in rooms}
    rows = {room: f"| `{name_of(room)}/` | {says[room]} |" for room in rooms}
    assert [row for row in rows.values() if row not in page] == []


def test_a_function_fits_on_a_screen():
    functions = found(EVERYTHING, ast.FunctionDef, ast.AsyncFunctionDef)
    lines = {where(path, node): node.end_lineno - node.lineno + 1 for path, node in functions}
    keep("function", [f"{place}: {count} lines" for place, count in lines.items() if count > FUNCTION_LINES])


def test_what_is_caught_has_a_name_or_is_raised_again_or_a_reason_stands_beside_it():
    broad = [
        where(path, handler)
        for path, handler in found(MODULES, ast.ExceptHandler)
        for caught in (handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])
        if (caught is None or dotted(caught) in ("Exception", "BaseException"))
        and not (isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None)
        and "# noqa: BLE001 - " not in text_of(path).splitlines()[handler.lineno - 1]
    ]
    keep("except", broad)


def test_no_star_imports_and_no_global_statements():
    stars = [
        (path, node)
        for path, node in found(EVERYTHING, ast.ImportFrom)
        if any(alias.name == "*" for alias in node.names)
    ]
    keep("star", [where(path, node) for path, node in stars + found(EVERYTHING, ast.Global)])


def test_nothing_turns_data_into_code():
    calls = [(where(path, node), dotted(node.func)) for path, node in found(MODULES, ast.Call)]
    keep("code", [f"{place}: {called}" for place, called in calls if called in FORBIDDEN_CALLS])
    imported = [
        (where(path, node), name.partition(".")[0])
        for path, node in found(MODULES, ast.Import, ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [it.name for it in node.names]
        )
    ]
    keep("code", [f"{place}: import {name}" for place, name in imported if name in CODE_FROM_DATA])


def test_a_module_is_named_for_what_it_is_and_says_so():
    keep("name", [name_of(path) for path in MODULES if FORBIDDEN_NAMES.search(path.stem)])
    keep("docstring", [name_of(path) for path in MODULES if not ast.get_docstring(tree_of(path))])


def test_everything_is_annotated():
    bare = [
        where(path, node)
        for path, node in found(MODULES, ast.FunctionDef, ast.AsyncFunctionDef)
        if node.returns is None
        or any(
            argument.annotation is None
            for argument in node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if argument.arg not in ("self", "cls")
        )
    ]
    keep("annotation", bare)


def test_the_core_has_no_variables_of_its_own():
    mutable = [
        where(path, node)
        for path in MODULES
        if path.is_relative_to(ROOT / "swarmnet")
        for node in tree_of(path).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.List | ast.Dict | ast.Set)
        and not _is_constant(node)
    ]
    keep("state", mutable)


def _is_constant(assignment):
    target = assignment.target if isinstance(assignment, ast.AnnAssign) else assignment.targets[0]
    return isinstance(target, ast.Name) and (target.id.strip("_").isupper() or target.id == "__all__")


def test_an_extra_is_installed_from_this_checkout():
    named = re.compile(r"swarmnet\[[a-z]")
    paths = [path for path in EVERYTHING + TEXTS if path != Path(__file__)]
    keep("extra", [name_of(path) for path in paths if named.search(text_of(path))])


def test_no_path_of_somebodys_machine():
    lines = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in EVERYTHING + TEXTS
        if path != Path(__file__)
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    keep("path", lines)


def test_every_rule_stands_on_the_page_with_its_reason_and_what_to_do():
    kept = {
        node.args[0].value
        for node in ast.walk(tree_of(Path(__file__)))
        if isinstance(node, ast.Call) and dotted(node.func) == "keep"
    }
    rows = re.findall(r"^\| (\w+) \| (?!what, why)", PAGE.read_text(), re.MULTILINE)
    assert set(rows) == kept, (
        "each rule of this file is a row of docs/contributing.md, and the other way round"
    )
    assert rules().keys() == kept, "a row reads: what, because why: what to do."
    assert f"at most {FILE_LINES} lines" in rules()["file"]
    assert f"at most {FUNCTION_LINES} lines" in rules()["function"]
    assert f"at most {FOLDER_FILES} files" in rules()["folder"]


def test_every_file_that_the_page_names_is_there():
    named = set(re.findall(r"(?:swarmnet|protocols|peers|scripts|tests)/[\w/.]*\w", PAGE.read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
