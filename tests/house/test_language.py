"""The language of code and pages: standard terms, sentences with a subject, one meaning per class name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from syntax import MODULES, ROOT, tree_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = {"docs/configuration.md", "docs/events.md", "docs/metrics.md", "docs/watching.md"}
"""Pages whose long lines are written from the code."""
PAGE_COLUMNS = 100
PAGE_WORDS = 70_000
"""A reader of all pages needs about five hours for as many words."""
WITHOUT_SUBJECT = re.compile(
    r"(Of|That|As|Whoever|Who|So|Where|Whose|With what|By|Beside|Apart|Than|Times)\b"
)
FORMER_NAMES = re.compile(
    r"(told|tells?|said|says?|spoken|hears?|heard|moved|moves|makers?|allies|ally|company|obedience|hearing|"
    r"offers|noted|wish|quest|trouble|sightings|presence|giving|loudest|crowds?|most_\w+|least_\w+)"
)
"""Names of functions and classes that had several meanings each, or none to a newcomer."""
OF_PROTOCOLS = {("peers/data/files.py", "tell")}
"""Methods that a protocol of the standard library names: `tell` of a file."""
FORMER_KEYS = re.compile(
    r"\b(target_tokens|longest_seconds|settle_seconds|snapshot_rounds|whole_rounds|whole_share|head_width|"
    r"norm_epsilon|initial_deviation|branch_share|sequence_tokens|microbatch_sequences|hidden_codec|"
    r"feedback_decay|step_tokens|outer_rate|sparse_kept|shadow_steps|final_ratio|expert_rate|work_share|"
    r"peak_operations|text_limit|demo-votes|demo-float)\b"
)
"""Keys and values of run and peer files under their former names, which nothing accepts any more."""


def trees() -> list[tuple[str, ast.Module]]:
    return [(str(path.relative_to(ROOT)), tree_of(path)) for path in MODULES]


def docstrings(tree: ast.Module) -> list[tuple[int, str]]:
    """Strings that stand alone: docstrings of modules, classes, functions and attributes, with their line."""
    return [
        (node.lineno, node.value.value.strip())
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def test_every_docstring_begins_with_its_subject_or_verb() -> None:
    broken = [
        f"{name}:{line}: {text.splitlines()[0]}"
        for name, tree in trees()
        for line, text in docstrings(tree)
        if WITHOUT_SUBJECT.match(text)
    ]
    assert not broken, "write what it does or holds, with a subject or a verb first:\n" + "\n".join(broken)


def test_former_names_of_functions_and_classes_do_not_come_back() -> None:
    broken = [
        f"{name}:{node.lineno}: {node.name}"
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and (name, node.name) not in OF_PROTOCOLS
        and FORMER_NAMES.fullmatch(node.name.strip("_").lower())
    ]
    assert not broken, "use a verb and its object, in the words of the field:\n" + "\n".join(broken)


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{name}:{node.lineno}")
    doubled = {name: found for name, found in places.items() if len(found) > 1}
    assert not doubled, f"rename all but one of each: {doubled}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_wrapped_and_name_keys_that_exist(path: Path) -> None:
    name, in_code, broken = str(path.relative_to(ROOT)), False, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        if found := FORMER_KEYS.search(line):
            broken.append(f"{name}:{number}: `{found[0]}` has another name now")
        is_prose = not in_code and not line.startswith(("|", "#", "    ", "!", "<", "   `", "   |"))
        if is_prose and len(line) > PAGE_COLUMNS and name not in GENERATED:
            broken.append(f"{name}:{number}: {len(line)} columns, {PAGE_COLUMNS} are allowed")
    assert not broken, "\n".join(broken)


def test_all_pages_together_stay_short() -> None:
    words = sum(len(path.read_text().split()) for path in PAGES)
    assert words <= PAGE_WORDS, f"{words:,} words: shorten a page, or link instead of repeating"
