"""Read documents from the formats with fields: lines of JSON, CSV and Parquet; and tokens that were made
elsewhere. A column is a field's name; `a.b` is the field b of the field a."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from typing import Any

from peers.config.errors import how_to_install
from peers.data.files import (
    BUFFER_BYTES,
    LARGE_CHUNK_BYTES,
    LINE_LIMIT,
    MAX_UNPACKED_RATIO,
    ROWS_AT_A_TIME,
    TextError,
    Unreadable,
)

SHARD_MAGICS = {20240520: "uint16", 20240801: "uint32"}
"""First number of .bin files with a header of 256 int32 (llm.c, modded-nanogpt), and the type of their
tokens. Other .bin files are tokens from the first byte on (nanoGPT)."""
HEADER_BYTES = 1024
CONVERSATIONS = (("messages",), ("prompt", "completion"))
"""Columns of a Parquet file of conversations."""


class RawTokens(bytes):
    """Bytes that are no text but tokens: little-endian uint32."""


def field_of(record: object, column: str) -> object:
    """Return the value of a column in a record; None if it is absent."""
    rest = column
    while isinstance(record, Mapping):
        if rest in record:
            return record[rest]
        first, _, rest = rest.partition(".")
        record = record.get(first) if rest else None
    return None


def record_of(line: bytes) -> object:
    """Return the value in a line of JSON. Raises ValueError with the defect of the line."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None


def text_of_line(line: bytes, column: str) -> bytes:
    """Return a column of a line of JSON as UTF-8. Raises ValueError with the defect of the line."""
    text = field_of(record_of(line), column)
    if not isinstance(text, str):
        raise ValueError(f'no field "{column}" with a string in it')
    return text.encode("utf-8", "replace")


def json_lines(stream: BufferedReader) -> Iterator[bytes | Unreadable]:
    """Yield the lines of a .jsonl file, and an Unreadable in place of one that is too long."""
    while line := stream.readline(LINE_LIMIT):
        if len(line) < LINE_LIMIT or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(LINE_LIMIT)
        yield Unreadable(f"a line of more than {LINE_LIMIT:,} bytes")


def csv_rows(stream: BufferedReader, column: str) -> Iterator[str | Unreadable]:
    """Yield a column of each row of a CSV file, whose first row names the columns. Raises Unreadable."""
    csv.field_size_limit(LINE_LIMIT)
    room = 2 * LINE_LIMIT

    def lines() -> Iterator[str]:
        """Yield the lines of the file. Raises Unreadable for a row of too many bytes."""
        nonlocal room
        first = True
        while line := stream.readline(LINE_LIMIT):
            room -= len(line)
            if room < 0:
                raise Unreadable(f"a row of more than {2 * LINE_LIMIT:,} bytes: is a quote missing?")
            yield line.decode("utf-8-sig" if first else "utf-8", "replace")
            first = False

    try:
        rows = csv.reader(lines())
        names = next(rows, [])
        if column not in names:
            raise Unreadable(f"has no column {column}; it has {', '.join(names)[:200] or 'none'}")
        at = names.index(column)
        for row in rows:
            room = 2 * LINE_LIMIT
            if row:  # An empty line is no row.
                yield row[at] if at < len(row) else Unreadable(f"no column {column}")
    except csv.Error as error:
        raise Unreadable(f"is no CSV: {error}") from None


def parquet_rows(name: str, stream: BufferedReader, column: str) -> Iterator[str | Unreadable]:
    """Yield a column of each row of a Parquet file, or an Unreadable with the reason why it has none. Only
    some rows are in memory at a time. Raises TextError if the package pyarrow is missing, and Unreadable for
    a damaged file."""
    with _opened_parquet(name, stream) as file:
        import pyarrow.compute

        leaves = _leaves(file)
        if column not in leaves:
            has = ", ".join(leaves)[:200] or "none"
            raise Unreadable(f"has no column {column}; it has {has}")
        if leaves[column].physical_type == "BYTE_ARRAY":
            # Keep dictionary encoding: a string that many rows share is in memory once.
            file = pyarrow.parquet.ParquetFile(
                stream,
                buffer_size=BUFFER_BYTES,
                pre_buffer=False,
                metadata=file.metadata,
                read_dictionary=[column],
            )
        inner = column.split(".")[1:] if column not in file.schema_arrow.names else []
        for batch in _batches(file, [column]):
            values = batch.column(0)
            for part in inner:
                values = pyarrow.compute.struct_field(values, part)
            yield from (_row_text(value, column) for value in values)


def parquet_lines(name: str, stream: BufferedReader) -> Iterator[bytes | Unreadable]:
    """Yield each conversation of a Parquet file as a line of JSON. Raises as `parquet_rows` does."""
    with _opened_parquet(name, stream) as file:
        there = file.schema_arrow.names
        columns = next((keys for keys in CONVERSATIONS if set(keys) <= set(there)), None)
        if columns is None:
            has = ", ".join(there)[:200] or "none"
            raise Unreadable(f"has no column messages, and no prompt and completion; it has {has}")
        for batch in _batches(file, columns):
            for row in batch.to_pylist():
                line = json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=str)
                is_long = len(line) > LINE_LIMIT
                yield Unreadable("a conversation that is too long") if is_long else line.encode()


