"""How rows lie in a shard: as they are (``none``), or as one compressed frame per segment.

``bf16-split-zstd`` is lossless. The low byte of a bfloat16 value (seven bits of mantissa, one of exponent) is noise;
the high byte (sign and seven bits of exponent) takes few values, so only the high bytes are compressed, layer by layer,
since layers differ in scale. Searching for repeats finds none and costs ratio and time, so zstd is told to do little
more than entropy coding.

A frame is a run of blocks: for each ``BLOCK_VALUES // H`` rows (at least one; the last may be fewer), for each layer in
ascending order, one block of n = rows * H values:

* length z of the zstd frame, uint32 little-endian;
* z bytes: a zstd frame, with its content size, of the n high bytes;
* n bytes: the low bytes.

Anything that reads zstd can decode it; ``docs/format.md`` has the ten lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

from extract_core.errors import CorruptDataError

Encoding = Literal["none", "bf16-split-zstd"]
NONE: Encoding = "none"
BF16_SPLIT_ZSTD: Encoding = "bf16-split-zstd"
ENCODINGS: tuple[Encoding, ...] = (NONE, BF16_SPLIT_ZSTD)

BLOCK_VALUES = 2**19
"""Values of a block, about: bounds the memory of encoder and decoder whatever the length of a sample."""

_LENGTH = 4
# Matches of at least 7 bytes from a table of 64 entries: entropy coding, in effect. Measured on real rows against plain
# level 1: 1.469 instead of 1.458 times smaller, at three times the speed.
_PARAMETERS = {"min_match": 7, "hash_log": 6}


def encodes(encoding: Encoding, dtype: str) -> bool:
    """Whether rows of a dtype can be stored so."""
    return encoding == NONE or dtype == "bfloat16"


class FrameEncoder:
    """Makes frames; one thread at a time, its buffers are used again.

    Args:
        layers: L.
        hidden_size: H.
    """

    def __init__(self, layers: int, hidden_size: int) -> None:
        self.layers, self.hidden_size = layers, hidden_size
        self.block_rows = block_rows(hidden_size)
        self._low = np.empty((self.block_rows, hidden_size), np.uint8)
        self._high = np.empty((self.block_rows, hidden_size), np.uint8)
        parameters = zstandard.ZstdCompressionParameters.from_level(1, **_PARAMETERS)
        self._zstd = zstandard.ZstdCompressor(compression_params=parameters)

    def blocks(self, rows: NDArray[np.uint16]) -> Iterator[bytes | memoryview]:
        """The pieces of a frame's blocks, each valid until the next one is asked for.

        Args:
            rows: bits of bfloat16 ``[rows, L, H]``; a frame may be made of several calls, each but the last with a
                multiple of ``block_rows`` rows.
        """
        for first in range(0, rows.shape[0], self.block_rows):
            part = rows[first : first + self.block_rows]
            low, high = self._low[: part.shape[0]], self._high[: part.shape[0]]
            for layer in range(self.layers):
                values = part[:, layer]
                np.copyto(low, values, casting="unsafe")
                np.right_shift(values, 8, out=high, casting="unsafe")
                packed = self._zstd.compress(high.data)
                yield len(packed).to_bytes(_LENGTH, "little")
                yield packed
                yield low.data.cast("B")


def block_rows(hidden_size: int) -> int:
    """Rows of a block, but for the last one of a frame."""
    return max(1, BLOCK_VALUES // hidden_size)


def decode_frame(
    frame: bytes | bytearray | memoryview, rows: int, layers: int, hidden_size: int, where: str
) -> NDArray[np.uint16]:
    """Bits of bfloat16 ``[rows, L, H]``.

    Args:
        frame: its bytes.
        rows: rows of its segment.
        layers: L.
        hidden_size: H.
        where: shard and segment, for messages.

    Raises:
        CorruptDataError: the frame does not hold exactly these rows; memory is never taken by what it claims.
    """
    view = memoryview(frame).cast("B")
    if len(view) < rows * layers * hidden_size:  # the low bytes alone
        raise CorruptDataError(f"{where}: {len(view)} bytes cannot hold {rows} rows of {layers} x {hidden_size} values")
    result = np.empty((rows, layers, hidden_size), np.uint16)
    zstd = zstandard.ZstdDecompressor()
    step, at = block_rows(hidden_size), 0
    for first in range(0, rows, step):
        part = result[first : first + step]
        count = part.shape[0] * hidden_size
        for layer in range(layers):
            start = at + _LENGTH
            stop = start + int.from_bytes(view[at:start], "little")
            if stop + count > len(view):
                raise CorruptDataError(f"{where}: its frame ends in the block at byte {at}")
            high = _inflate(zstd, view[start:stop], count, f"{where}, block at byte {at}")
            low = np.frombuffer(view, np.uint8, count, stop)
            values = part[:, layer]
            np.left_shift(high.reshape(values.shape), 8, out=values, dtype=np.uint16, casting="unsafe")
            np.bitwise_or(values, low.reshape(values.shape), out=values)
            at = stop + count
    if at != len(view):
        raise CorruptDataError(f"{where}: {len(view) - at} bytes follow the last block of its frame")
    return result


def _inflate(zstd: Any, packed: memoryview, count: int, where: str) -> NDArray[np.uint8]:
    try:
        if zstandard.frame_content_size(packed) != count:  # looked at first: the size in it is what is allocated
            raise CorruptDataError(f"{where}: its zstd frame is not of {count} bytes")
        data = zstd.decompress(packed, max_output_size=count, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"{where}: {error}") from error
    if len(data) != count:
        raise CorruptDataError(f"{where}: {len(data)} bytes came out of its zstd frame, expected {count}")
    return np.frombuffer(data, np.uint8)
