"""Read YAML 1.2 and remember the line of every value, so that every error can name it.

Only plain data is accepted: no tags, no aliases, only text as keys. Values are validated elsewhere
(`validation.py`). `origin` is the name of the file or option that errors name; a place is `origin:line`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent, Event
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.parser import Parser

from peers.config.errors import ConfigError

Location = tuple[str | int, ...]
"""Path to a value: keys, and positions in lists."""

FILE_LIMIT = 64 * 1024
"""Maximum bytes of a configuration file. Files that people write are a tenth of it; the parser needs a second
for it."""
MAX_LEVELS = 32
"""Maximum nesting of values. Our files have up to four levels. Each level costs the parser time at every
word: 3 kB of open brackets took 18 s."""

MAX_INTEGER = 2**64 - 1
"""Largest integer in a configuration: seeds and counts have at most 64 bits."""

_CORE = "tag:yaml.org,2002:"


@dataclass(slots=True)
class ParsedYaml:
    """What a person wrote: plain data, and for every value the place it came from (`file:line`)."""

    origin: str
    """Name of the source, for errors without a known line."""
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[Location, str] = field(default_factory=dict)

    def place(self, location: Location) -> str:
        """Return where the value at `location` was written. If that is unknown, return the place of the
        innermost section around it, or `origin`."""
        for length in range(len(location), -1, -1):
            if (known := self.places.get(location[:length])) is not None:
                return known
        return self.origin

    def put(self, location: tuple[str, ...], value: object, place: str) -> None:
        """Set one value that is not from the file, such as that of an option. Missing sections around the
        value are created; a plain value where a section must be is replaced."""
        section = self.data
        for depth, key in enumerate(location[:-1], 1):
            if not isinstance(section.get(key), dict):
                section[key] = {}
                self.places[location[:depth]] = place
            section = section[key]
        section[location[-1]] = value
        self.places[location] = place


def read(path: Path) -> ParsedYaml:
    """Return the mapping in a YAML file, with the place of every value. Raises ConfigError with a line."""
    try:
        raw = path.read_bytes()[: FILE_LIMIT + 1]
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except IsADirectoryError:
        raise ConfigError([f"{path}: is a folder; expected a YAML file"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    if len(raw) > FILE_LIMIT:
        raise ConfigError([f"{path}: is longer than {FILE_LIMIT} bytes; that is no configuration file"])
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{path}:{line}: is not UTF-8 text"]) from None
    return parse(text, str(path))


def parse(text: str, origin: str) -> ParsedYaml:
    """Return the mapping in the YAML `text`, with the place of every value. Raises ConfigError."""
    root = _compose(text, origin)
    if root is None:
        raise ConfigError([f"{origin}:1: is empty; expected `key: value` lines"])
    if not isinstance(root, MappingNode):
        raise ConfigError([f"{origin}:{_line_number(root)}: is not a mapping; expected `key: value` lines"])
    typed = ParsedYaml(origin, places={(): f"{origin}:1"})
    reader = _Reader(origin=origin, places=typed.places)
    typed.data = reader.mapping(root, ())
    if reader.problems:
        raise ConfigError(reader.problems)
    return typed


def span(text: str, origin: str, key: str) -> tuple[int, int] | None:
    """Return where in `text` the value of a top-level key starts and ends, in characters; None if the key is
    not set. Raises ConfigError."""
    root = _compose(text, origin)
    pairs = root.value if isinstance(root, MappingNode) else ()
    for key_node, value_node in pairs:
        if key_node.value == key:
            items = value_node.value if isinstance(value_node, SequenceNode) else []
            if isinstance(value_node, MappingNode):
                items = [value for _, value in value_node.value]
            # To the parser a block list or block of keys ends at the next key. Its last item is the end here,
            # because comments between the two belong to the next key.
            last = items[-1] if items and not value_node.flow_style else value_node
            return int(value_node.start_mark.index), int(last.end_mark.index)
    return None


def parse_value(text: str, place: str) -> object:
    """Return the value that `text` would have in a YAML file after `key: `; None for an empty text. Errors
    name `place`. Raises ConfigError."""
    root = _compose(text, place)
    if root is None:
        return None
    reader = _Reader(origin=place, places={}, lines=False)
    value = reader.value(root, ())
    if reader.problems:
        raise ConfigError(reader.problems)
    return value


def override_values(typed: ParsedYaml, values: Mapping[tuple[str, ...], tuple[str, str]]) -> None:
    """Override values of the file. `values` maps the path of each key to its YAML text and the text's origin,
    such as `--set`. Raises ConfigError."""
    for location, (text, place) in values.items():
        typed.put(location, parse_value(text, place), place)


class _DepthLimitedParser(Parser):
    """A parser that raises RecursionError if values are nested more than MAX_LEVELS deep."""

    depth = 0

    def get_event(self) -> Event:
        """Return the next event of ruamel's parser, and count how deeply it is nested."""
        event: Event = super().get_event()
        if isinstance(event, CollectionStartEvent):
            self.depth += 1
        elif isinstance(event, CollectionEndEvent):
            self.depth -= 1
        if self.depth > MAX_LEVELS:
            raise RecursionError
        return event


