"""Makes small but whole datasets with the store's own functions, for the tests of store, reader and checks."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from extract_core.checks.rows import SampleStats, check_sample_rows
from extract_core.errors import AlreadyExistsError
from extract_core.store import layout
from extract_core.store.commits import ShardCommits, read_commits, write_commit
from extract_core.store.index import INDEX_SCHEMA, write_index
from extract_core.store.norms import StoredNorm, write_norm
from extract_core.store.records import (
    Accounting,
    CommitRecord,
    FinalNormRef,
    Manifest,
    SampleRecord,
    SegmentRecord,
    ShardRef,
    Totals,
)
from extract_core.store.root import Root
from extract_core.store.seal import seal_shard
from extract_core.store.shard import SealedShard, Segment
from extract_core.store.versions import publish
from extract_core.store.writer import ShardWriter

FINGERPRINT = "ab" * 32
LAYERS, HIDDEN, BLOCKS = (2, 4, 6), 16, 6


@dataclass
class Sample:
    """One sample as it should be read back."""

    sample_id: str
    tokens: np.ndarray
    mask: np.ndarray
    hidden: torch.Tensor


def raw(states: torch.Tensor) -> memoryview:
    return memoryview(states.contiguous().reshape(-1).view(torch.uint8).numpy())


def attempt() -> str:
    return uuid.uuid4().hex


def make_shard(
    spool: Path, samples: int, seed: int, dtype: str = "bfloat16"
) -> tuple[SealedShard, list[Sample], list[list[int]]]:
    """A shard whose samples all share a prefix, stored once; also which segments make up each sample."""
    random = np.random.default_rng(seed)
    lengths = [4, *random.integers(3, 12, samples).tolist()]
    starts = np.concatenate(([0], np.cumsum(lengths))).tolist()
    rows = starts[-1]
    tokens = random.integers(0, 1000, rows).astype(np.int32)
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 3.0, 9.0])[None, :, None]
    states = (torch.randn(rows, len(LAYERS), HIDDEN, generator=generator) * scale).to(getattr(torch, dtype))
    spool.mkdir(parents=True, exist_ok=True)
    path = spool / f"shard-{seed}-{attempt()}"
    writer = ShardWriter(path, rows=rows, layer_ids=LAYERS, hidden_size=HIDDEN, dtype=dtype)
    writer.write_rows(0, raw(states))
    writer.write_token_ids(0, tokens)
    writer.close()
    keep = [Segment(a, n) for a, n in zip(starts, lengths, strict=False)]
    sealed = seal_shard(path, keep=keep, metadata={"fingerprint": FINGERPRINT})
    made = []
    for i in range(1, samples + 1):
        a, b = starts[i], starts[i + 1]
        ids = np.concatenate((tokens[:4], tokens[a:b]))
        mask = (np.arange(len(ids)) >= 4).astype(np.uint8)
        made.append(Sample(f"s{seed}-{i}", ids, mask, torch.cat((states[:4], states[a:b]))))
    # the last sample stands alone, in one piece
    a, b = starts[samples], starts[samples + 1]
    made[-1] = Sample(made[-1].sample_id, tokens[a:b], np.ones(b - a, dtype=np.uint8), states[a:b])
    pieces = [[0, i] for i in range(1, samples)] + [[samples]]
    return sealed, made, pieces


def race_to_create(root: Root, rel: str, tries: int) -> int:
    """Create one record from eight threads; exactly one wins, and all others are told its bytes. The winner."""

    def create(number: int) -> bytes | None:
        try:
            root.create_exclusive(rel, b"%d" % number)
        except AlreadyExistsError as error:
            return error.existing
        return None

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(create, range(tries)))
    winner = answers.index(None)
    assert answers.count(None) == 1
    assert set(answers) == {None, b"%d" % winner}
    return winner


def make_norm() -> StoredNorm:
    """An RMS norm of random weights."""
    return StoredNorm("rms", 1e-5, 0.0, torch.randn(HIDDEN, generator=torch.Generator().manual_seed(7)).numpy())


def commit_shard(root: Root, number: int, sealed: SealedShard, made: list[Sample], pieces: list[list[int]], who: str):
    """Put the shard into the root and commit it."""
    records = []
    for sample, own in zip(made, pieces, strict=True):
        ids = torch.from_numpy(sample.tokens.astype(np.int64))
        stats = check_sample_rows(sample.hidden, ids, ids, layer_ids=LAYERS)
        assert isinstance(stats, SampleStats), stats
        segments = [
            SegmentRecord(
                shard=sealed.sha256,
                first_row=s.first_row,
                rows=s.rows,
                byte_offset=s.byte_offset,
                byte_length=s.byte_length,
                xxh3=s.xxh3,
            )
            for s in (sealed.segments[i] for i in own)
        ]
        records.append(
            SampleRecord(
                sample_id=sample.sample_id,
                n_tokens=len(sample.tokens),
                segments=segments,
                greedy_token=7,
                top1_token=7,
                norm_mean=stats.norm_mean,
                norm_max=stats.norm_max,
            )
        )
    root.put_file(sealed.path, layout.shard_path(sealed.sha256))
    record = CommitRecord(
        fingerprint=FINGERPRINT,
        shard=number,
        object=layout.shard_path(sealed.sha256),
        sha256=sealed.sha256,
        nbytes=sealed.nbytes,
        rows=sealed.rows,
        layer_ids=list(LAYERS),
        hidden_size=HIDDEN,
        dtype="bfloat16",
        samples=records,
        excluded=[],
        attempt=who,
        engine={"final_norm": write_norm(root, make_norm(), {}).model_dump(mode="json")},
    )
    return write_commit(root, record)


def index_table(commits: dict[int, ShardCommits], samples: dict[str, Sample]) -> pa.Table:
    rows = []
    for number, commit in sorted(commits.items()):
        for at, record in enumerate(commit.samples):
            sample = samples[record.sample_id]
            rows.append(
                {
                    "sample_id": record.sample_id,
                    "source_file": "chats.jsonl",
                    "source_row": number * 100 + at,
                    "source_turn": None,
                    "split": "train" if at else "test",
                    "n_tokens": record.n_tokens,
                    "token_ids": sample.tokens.tolist(),
                    "loss_mask": sample.mask.tolist(),
                    "mask_method": "markers",
                    "truncated": False,
                    "segments": [segment.model_dump() for segment in record.segments],
                    "norm_mean": record.norm_mean,
                    "norm_max": record.norm_max,
                    "greedy_token": record.greedy_token,
                    "top1_token": record.top1_token,
                }
            )
    return pa.Table.from_pylist(rows, schema=INDEX_SCHEMA)


def build_manifest(
    version: int, who: str, commits: dict[int, ShardCommits], index, norm: FinalNormRef | None = None
) -> Manifest:
    shards = [
        ShardRef(path=r.object or "", sha256=r.sha256 or "", nbytes=r.nbytes, rows=r.rows)
        for commit in commits.values()
        for r in commit.stored
    ]
    samples = [sample for commit in commits.values() for sample in commit.samples]
    return Manifest(
        version=version,
        attempt=who,
        coresample_version="0.0",
        fingerprint=FINGERPRINT,
        spec={"model": "tiny"},
        layer_ids=list(LAYERS),
        n_layers=BLOCKS,
        hidden_size=HIDDEN,
        dtype="bfloat16",
        final_norm=norm or commits[0].final_norm,
        index=index,
        shards=shards,
        accounting=Accounting(input=len(samples) + 1, published=len(samples), dropped={"empty": 1}),
        totals=Totals(
            samples=len(samples),
            tokens=sum(sample.n_tokens for sample in samples),
            bytes=sum(shard.nbytes for shard in shards),
        ),
    )


def make_dataset(root: Root, spool: Path, shards: int = 2, samples: int = 4) -> tuple[Manifest, dict[str, Sample]]:
    """Extract (from random numbers), commit and publish a dataset."""
    who, known = attempt(), {}
    for number in range(shards):
        sealed, made, pieces = make_shard(spool, samples, seed=number)
        commit_shard(root, number, sealed, made, pieces, who)
        known.update({sample.sample_id: sample for sample in made})
    commits = read_commits(root, FINGERPRINT)
    index = write_index(root, index_table(commits, known))
    manifest = publish(root, lambda version: build_manifest(version, who, commits, index), who)
    return manifest, known
