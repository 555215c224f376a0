"""Fixed-size codes for the indices of the coefficients that a chunk keeps, and their packing in bits.

Every code has one length, which follows from the chunk and the number of votes. Every set of indices has one
bit string. A contribution therefore has exactly one valid form, and a decoder can refuse all others.

Shapes: C chunks, N coefficients in a chunk, K kept of them, B bits of a chunk's code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from swarmnet.rounds.result_table import ContributionError as ContributionError

BitArray: TypeAlias = NDArray[np.uint8]
"""Zeros and ones, a byte each: [C, B]."""
Indices: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EliasFano:
    """Code for any K distinct indices of N, ascending: K * (2 + log2(N / K)) bits (Elias 1974, Fano 1971).
    The high log2(K) bits are in unary (bit `high + rank` of 2K), the low bits in bit planes. The size is 7 to
    10 % above the entropy for K = 32 to 128 of 4096. Rice codes are nearer to it, but serial."""

    chunk: int
    kept: int

    @property
    def low_bits(self) -> int:
        return log2_exact(self.chunk // self.kept)

    @property
    def bits(self) -> int:
        return self.kept * (2 + self.low_bits)

    def write(self, indices_CK: Indices) -> BitArray:
        """Encode ascending distinct indices below N as bits [C, B]."""
        chunks = indices_CK.shape[0]
        bits_CB = np.zeros((chunks, self.bits), np.uint8)
        rank_K = np.arange(self.kept)
        places_CK = (indices_CK >> self.low_bits) + rank_K + (np.arange(chunks) * self.bits)[:, None]
        bits_CB.reshape(-1)[places_CK] = 1
        _write_planes(bits_CB[:, 2 * self.kept :], indices_CK, self.low_bits)
        return bits_CB

    def read(self, bits_CB: BitArray) -> Indices:
        """Return indices [C, K]. Raises ContributionError if the bits are no ascending set of K indices."""
        unary = np.ascontiguousarray(bits_CB[:, : 2 * self.kept])
        if np.any(unary.sum(axis=1, dtype=np.int32) != self.kept):
            raise ContributionError(f"a chunk does not hold exactly {self.kept} votes")
        places_CK = np.flatnonzero(unary).reshape(-1, self.kept)
        high_CK = places_CK % (2 * self.kept) - np.arange(self.kept)
        low_CK = _read_planes(bits_CB[:, 2 * self.kept :], self.kept, self.low_bits)
        indices_CK: Indices = (high_CK << self.low_bits) | low_CK
        if np.any(high_CK >= self.kept):
            raise ContributionError(f"an index lies outside its chunk of {self.chunk}")
        if np.any(indices_CK[:, 1:] <= indices_CK[:, :-1]):
            raise ContributionError("the indices of a chunk are not in ascending order, or one is repeated")
        return indices_CK


@dataclass(frozen=True, slots=True)
class GroupOffsets:
    """Code for one index in each of K groups: K * log2(N / K) bits. Group g is g, g + K, g + 2K, ... Groups
    are strided, because reductions over them then run along contiguous memory."""

    chunk: int
    kept: int

    @property
    def offset_bits(self) -> int:
        return log2_exact(self.chunk // self.kept)

    @property
    def bits(self) -> int:
        return self.kept * self.offset_bits

    def write(self, indices_CK: Indices) -> BitArray:
        """Encode the index of group g in column g as bits [C, B]."""
        bits_CB = np.empty((indices_CK.shape[0], self.bits), np.uint8)
        _write_planes(bits_CB, indices_CK >> log2_exact(self.kept), self.offset_bits)
        return bits_CB

    def read(self, bits_CB: BitArray) -> Indices:
        """Return indices [C, K]. Every bit string is valid, because no offset can leave its group."""
        offsets_CK = _read_planes(bits_CB, self.kept, self.offset_bits)
        return offsets_CK * self.kept + np.arange(self.kept)


def pack(bits_CB: BitArray) -> bytes:
    """Pack bits into bytes, first bit lowest, with zero bits after the last."""
    return np.packbits(bits_CB.reshape(-1), bitorder="little").tobytes()


def unpack(packed: bytes | memoryview, chunks: int, bits: int) -> BitArray:
    """Unpack bytes to bits [chunks, bits]. Raises ContributionError for a wrong length or set spare bits."""
    if len(packed) != packed_bytes(chunks, bits):
        raise ContributionError(f"{len(packed)} bytes where {packed_bytes(chunks, bits)} belong")
    flat = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    if np.any(flat[chunks * bits :]):
        raise ContributionError("the spare bits at the end of a plane are not zero")
    return flat[: chunks * bits].reshape(chunks, bits)


def packed_bytes(chunks: int, bits: int) -> int:
    """Return the length in bytes of `pack` for `chunks` chunks of `bits` bits."""
    return -(-chunks * bits // 8)


def log2_exact(number: int) -> int:
    """Return log2 of a power of two. Raises ValueError for other numbers."""
    if number < 1 or number & (number - 1):
        raise ValueError(f"{number} is not a power of two")
    return number.bit_length() - 1


def _write_planes(bits_CB: BitArray, numbers_CK: Indices, width: int) -> None:
    """Write bit b of all K numbers of a chunk to columns b * K to (b + 1) * K."""
    kept = numbers_CK.shape[1]
    small_CK = numbers_CK.astype(np.uint16)
    for bit in range(width):
        bits_CB[:, bit * kept : (bit + 1) * kept] = (small_CK >> bit) & 1


def _read_planes(bits_CB: BitArray, kept: int, width: int) -> Indices:
    numbers_CK = np.zeros((bits_CB.shape[0], kept), np.int64)
    for bit in range(width):
        numbers_CK |= bits_CB[:, bit * kept : (bit + 1) * kept].astype(np.int64) << bit
    return numbers_CK
