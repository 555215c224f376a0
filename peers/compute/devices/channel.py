"""Messages with tensors behind them, over a pair of sockets between two processes of one peer."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

LENGTH = struct.Struct("<Q")
PIECE_BYTES = 1 << 20
"""Read at a time where a tensor is not kept; sockets hold less."""
KINDS = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class Ended(Exception):
    """The other process has closed its side, or does not answer in time; the message says which."""


class _Tensor(msgspec.Struct):
    kind: str
    shape: tuple[int, ...]


class _Head(msgspec.Struct, Generic[Received]):
    message: Received
    tensors: tuple[_Tensor, ...] = ()


class Channel(Generic[Sent, Received]):
    """Either side. Everything waits so many seconds at most for the other; then Ended."""

    def __init__(self, end: socket.socket, received: object, seconds: float | None) -> None:
        """`received`: the type of what comes. `seconds` None: as long as the other side lives."""
        self.end = end
        self.end.settimeout(seconds)
        self._decoder = msgspec.msgpack.Decoder(_Head[received])  # type: ignore[valid-type]
        self._heads: tuple[_Tensor, ...] = ()

    def send(self, message: Sent, tensors: Sequence[Tensor] = ()) -> None:
        heads = tuple(_Tensor(str(each.dtype).removeprefix("torch."), tuple(each.shape)) for each in tensors)
        head = msgspec.msgpack.encode(_Head(message, heads))
        try:
            self.end.sendall(LENGTH.pack(len(head)) + head)
            for tensor in tensors:
                if tensor.numel():
                    self.end.sendall(bytes_of(tensor.detach().cpu().contiguous()))
        except OSError as error:
            raise Ended(str(error)) from None

    def receive(self) -> tuple[Received, list[Tensor]]:
        message = self.receive_message()
        tensors = [torch.empty(head.shape, dtype=KINDS[head.kind]) for head in self._heads]
        for tensor in tensors:
            if tensor.numel():
                self.read_into(bytes_of(tensor))
        return message, tensors

    def receive_message(self) -> Received:
        """Without its tensors: the caller reads their bytes next, with `read_into`."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        head: _Head[Received] = self._decoder.decode(self._read(length))
        self._heads = head.tensors
        return head.message

    def read_into(self, view: memoryview) -> None:
        """The next bytes, as many as it takes."""
        got = 0
        while got < len(view):
            try:
                more = self.end.recv_into(view[got:])
            except OSError as error:
                raise Ended(str(error)) from None
            if not more:
                raise Ended("closed")
            got += more

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        self.read_into(memoryview(data))
        return data


def bytes_of(tensor: Tensor) -> memoryview:
    """Of a contiguous tensor in the machine's memory; itself and no copy."""
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = tensor.reshape(-1).numpy()
    return memoryview(array).cast("B")  # type: ignore[arg-type]
