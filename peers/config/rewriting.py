"""Set one key of a file that a person wrote, and leave the rest of the file unchanged."""

from __future__ import annotations

import json
from pathlib import Path

from peers.config.atomic_files import write_atomically
from peers.config.yaml_lines import parse, span
from peers.errors import ConfigError, UserError


def set_private(file: Path, key: str, value: str | list[str], meaning: str) -> bool:
    """Set `key` in `file` and return whether the file changed. Afterwards only the file's owner can read it.

    `meaning` is the comment above a new key. The file is replaced atomically. Raises UserError if it cannot
    be edited.
    """
    try:
        raw = file.read_bytes().decode()  # As bytes, so that line endings do not change.
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    before = parse(raw, str(file)).data
    if before.get(key) == value:
        return False
    text = _with_key(raw, str(file), key, value, meaning)
    try:
        right = parse(text, str(file)).data == {**before, key: value}
    except ConfigError:
        right = False
    if not right:  # Such as {a: b, c: d}: valid YAML without lines of its own.
        line = f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        raise UserError(f"{file}: cannot be edited by a program as it is written; type in it: {line}")
    place = file.resolve()  # A symbolic link stays one.
    mode = place.stat().st_mode
    write_atomically(place, text.encode(), private=True)
    place.chmod(mode & 0o700)
    return True


def _with_key(text: str, origin: str, key: str, value: str | list[str], meaning: str) -> str:
    """Return the text of the file with the new value of `key`."""
    typed = json.dumps(value, ensure_ascii=False)
    found = span(text, origin, key)
    if found is not None:
        start, stop = found
        before = text[start - 1 : start]  # A list in lines may begin where its key does.
        between = "" if before.isspace() and before != "\n" else " "
        return text[:start] + between + typed + text[stop:]
    end = "\r\n" if "\r\n" in text else "\n"
    return text + ("" if text.endswith("\n") else end) + f"# {meaning}{end}{key}: {typed}{end}"
