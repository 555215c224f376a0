"""The rules of the house, checked on the syntax trees of every module of the three packages."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    path for package in ("swarmnet", "protocols", "peers") for path in (ROOT / package).rglob("*.py")
)
EVERYTHING = MODULES + sorted((ROOT / "tests").glob("*.py"))
TEXTS = [path for folder in ("configs", "scripts", "docs", ".ci") for path in (ROOT / folder).rglob("*")
         if path.is_file()]  # fmt: skip

FILE_LINES = 400
FUNCTION_LINES = 60
SUPERVISORS = {"peers/supervisor.py"}
"""May catch Exception: they log it, count it and start again what fell."""
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


def name_of(path):
    return str(path.relative_to(ROOT))


def every(paths):
    return pytest.mark.parametrize("path", paths, ids=name_of)


def nodes(path, *kinds):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def where(path, node):
    return f"{name_of(path)}:{node.lineno}"


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


@every(EVERYTHING)
def test_a_file_fits_in_the_head(path):
    assert len(path.read_text().splitlines()) <= FILE_LINES


@every(EVERYTHING)
def test_a_function_fits_on_a_screen(path):
    functions = nodes(path, ast.FunctionDef, ast.AsyncFunctionDef)
    long = {where(path, node): node.end_lineno - node.lineno + 1 for node in functions
            if node.end_lineno - node.lineno + 1 > FUNCTION_LINES}  # fmt: skip
    assert long == {}


@every(MODULES)
def test_what_is_caught_has_a_name_or_is_raised_again_or_a_reason_stands_beside_it(path):
    lines = path.read_text().splitlines()
    broad = [
        where(path, handler)
        for handler in nodes(path, ast.ExceptHandler)
        for caught in (handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])
        if (caught is None or dotted(caught) in ("Exception", "BaseException"))
        and not (isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None)
        and "# noqa: BLE001 - " not in lines[handler.lineno - 1]
    ]
    assert broad == [] or name_of(path) in SUPERVISORS


@every(MODULES)
def test_no_star_imports_no_global_statements(path):
    stars = [node for node in nodes(path, ast.ImportFrom) if any(alias.name == "*" for alias in node.names)]
    assert [where(path, node) for node in stars + nodes(path, ast.Global)] == []


@every(MODULES)
def test_nothing_turns_data_into_code(path):
    called = [(where(path, node), dotted(node.func)) for node in nodes(path, ast.Call)]
    assert [call for call in called if call[1] in FORBIDDEN_CALLS] == []
    imported = {alias.name.split(".")[0] for node in nodes(path, ast.Import) for alias in node.names}
    imported |= {(node.module or "").split(".")[0] for node in nodes(path, ast.ImportFrom)}
    assert imported.isdisjoint(CODE_FROM_DATA)


@every(MODULES)
def test_a_module_says_what_it_is_about(path):
    assert not FORBIDDEN_NAMES.search(path.stem)
    assert ast.get_docstring(ast.parse(path.read_text()))


@every(MODULES)
def test_everything_is_annotated(path):
    bare = [
        where(path, node)
        for node in nodes(path, ast.FunctionDef, ast.AsyncFunctionDef)
        if node.returns is None
        or any(
            argument.annotation is None
            for argument in node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if argument.arg not in ("self", "cls")
        )
    ]
    assert bare == []


@every([path for path in MODULES if path.parts[-2] == "swarmnet"])
def test_the_core_has_no_mutable_state_of_its_own(path):
    assigned = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign | ast.AnnAssign)
    ]
    mutable = [where(path, node) for node in assigned if isinstance(node.value, ast.List | ast.Dict | ast.Set)
               and not _is_constant(node)]  # fmt: skip
    assert mutable == []


def _is_constant(assignment):
    target = assignment.target if isinstance(assignment, ast.AnnAssign) else assignment.targets[0]
    return isinstance(target, ast.Name) and (target.id.isupper() or target.id == "__all__")


@every(EVERYTHING + TEXTS)
def test_no_path_of_somebodys_machine(path):
    found = [line for line in path.read_text().splitlines() if MACHINE_PATHS.search(line)]
    assert found == [] or path == Path(__file__)
