"""Open an untrusted safetensors file: its header is checked before the library parses it.

The format allows a header of 100 MB with as many tensors as fit in it, even empty ones. The library takes
minutes for a million.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

MAX_HEAD_BYTES = 16 << 20
"""Maximum header size: about 100 bytes a tensor, plus a checkpoint's manifest and settled sets
(checkpoint_file.py)."""
MAX_TENSORS = 65_536
"""Maximum number of tensors. A stage with all 48 layers of 128 experts and a momentum has 37,000."""
METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_Head = dict[str, msgspec.Raw]


def open_tensors(file: Path, max_tensors: int = MAX_TENSORS) -> Any:  # noqa: ANN401 - safetensors has no types
    """Check the header of a file, and return the context manager of `safe_open` for it. Raises OSError, and
    SafetensorError if the header is not JSON, or exceeds `MAX_HEAD_BYTES` or `max_tensors` tensors."""
    with file.open("rb") as opened:
        start = opened.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
        if length > MAX_HEAD_BYTES:
            raise SafetensorError(f"its head has {length} bytes, of at most {MAX_HEAD_BYTES}")
        head = opened.read(length)
    try:
        count = len(msgspec.json.decode(head, type=_Head).keys() - {METADATA})
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SafetensorError(f"its head is not JSON: {error}") from None
    if count > max_tensors:
        raise SafetensorError(f"it names {count} tensors, of at most {max_tensors}")
    return safe_open(file, framework="pt")
