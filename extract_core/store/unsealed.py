"""Read rows of a shard that is still being made: for checks before it is sealed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from extract_core.errors import CorruptDataError
from extract_core.store.shard import HEADER_BYTES
from extract_core.store.writer import read_note


class UnsealedShard:
    """Rows of an unsealed shard file, copied out on request.

    Raises:
        CorruptDataError: the file is not an unsealed shard.
    """

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._shape, self.layer_ids = read_note(self._fd, path)
        except BaseException:
            os.close(self._fd)
            raise
        self._dtype: torch.dtype = getattr(torch, self._shape.dtype)

    def rows(self, first_row: int, rows: int) -> torch.Tensor:
        """Rows ``[rows, L, H]`` in the stored dtype."""
        width = self._shape.row_bytes
        data = self._read(HEADER_BYTES + first_row * width, rows * width)
        return data.view(self._dtype).view(rows, self._shape.layers, self._shape.hidden_size)

    def token_ids(self, first_row: int, rows: int) -> torch.Tensor:
        """Token ids int32 ``[rows]`` that the forward read for these rows."""
        return self._read(self._shape.tokens_offset + 4 * first_row, 4 * rows).view(torch.int32)

    def sample(self, segments: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[N, L, H]`` and token ids ``[N]`` of a sample that lies in segments (first row, rows)."""
        rows = [self.rows(first, count) for first, count in segments]
        ids = [self.token_ids(first, count) for first, count in segments]
        return (rows[0], ids[0]) if len(segments) == 1 else (torch.cat(rows), torch.cat(ids))

    def _read(self, offset: int, size: int) -> torch.Tensor:
        data = torch.empty(size, dtype=torch.uint8)
        view, done = memoryview(data.numpy()), 0
        while done < size:
            got = os.preadv(self._fd, [view[done : done + 2**26]], offset + done)
            if not got:
                raise CorruptDataError(f"the shard file ends at byte {offset + done}, {offset + size} were expected")
            done += got
        return data

    def last_layer(self, at: Sequence[int]) -> torch.Tensor:
        """The highest layer id of single rows: ``[len(at), H]``."""
        return torch.stack([self.rows(row, 1)[0, -1] for row in at])

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> UnsealedShard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
