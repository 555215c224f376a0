"""Send messages with tensors over a pair of sockets between two processes of one peer."""

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
"""Bytes read at a time from a tensor that is not kept; socket buffers are smaller."""
KINDS = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class ChannelClosed(Exception):
    """The other process has closed its side or does not answer in time; the message says which."""


class _Tensor(msgspec.Struct):
    kind: str
    shape: tuple[int, ...]


class _Head(msgspec.Struct, Generic[Received]):
    message: Received
    tensors: tuple[_Tensor, ...] = ()


class Channel(Generic[Sent, Received]):
    """One side of the connection. Raises ChannelClosed if the other side does not respond in time."""

    def __init__(self, end: socket.socket, received: object, seconds: float | None) -> None:
        """Wrap a socket. `received` is the type of incoming messages. `seconds` None means no time limit."""
        self.end = end
        self.end.settimeout(seconds)
        self._decoder = msgspec.msgpack.Decoder(_Head[received])  # type: ignore[valid-type]
        self._heads: tuple[_Tensor, ...] = ()

    def send(self, message: Sent, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message with its tensors' dtypes and shapes, then their bytes. Raises ChannelClosed."""
        heads = tuple(_Tensor(str(each.dtype).removeprefix("torch."), tuple(each.shape)) for each in tensors)
        head = msgspec.msgpack.encode(_Head(message, heads))
        try:
            self.end.sendall(LENGTH.pack(len(head)) + head)
            for tensor in tensors:
                if tensor.numel():
                    self.end.sendall(bytes_of(tensor.detach().cpu().contiguous()))
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> tuple[Received, list[Tensor]]:
        """Return the next message with its tensors, in host memory. Raises ChannelClosed. The message comes
        with the dtype and shape of each tensor (`_heads`), and the tensors' bytes follow it."""
        message = self.receive_message()
        tensors = [torch.empty(head.shape, dtype=KINDS[head.kind]) for head in self._heads]
        for tensor in tensors:
            if tensor.numel():
                self.read_into(bytes_of(tensor))
        return message, tensors

    def receive_message(self) -> Received:
        """Return the next message without its tensors. The caller then reads their bytes with `read_into`."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        head: _Head[Received] = self._decoder.decode(self._read(length))
        self._heads = head.tensors
        return head.message

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes. Raises ChannelClosed."""
        received = 0
        while received < len(view):
            try:
                count = self.end.recv_into(view[received:])
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not count:
                raise ChannelClosed("closed")
            received += count

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        self.read_into(memoryview(data))
        return data


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, without a copy."""
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = tensor.reshape(-1).numpy()
    return memoryview(array).cast("B")  # type: ignore[arg-type]
