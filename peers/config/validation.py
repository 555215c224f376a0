"""Validate what a person typed against a pydantic model, and report each problem in one line with its place.
`ParsedYaml` is the parsed data with the place (`file:line`) of every value. A location is the path to a
value: a tuple of keys and of positions in lists."""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from peers.config.errors import ConfigError
from peers.config.schema import element, keys, section
from peers.config.yaml_lines import Location, ParsedYaml

Model = TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], typed: ParsedYaml, context: object = None, inside: Location = ()) -> Model:
    """Return an instance of `model` with the typed values. If only a part of the model was typed, `inside` is
    the location of that part. `context` is handed to pydantic's validators.

    Raises ConfigError with one line for each problem, in the order of the lines.
    """
    wrapped: object = typed.data
    for key in reversed(inside):
        wrapped = {key: wrapped}
    try:
        return model.model_validate_json(json.dumps(wrapped), context=context)
    except ValidationError as error:
        problems: list[tuple[str, str]] = []  # Place and message of each.
        details = error.errors(include_url=False)
        for detail in details:
            if detail["type"] == "default_factory_not_called":
                continue  # Another key is invalid, which is reported separately.
            has_wrong_item = any(_is_inside(other["loc"], detail["loc"]) for other in details)
            if detail["type"] == "too_short" and has_wrong_item:
                continue  # The list only seems empty: pydantic left out the wrong items.
            location = tuple(detail["loc"][len(inside) :])
            if "key" in (detail.get("ctx") or {}):
                # A validator of a whole section has found the error; its context names the wrong key in it.
                location = (*location, *detail["ctx"]["key"].split("."))
            known_keys = _keys_at(model, tuple(detail["loc"][:-1]))
            key_name = ".".join(map(str, location)) or "file"
            problems.append((typed.place(location), f"{key_name}: {_describe(dict(detail), known_keys)}"))
        problems.sort(key=lambda problem: _line_number(problem[0]))
        raise ConfigError([f"{place}: {message}" for place, message in problems]) from None


def _is_inside(location: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    """Return whether `location` is nested in the value at `outer`."""
    return len(location) > len(outer) and location[: len(outer)] == outer


def _line_number(place: str) -> int:
    """Return the line number in `file:line`; 0 without one, so that such places come first."""
    match = re.search(r":(\d+)$", place)
    return int(match[1]) if match else 0


def did_you_mean(name: str, known: list[str]) -> str:
    """Return the end of an error message about an unknown `name`: `; did you mean 'x'?` if a known name is
    similar, else the list of known names."""
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return f"; did you mean '{close[0]}'?"
    return f"; known here: {', '.join(known)}" if known else ""


def _keys_at(model: type, location: Location) -> list[str]:
    """Return the names of the keys that the section at `location` may have; none if it is no section."""
    kind: Any = model
    for step in location:
        section_class = section(kind)
        if section_class is None:  # In a list or a map, any step leads to an item.
            kind = element(kind)
            continue
        kind = next((key.kind for key in keys(section_class) if key.name == step), None)
    section_class = section(kind)
    return [key.name for key in keys(section_class)] if section_class is not None else []


def _describe(detail: dict[str, Any], known: list[str]) -> str:
    """Return one of pydantic's errors in plain words: what is wrong and what would be right. `known` are the
    keys that are allowed at this place."""
    kind, context, given = detail["type"], detail.get("ctx") or {}, detail.get("input")
    shown = _shown(given)
    match kind:
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"unknown key{did_you_mean(str(detail['loc'][-1]), known)}"
        case "missing":
            return "is missing; it has no default"
        case "literal_error":
            return f"is {shown}; expected {context['expected']}"
        case "greater_than_equal":
            return f"is {shown}; it must be at least {context['ge']:g}"
        case "greater_than":
            return f"is {shown}; it must be more than {context['gt']:g}"
        case "less_than_equal":
            return f"is {shown}; it must be at most {context['le']:g}"
        case "too_short":
            return "is empty; expected at least one"
        case "too_long" | "string_too_long":
            return f"is too long; at most {context['max_length']}"
        case "value_error" | "refused":
            return str(context.get("error") or detail["msg"])
    if kind == "string_type" and isinstance(given, (bool, int, float)):
        return f"is {shown}; expected text: put it in quotes"
    expected = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "string_type": "text",
        "bool_type": "true or false",
        "tuple_type": "a list",
        "dict_type": "a map",
        "model_type": "a section of keys",
        "dataclass_type": "a section of keys",
        "model_attributes_type": "a section of keys",
        "finite_number": "a finite number",
        "path_type": "a path",
    }.get(kind)
    return f"is {shown}; expected {expected}" if expected else str(detail["msg"])


def _shown(value: object) -> str:
    """Return a value as an error message shows it: text cut to 60 characters, a list only by its kind."""
    if isinstance(value, str):
        return f"the text {textwrap.shorten(value, 60, placeholder='...')!r}"
    if value is None:
        return "empty"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "a section"
    return str(value).lower() if isinstance(value, bool) else str(value)
