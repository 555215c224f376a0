"""List the keys of a configuration, from the classes themselves, for errors, `config explain` and the docs.

It works on pydantic models and dataclasses: each field is a key, its annotation the key's type, and the
docstring under the field the key's meaning. A section is a class whose keys are nested below a key.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swarmnet.run.schema import MEANING

_WORDS: dict[object, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true | false",
    Path: "path",
}


@dataclass(frozen=True, slots=True)
class TypeLabel:
    """The name of a type for people; used in `Annotated`."""

    text: str


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a configuration file."""

    name: str
    kind: object
    """The annotation of the field."""
    default: str | None
    """The default as it would be written; None if the key is required."""
    meaning: str


@cache  # Parses the source of the class, and is called for every mistake in a file.
def keys(cls: type) -> tuple[Key, ...]:
    """Return the keys of a pydantic model or a dataclass, in order. Raises TypeError for another class."""
    hints = get_type_hints(cls, include_extras=True)
    meanings = _field_docstrings(cls)
    if issubclass(cls, BaseModel):
        return tuple(
            Key(name, hints[name], _default(info), meanings.get(name, ""))
            for name, info in cls.model_fields.items()
        )
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls} is neither a pydantic model nor a dataclass")
    return tuple(
        Key(
            item.name,
            hints[item.name],
            _dataclass_default(item),
            meanings.get(item.name, "") or item.metadata.get(MEANING, ""),
        )
        for item in dataclasses.fields(cls)
    )


def section(kind: object) -> type | None:
    """Return the class whose keys are written below a key of this type; None for a plain value."""
    if get_origin(kind) is Annotated:
        return section(get_args(kind)[0])
    if isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind)):
        return kind
    return None


def element(kind: object) -> object:
    """Return the type of the items of a list or of the values of a map; None for other types."""
    if get_origin(kind) is Annotated:
        return element(get_args(kind)[0])
    if get_origin(kind) in (tuple, list):
        return get_args(kind)[0]
    if get_origin(kind) is dict:
        return get_args(kind)[1]
    return None


def type_text(kind: object) -> str:
    """Return the type of a key in words: `whole number`, `list of multiaddr`, `worker | bootstrap`. A
    `TypeLabel` in the annotation replaces them."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        labels = [item.text for item in arguments[1:] if isinstance(item, TypeLabel)]
        return labels[0] if labels else type_text(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " | ".join(type_text(item) for item in arguments if item is not NoneType)
    if origin is dict:
        return f"map of name to {type_text(arguments[1])}"
    if (item := element(kind)) is not None:
        return f"list of {type_text(item)}"
    if isinstance(kind, NewType):
        return type_text(kind.__supertype__)
    if section(kind) is not None:
        return "section"
    return _WORDS.get(kind, str(kind))


def yaml_text(value: object) -> str:
    """Return a value as it would be written in YAML, on one line."""
    if isinstance(value, BaseModel) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        fields = {key.name: getattr(value, key.name) for key in keys(type(value))}
        return "{" + ", ".join(f"{name}: {yaml_text(item)}" for name, item in fields.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(yaml_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {yaml_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value == "":
        return "(empty)"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default(info: FieldInfo) -> str | None:
    """Return the default of a pydantic field as text; None if the field is required. A field may describe its
    default in words, as `default` in its `json_schema_extra`; they are returned instead of the value."""
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    if "default" in extra:
        return str(extra["default"])
    if info.is_required():
        return None
    return yaml_text(info.get_default(call_default_factory=True))


def _dataclass_default(item: dataclasses.Field[Any]) -> str | None:
    """Return the default of a dataclass field as text; None if the field is required."""
    if item.default is not dataclasses.MISSING:
        return yaml_text(item.default)
    if item.default_factory is not dataclasses.MISSING:
        return yaml_text(item.default_factory())
    return None


def _field_docstrings(cls: type) -> dict[str, str]:
    """Return the docstring of each field by the field's name. They are read from the source of the class and
    of its bases in this program, because Python does not keep them at run time."""
    docstrings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] in ("swarmnet", "protocols", "peers"):
            docstrings.update(_class_docstrings(base))
    return docstrings


def _class_docstrings(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the name and docstring of each field in the source of one class. A field's docstring is the
    string on the lines after its annotation."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    if not isinstance(body, ast.ClassDef):
        return
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            yield statement.target.id, " ".join(following.value.value.split())
