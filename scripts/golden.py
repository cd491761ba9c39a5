"""Make a golden dataset of the present manifest schema: ``python scripts/golden.py FOLDER [--encoding NAME]``.

A real run of the tiny model of ``tests/tiny.py`` (halved once more): two shards of bfloat16 rows, one malformed row,
one duplicate and one quarantined sample. Beside the dataset lie the job, its chats and a few rows taken out of the
shards with nothing but safetensors. Tests read every golden dataset with the present code, so one is kept for each
schema version and never made anew: run this when the schema version was raised, and commit the folder.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parent.parent))  # at the end: an older checkout may come first

from tests import tiny

PLACE = Path(tempfile.gettempdir()) / "coresample-golden"
"""Model and job lie here while a dataset is made, whoever makes it: manifests name the folder of the model."""
CHATS, HIDDEN, POSITIONS = 4, 32, 3
BAD = "~"
"""A sample with this character gets states that are not numbers, and is quarantined."""


def make_model(folder: Path) -> Path:
    """The tiny model with a hidden size of 32, in which one token is not a number."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import PreTrainedTokenizerFast

    with mock.patch.object(tiny, "HIDDEN", HIDDEN):
        tiny._make(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][tokenizer.convert_tokens_to_ids(BAD)] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_chats(path: Path, count: int = CHATS) -> Path:
    """``count`` short chats, then one with the bad character, a duplicate and a row that is no chat."""
    tiny.write_chats(path, count, words=5)
    lines = path.read_text(encoding="utf-8").splitlines()
    bad = {"messages": [{"role": "user", "content": BAD}, {"role": "assistant", "content": "no number"}]}
    lines += [json.dumps(bad), lines[0], '{"messages": 7}']
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make(folder: Path, encoding: str = "none") -> None:
    """Run the job and keep dataset, job, chats and a few rows in ``folder``, which must not exist."""
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    model, chats = make_model(PLACE / "model"), write_chats(PLACE / "chats.jsonl")
    job = tiny.write_job(
        PLACE / "job.json",
        model=model,
        chats=chats,
        root=PLACE / "dataset",
        store={"shard_bytes": "80KiB", "dtype": "bfloat16", "encoding": encoding},
        completeness=0.5,
    )
    platform.node = lambda: "golden"  # manifests name the host
    from extract_core.cli.app import app

    app(["run", str(job), "--no-prefect"], standalone_mode=False)
    folder.mkdir(parents=True)
    shutil.copytree(PLACE / "dataset", folder / "dataset", ignore=shutil.ignore_patterns(".*"))
    for file in (job, chats):
        shutil.copy(file, folder)
    _keep_rows(folder)


def _keep_rows(folder: Path) -> None:
    """``rows.npy`` [samples * POSITIONS, L, H] float32: first rows of each sample, in the order of ``rows.json``."""
    import numpy as np
    import pyarrow.parquet as pq

    index = pq.read_table(next((folder / "dataset" / "indexes").glob("*.parquet")))
    rows, names = [], []
    for sample, segments in zip(index["sample_id"].to_pylist(), index["segments"].to_pylist(), strict=True):
        shards = folder / "dataset" / "shards"
        parts = [_read(shards / f"{segment['shard']}.safetensors", segment).float().numpy() for segment in segments]
        rows.append(np.concatenate(parts)[:POSITIONS])
        names.append(sample)
    np.save(folder / "rows.npy", np.concatenate(rows))
    (folder / "rows.json").write_text(json.dumps({"positions": POSITIONS, "samples": names}, indent=1) + "\n")


def _read(path: Path, segment: dict[str, Any]) -> Any:
    """Rows of a segment, bfloat16 [N, L, H], without Coresample: as docs/format.md says."""
    import numpy as np
    import torch
    import zstandard
    from safetensors import safe_open

    with safe_open(path, "pt") as shard:
        meta, names = shard.metadata(), set(shard.keys())
        if "hidden_states" in names:
            return shard.get_tensor("hidden_states")[segment["first_row"] :][: segment["rows"]]
    layers, hidden = json.loads(meta["shape"])[1:]
    frame = path.read_bytes()[segment["byte_offset"] :][: segment["byte_length"]]
    rows, step, at = np.empty((segment["rows"], layers, hidden), np.uint16), max(1, 2**19 // hidden), 0
    for first in range(0, len(rows), step):
        for layer in range(layers):
            part = rows[first : first + step, layer]
            size = int.from_bytes(frame[at : at + 4], "little")
            high = zstandard.decompress(frame[at + 4 : at + 4 + size])
            at += 4 + size
            part[:] = np.frombuffer(high, np.uint8).reshape(part.shape).astype(np.uint16) << 8
            part |= np.frombuffer(frame, np.uint8, part.size, at).reshape(part.shape)
            at += part.size
    return torch.from_numpy(rows).view(torch.bfloat16)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--encoding", default="none")
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} exists; golden datasets are never made anew")
    make(options.folder, options.encoding)


if __name__ == "__main__":
    main()