@contextmanager
def _opened_parquet(name: str, stream: BufferedReader) -> Iterator[Any]:
    """Open a Parquet file. Raises TextError and Unreadable, also during reading."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise TextError(f"{name} needs the package pyarrow: {how_to_install('text')}") from None
    try:
        yield parquet.ParquetFile(stream, buffer_size=BUFFER_BYTES, pre_buffer=False)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise Unreadable(f"is no Parquet file, or not whole: {str(error).partition(chr(10))[0]}") from None


def _leaves(file: Any) -> dict[str, Any]:  # noqa: ANN401 - of a package without types
    return {file.schema.column(at).path: file.schema.column(at) for at in range(len(file.schema))}


def _batches(file: Any, columns: Sequence[str]) -> Iterator[Any]:  # noqa: ANN401 - of a package without types
    """Yield some rows of these columns at a time. Raises Unreadable."""
    for group in range(file.num_row_groups):
        rows = _rows_at_a_time(file.metadata.row_group(group), columns)
        yield from file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)


def _rows_at_a_time(group: Any, columns: Sequence[str]) -> int:  # noqa: ANN401 - of a package without types
    """Return how many rows of a row group to read together, by its metadata: one if its texts are large.
    Raises Unreadable if large texts unpack to more than MAX_UNPACKED_RATIO times their packed bytes."""
    leaves = [group.column(at) for at in range(group.num_columns)]
    text_columns = [
        each
        for each in leaves
        if any(f"{each.path_in_schema}.".startswith(f"{column}.") for column in columns)
    ]
    unpacked = sum(each.total_uncompressed_size for each in text_columns)
    if unpacked <= LARGE_CHUNK_BYTES:
        return ROWS_AT_A_TIME
    packed = sum(each.total_compressed_size for each in text_columns)
    if unpacked > MAX_UNPACKED_RATIO * packed:
        raise Unreadable(f"unpacks to {unpacked:,} bytes, more than {MAX_UNPACKED_RATIO} times its own")
    return 1


def _row_text(scalar: Any, column: str) -> str | Unreadable:  # noqa: ANN401 - of a package without types
    """Return the string in one value of a column, or an Unreadable: null, no string, or too long."""
    value = getattr(scalar, "value", scalar)  # A dictionary value wraps the string.
    if value is None or not value.is_valid or not hasattr(value, "as_buffer"):
        return Unreadable(f"no string in its column {column}")
    if value.as_buffer().size > LINE_LIMIT:
        return Unreadable(f"a string of more than {LINE_LIMIT:,} bytes")
    text = value.as_py()
    return text if isinstance(text, str) else Unreadable(f"no string in its column {column}")


def raw_tokens(
    stream: BufferedReader, dtype: str, vocabulary: int, start_byte: int, room: int
) -> Iterator[RawTokens]:
    """Yield the tokens of a .bin or .npy file, of type `dtype`, from about `start_byte` on, at most `room`
    bytes of it. Raises Unreadable if the file holds another type, or at the first token that is
    not below `vocabulary`."""
    import numpy as np  # Not at the top: peers without text load this module, too.

    header = stream.peek(HEADER_BYTES)[:HEADER_BYTES]
    kind, item = np.dtype(dtype).newbyteorder("<"), np.dtype(dtype).itemsize
    magic = SHARD_MAGICS.get(int.from_bytes(header[:4], "little"))
    if header.startswith(b"\x93NUMPY"):
        found = _npy_type(stream)
    else:
        found = dtype if magic is None else magic
        stream.read(HEADER_BYTES if magic is not None else 0)
    if found != dtype:
        raise Unreadable(f"holds {found}, and the run says tokens: {dtype}")
    position = stream.tell()
    if start_byte > 0 and stream.seekable():
        stream.seek(position + max(0, start_byte - HEADER_BYTES) // item * item)
    while room >= item and (block := stream.read(min(BUFFER_BYTES, room // item * item))):
        if len(block) % item:
            raise Unreadable(f"has {len(block) % item} bytes too many for tokens of type {dtype}")
        tokens = np.frombuffer(block, kind)
        if len(tokens) and int(tokens.max()) >= vocabulary:
            first = int(np.argmax(tokens >= vocabulary))
            number = (stream.tell() - position - len(block)) // item + first
            raise Unreadable(
                f"token {int(tokens[first])} at {number:,}: the run's tokenizer has ids up to "
                f"{vocabulary - 1}: make the tokens with the run's tokenizer"
            )
        room -= len(block)
        yield RawTokens(tokens.astype("<u4").tobytes())


def _npy_type(stream: BufferedReader) -> str:
    """Read the header of a .npy file and return the type of its numbers. Raises Unreadable unless the file
    has one dimension."""
    import numpy as np

    try:
        version = np.lib.format.read_magic(stream)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, _, kind = read_header(stream)
    except (ValueError, KeyError) as error:
        raise Unreadable(f"is no .npy file: {error}") from None
    if len(shape) != 1:
        raise Unreadable(f"has {len(shape)} dimensions: tokens have one")
    return str(kind.newbyteorder("="))
