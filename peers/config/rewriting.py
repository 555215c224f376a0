"""Set one key of a file that a person wrote, and leave the rest of the file unchanged."""

from __future__ import annotations

import json
from pathlib import Path

from peers.config.atomic_files import write_atomically
from peers.config.errors import ConfigError, UserError
from peers.config.yaml_lines import parse, span


def set_key(file: Path, key: str, value: object, meaning: str) -> bool:
    """Set a top-level key of a YAML file to a value that JSON has, and return whether the file changed. After
    a change only the file's owner can read it.

    `meaning` is the comment above a new key. The file is replaced atomically. Raises UserError if it cannot
    be edited, and ConfigError if it is not valid YAML.
    """
    try:
        text = file.read_bytes().decode()  # Not read_text, which would change line endings.
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    before = parse(text, str(file)).data
    if before.get(key) == value:
        return False
    edited = _replace_value(text, str(file), key, value, meaning)
    try:
        is_correct = parse(edited, str(file)).data == {**before, key: value}
    except ConfigError:
        is_correct = False
    if not is_correct:  # The file may be {a: b, c: d}, whose keys have no lines of their own.
        line = f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        raise UserError(f"{file}: cannot be edited by a program as it is written; type in it: {line}")
    target = file.resolve()  # A symbolic link stays a link.
    mode = target.stat().st_mode
    write_atomically(target, edited.encode(), private=True)
    target.chmod(mode & 0o700)
    return True


def _replace_value(text: str, origin: str, key: str, value: object, meaning: str) -> str:
    """Return the YAML `text` with the new value of `key`. A key that it lacks is appended, below the comment
    `meaning`. `origin` names the file in errors."""
    json_value = json.dumps(value, ensure_ascii=False)
    old_value = span(text, origin, key)
    if old_value is not None:
        start, stop = old_value
        before = text[start - 1 : start]  # A block list may start in the same column as its key.
        separator = "" if before.isspace() and before != "\n" else " "
        return text[:start] + separator + json_value + text[stop:]
    line_end = "\r\n" if "\r\n" in text else "\n"
    if not text.endswith("\n"):
        text += line_end
    return text + f"# {meaning}{line_end}{key}: {json_value}{line_end}"
