"""One key of a file that a person wrote, set anew; all else in it stays as it was typed."""

from __future__ import annotations

import json
from pathlib import Path

from peers.config.atomic_files import write_atomically
from peers.config.yaml_lines import parse, span
from peers.errors import ConfigError, UserError


def set_private(file: Path, key: str, value: str | list[str], meaning: str) -> bool:
    """Whether it was written: not where the file has that value. `meaning`: the remark above a new key.
    Nobody but the file's owner can read it afterwards.

    The file is the old one or the new one, never half of one. UserError where it cannot be done.
    """
    try:
        raw = file.read_bytes().decode()  # as bytes: the ends of its lines stay what they are
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
    if not right:  # such as {a: b, c: d}: YAML, but not in lines of its own
        line = f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        raise UserError(f"{file}: cannot be edited by a program as it is written; type in it: {line}")
    place = file.resolve()  # A link to it stays one.
    mode = place.stat().st_mode
    write_atomically(place, text.encode(), private=True)
    place.chmod(mode & 0o700)
    return True


def _with_key(text: str, origin: str, key: str, value: str | list[str], meaning: str) -> str:
    typed = json.dumps(value, ensure_ascii=False)
    found = span(text, origin, key)
    if found is not None:
        start, stop = found
        before = text[start - 1 : start]  # A list in lines may begin where its key does.
        between = "" if before.isspace() and before != "\n" else " "
        return text[:start] + between + typed + text[stop:]
    end = "\r\n" if "\r\n" in text else "\n"
    return text + ("" if text.endswith("\n") else end) + f"# {meaning}{end}{key}: {typed}{end}"
