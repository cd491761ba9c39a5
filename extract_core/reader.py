"""Read a published version as a torch dataset: whole samples, checked against their checksums."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash
from torch.utils.data import Dataset

from extract_core.errors import CorruptDataError, SettingsError, StoreError
from extract_core.store import layout
from extract_core.store.encoding import NONE
from extract_core.store.index import open_index
from extract_core.store.indexparts import IndexParts
from extract_core.store.norms import StoredNorm, read_norm
from extract_core.store.shard import ShardReader
from extract_core.store.tags import open_ref, tagged_version
from extract_core.store.versions import read_manifest

_OPEN_SHARDS = 64
_COLUMNS = ["sample_id", "token_ids", "loss_mask", "segments"]


class HiddenStatesDataset(Dataset[dict[str, Any]]):
    """Samples of a version, by position.

    An item is a dict of ``input_ids`` int64 ``[N]``, ``loss_mask`` int64 ``[N]``, ``hidden_states`` ``[N, L, H]`` and
    ``sample_id``. ``layer_ids`` names the layers; the last block's, n, is before the final norm: ``final_norm`` has
    that. On a local root the states of a sample that is stored in one piece share the file's pages (writing to them
    never changes the file). Safe in DataLoader workers, forked or spawned. A large index is read by parts, each checked
    against its checksum, so that opening a version takes no longer for many samples than for few; ``index`` is a table
    or, of a large one, ``IndexParts``.

    Args:
        root: folder or URL, also ``ROOT@VERSION`` and ``ROOT@TAG``.
        version: a number, a tag, "latest", or None for what ``root`` says.
        split: only samples of this split.
        layers: only these layer ids, in this order.
        dtype: convert the states; as stored when None.
        verify: check the xxh3 of each segment when its sample is first read in this process.
        storage_options: for fsspec, on a remote root.

    Raises:
        SettingsError: no such split or layer.
        StoreError: no such version.
        CorruptDataError: manifest or index are damaged; from an item: its rows are, with shard and sample named, or the
            part of a large index that it is in.
    """

    def __init__(
        self,
        root: str | Path,
        version: int | str | None = "latest",
        split: str | None = None,
        layers: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        verify: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.root, number = open_ref(str(root), storage_options)
        if version is not None and version != "latest":
            try:
                number = int(version)
            except ValueError:
                number = tagged_version(self.root, str(version))
        self.manifest = read_manifest(self.root, number)
        stored = self.manifest.layer_ids
        unknown = sorted(set(layers or ()).difference(stored))
        if unknown:
            raise SettingsError(f"layers {unknown} are not in {self.root.url}; it has {stored}")
        self.layer_ids = list(stored if layers is None else layers)
        self._places = None if self.layer_ids == stored else [stored.index(k) for k in self.layer_ids]
        self._dtype, self._verify = dtype, verify
        self._sizes = {shard.sha256: shard.nbytes for shard in self.manifest.shards}
        self._format = self.manifest.row_format
        self.index = self._choose(open_index(self.root, self.manifest), split)
        self._start()

    def _choose(self, table: pa.Table | IndexParts, split: str | None) -> pa.Table | IndexParts:
        if split is None:
            return table
        chosen = table.filter(pc.equal(table.column("split"), split))
        if not chosen.num_rows:
            known = sorted(pc.unique(table.column("split")).to_pylist())
            raise SettingsError(f"{self.root.url} has no split {split!r}; it has {known}")
        return chosen

    def _start(self) -> None:
        self._rows = self.index.select(_COLUMNS) if isinstance(self.index, pa.Table) else self.index
        self._shards: OrderedDict[str, ShardReader] = OrderedDict()
        self._seen = np.zeros(self.index.num_rows, dtype=bool)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_shards", "_seen", "_rows")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __len__(self) -> int:
        return int(self.index.num_rows)

    @cached_property
    def final_norm(self) -> StoredNorm:
        """The model's final norm: ``final_norm.apply(rows of layer n)`` is what lm_head reads.

        Raises:
            SettingsError: this version does not have it; says why.
            CorruptDataError: its file is missing or damaged.
        """
        ref = self.manifest.final_norm
        if ref is None or ref.kind == "unknown":
            why = ref.reason if ref is not None else "it was made by a Coresample that did not keep norms"
            raise SettingsError(
                f"version {self.manifest.version} of {self.root.url} has no final norm: {why}; apply the model's own "
                "norm to the rows of the last layer"
            )
        return read_norm(self.root, ref, self.manifest.hidden_size)

    def __getitem__(self, position: int) -> dict[str, Any]:
        count = len(self)
        if not -count <= position < count:
            raise IndexError(f"sample {position} of {count}")
        position %= count
        one = self._rows.slice(position, 1)
        row = {name: one.column(name)[0] for name in _COLUMNS}
        sample, segments = row["sample_id"].as_py(), row["segments"].as_py()
        self._check_row(sample, row, segments)
        check = self._verify and not self._seen[position]
        parts = [self._segment(sample, segment, check) for segment in segments]
        self._seen[position] = True
        states = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._dtype is not None:
            states = states.to(self._dtype)
        return {
            "input_ids": torch.from_numpy(np.array(row["token_ids"].values, dtype=np.int64)),
            "loss_mask": torch.from_numpy(np.array(row["loss_mask"].values, dtype=np.int64)),
            "hidden_states": states,
            "sample_id": sample,
        }

    def _check_row(self, sample: str, row: Mapping[str, Any], segments: Sequence[Mapping[str, Any] | None]) -> None:
        """The index is of a digest that the manifest names, but a stranger may have made both."""
        whole = all(segment is not None and None not in segment.values() for segment in segments)
        counts = {"rows": sum(segment["rows"] for segment in segments if segment) if whole else None}
        for name in ("token_ids", "loss_mask"):
            counts[name] = None if row[name].values.null_count else len(row[name].values)
        if len(set(counts.values())) != 1 or None in counts.values() or not segments:
            raise CorruptDataError(
                f"sample {sample}: the index of {self.root.url} has numbers of {counts}, expected three that are the "
                "same; run 'coresample verify' on it"
            )

    def _segment(self, sample: str, segment: Mapping[str, Any], check: bool) -> torch.Tensor:
        start, length, rows = segment["byte_offset"], segment["byte_length"], segment["rows"]
        nbytes = self._sizes.get(segment["shard"], 0)  # no place outside a shard that the manifest lists
        if segment["first_row"] < 0 or rows < 1 or start < 0 or length < 1 or start + length > nbytes:
            raise CorruptDataError(f"sample {sample}: the index refers to {segment}, which is no place in a shard")
        rel = layout.shard_path(segment["shard"])
        where = f"rows {segment['first_row']}..{segment['first_row'] + rows} of shard {self.root.describe(rel)}"
        data: memoryview | bytearray
        try:
            if self.root.is_local:
                data = self._shard(rel, segment).segment_bytes(start, length)
            else:
                data = bytearray(self.root.read_range(rel, start, start + length))
            if check and (found := xxhash.xxh3_64_hexdigest(data)) != segment["xxh3"]:
                raise CorruptDataError(
                    f"{where} are damaged: xxh3 {segment['xxh3']} expected, {found} found; run 'coresample verify' "
                    "for the whole extent"
                )
            states = self._format.decode(data, rows, where)
        except FileNotFoundError:
            raise CorruptDataError(f"sample {sample}: shard {self.root.describe(rel)} is missing") from None
        except StoreError as error:
            raise type(error)(f"sample {sample}: {error}") from error
        return states if self._places is None else states[:, self._places]

    def _shard(self, rel: str, segment: Mapping[str, Any]) -> ShardReader:
        reader = self._shards.get(rel)
        if reader is None:
            reader = self._shards[rel] = ShardReader(Path(self.root.describe(rel)))
            if len(self._shards) > _OPEN_SHARDS:
                self._shards.popitem(last=False)
        else:
            self._shards.move_to_end(rel)
        header, wanted = reader.header, self._format
        expected: tuple[Any, ...] = (tuple(self.manifest.layer_ids), wanted)
        found: tuple[Any, ...] = (header.layer_ids, header.format)
        if wanted.encoding == NONE:
            expected += (segment["byte_offset"],)
            found += (header.data_offset + segment["first_row"] * header.row_bytes,)
        if expected != found:
            raise CorruptDataError(
                f"shard {self.root.describe(rel)} is damaged: its header has layers, format and offset "
                f"{found}, expected {expected}"
            )
        return reader