def _compose(text: str, origin: str) -> Node | None:
    """Return the root node of the YAML in `text`; None if it is empty. Raises ConfigError."""
    loader = YAML(typ="safe", pure=True)
    loader.Parser = _DepthLimitedParser
    loader.composer.warn_double_anchors = False  # Anchors are refused below, with our own message.
    try:
        root: Node | None = loader.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        raise ConfigError([f"{origin}:{line}: {_describe_syntax_error(error)}"]) from None
    except YAMLError as error:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise ConfigError([f"{origin}:{line}: is not YAML: {' '.join(str(error).split())}"]) from None
    except RecursionError:
        raise ConfigError([f"{origin}:1: is nested too deeply"]) from None
    return root


def _describe_syntax_error(error: MarkedYAMLError) -> str:
    """Return what is wrong with the YAML: a tab, a second document, or the parser's own words."""
    problem = str(error.problem)
    if "\\t" in problem or "\t" in problem:
        return "a tab where YAML wants spaces; indent with spaces"
    if "single document" in str(error.context):
        return "a second document starts here; put one document in a file"
    return f"is not YAML: {problem}"


def _line_number(node: Node) -> int:
    return int(node.start_mark.line) + 1


class _Reader:
    """Converts ruamel's nodes to plain data. Writes the place of each value into `places`, and collects
    problems instead of raising at the first. `lines`: whether places have line numbers."""

    def __init__(self, *, origin: str, places: dict[Location, str], lines: bool = True) -> None:
        self.origin = origin
        self.places = places
        self.lines = lines
        self.problems: list[str] = []
        self._scalars = YAML(typ="safe", pure=True).constructor
        self._visited: set[int] = set()

    def _place(self, node: Node) -> str:
        return f"{self.origin}:{_line_number(node)}" if self.lines else self.origin

    def _add_problem(self, node: Node, location: Location, problem: str) -> None:
        key = ".".join(map(str, location))
        self.problems.append(f"{self._place(node)}: {key + ': ' if key else ''}{problem}")

    def value(self, node: Node, location: Location) -> object:
        """Return the data of any node: a dict, a list or a plain value. A node that was visited before is an
        alias, which is a problem; its value is None."""
        if id(node) in self._visited:
            self._add_problem(node, location, "aliases (*name) are not used here; write the value out")
            return None
        self._visited.add(id(node))
        if isinstance(node, MappingNode):
            return self.mapping(node, location)
        if isinstance(node, SequenceNode):
            return self._sequence(node, location)
        return self._scalar(node, location)

    def mapping(self, node: MappingNode, location: Location) -> dict[str, Any]:
        """Return the data of a mapping. Keys that are not text, or are set twice, become problems."""
        data: dict[str, Any] = {}
        line_of_key: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode) or not str(key_node.tag).startswith(_CORE):
                self._add_problem(key_node, location, "a key must be plain text")
                continue
            key = str(key_node.value)
            value_location = (*location, key)
            if key in line_of_key:
                problem = f"is already set on line {line_of_key[key]}; keep one of the two"
                self._add_problem(key_node, value_location, problem)
                continue
            line_of_key[key] = _line_number(key_node)
            self.places[value_location] = self._place(key_node)
            data[key] = self.value(value_node, value_location)
        return data

    def _sequence(self, node: SequenceNode, location: Location) -> list[Any]:
        """Return the data of a list, and record the place of each item."""
        items = []
        for position, item in enumerate(node.value):
            item_location = (*location, position)
            self.places[item_location] = self._place(item)
            items.append(self.value(item, item_location))
        return items

    def _number(self, node: Node, location: Location) -> int | float | None:
        """Return a number. An integer above MAX_INTEGER is a problem; its value is None."""
        try:
            value: int | float = self._scalars.construct_object(node)
        except (ValueError, OverflowError):  # Python converts at most 4,300 digits.
            value = MAX_INTEGER + 1
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            shown = str(node.value)[:20]
            self._add_problem(
                node, location, f"{shown}... is too large; write a number of at most {MAX_INTEGER}"
            )
            return None
        return value

    def _scalar(self, node: Node, location: Location) -> object:
        """Return a plain value: number, boolean, None or text. Dates stay text. A value with another YAML tag
        is a problem; its value is None."""
        kind = str(node.tag).removeprefix(_CORE)
        if kind in ("int", "float"):
            return self._number(node, location)
        if kind in ("bool", "null"):
            return self._scalars.construct_object(node)
        if kind in ("str", "timestamp"):
            return str(node.value)
        self._add_problem(node, location, f"tags ({node.tag}) are not used here; write plain data")
        return None
