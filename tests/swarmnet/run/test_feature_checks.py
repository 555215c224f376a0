"""How many checks of a manifest are between features: each is one more case for the reader of a run file."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from swarmnet.run import boundary_settings as boundary
from swarmnet.run import local_step_config, manifest_check, sync_methods

MOST = 35
SECTIONS = {"rounds", "paths", "data", "init_checkpoint", "lora", "experts"}
"""Each is one feature, with all of its keys."""
FLAT = {"sync", "self", "model", "manifest"}
"""Each key of these is a feature of its own."""
OF_THE_REST = {"width", "vocabulary", "layers", "cuts", "skips_stages"}
"""What `boundary.contradictions` knows of the manifest beside `model.boundary`."""


def features(condition: ast.AST) -> Iterator[str]:
    """What a row's condition reads."""
    for node in ast.walk(condition):
        if isinstance(node, ast.Name) and node.id in SECTIONS:
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in FLAT:
            yield node.attr


def rows() -> Iterator[tuple[str, set[str]]]:
    """Place and features of each (is it wrong, how to say so) of the tables."""
    for module in (manifest_check, local_step_config, sync_methods):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if (
                isinstance(node, ast.Tuple)
                and len(node.elts) == 2
                and isinstance(node.elts[1], ast.JoinedStr | ast.Constant)
            ):
                yield f"{module.__name__}:{node.lineno}", set(features(node.elts[0]))


def test_at_most_35_checks_are_between_features():
    between = {line for line, found in rows() if len(found) > 1}
    conditions = [
        {node.id for node in ast.walk(each.test) if isinstance(node, ast.Name)}
        for each in ast.walk(ast.parse(inspect.getsource(boundary)))
        if isinstance(each, ast.If)
    ]
    of_boundaries = sum(bool(names & OF_THE_REST) for names in conditions)
    assert between, "the tables are no longer read as they are written"
    assert of_boundaries, "the boundary's checks are no longer read as they are written"
    assert len(between) + of_boundaries <= MOST, sorted(between)
