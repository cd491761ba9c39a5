"""From a spool file to a stored shard and its commit record."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from extract_core.checks.rows import RowFailure, SampleStats, ShardChecker
from extract_core.errors import (
    CaptureError,
    StoreError,
)
from extract_core.job import Job
from extract_core.pipeline.capture import Captured
from extract_core.planning.model import canonical_digest
from extract_core.planning.plan import segments_of
from extract_core.planning.prefixes import Run, fused
from extract_core.progress import reporter
from extract_core.store import layout
from extract_core.store.commits import write_commit
from extract_core.store.norms import StoredNorm, write_norm
from extract_core.store.records import (
    CommitRecord,
    Excluded,
    FinalNormRef,
    SampleRecord,
    SegmentRecord,
    canonical_json,
)
from extract_core.store.seal import seal_shard, seal_target
from extract_core.store.shard import SealedShard, Segment
from extract_core.store.unsealed import UnsealedShard
from extract_core.store.versions import named_by_a_version

CAPTURE_FAULTS = frozenset({"shape", "row_count", "token_echo", "zero_row", "identical_rows"})
"""Row failures that no sample can cause by itself: they stop the run instead of shrinking the dataset."""
MOST_FAILED, MOST_FAILED_SHARE = 4, 0.05
"""Samples of a shard that may fail their row checks, each by rows of its own, before it is the machine's fault."""


def commit_shard(job: Job, captured: Captured) -> CommitRecord:
    """Check every row of a captured shard, store it and write its commit record; may be called again after a failure.

    Returns:
        the record that stands: this attempt's, or an earlier one's when another worker was first.

    Raises:
        CorruptDataError, NoSpaceError, StoreError: nothing is committed.
    """
    norm = _store_norm(job, captured)
    if captured.record is None:
        captured.record = _check_and_seal(job, captured, norm)
    record = captured.record
    if record.object is not None and not captured.stored:
        started = time.perf_counter()
        job.root.put_file(captured.path, record.object, xxh3_128=captured.xxh3_128)
        captured.stored = True
        timings = {**record.timings, "upload_s": time.perf_counter() - started}
        record = captured.record = record.model_copy(update={"timings": timings})
    task = captured.task
    standing = write_commit(job.root, record, replaces=task.replaces if task else ())
    if task and task.lost and standing is record and record.object != task.lost:
        reporter().note(
            f"shard {captured.shard}: {task.lost} could not be made again bit by bit; its commit record now names "
            f"{record.object or 'no file'}"
        )
    _note_quarantine(job, captured, standing)
    if record.object is not None and standing.object != record.object:
        _discard(job, captured, record.object)
    captured.path.unlink(missing_ok=True)
    captured.committed = True
    return standing


def _note_quarantine(job: Job, captured: Captured, standing: CommitRecord) -> None:
    """A file for every sample that stays out, none for one that was rescued; ``publish`` makes them exact."""
    carried = captured.task.carried if captured.task else ()
    known = {item.sample_id for item in carried}
    for item in standing.excluded:
        if item.sample_id not in known:
            write_quarantine(job, standing, item)
    if standing.round:
        for sample in standing.samples:
            job.root.delete(layout.quarantine_path(job.plan.fingerprint, sample.sample_id))


def write_quarantine(job: Job, record: CommitRecord, item: Excluded) -> None:
    """The file of one sample that was left out: reason, detail, attempts, shard and round."""
    job.root.put_bytes(
        layout.quarantine_path(job.plan.fingerprint, item.sample_id),
        canonical_json(item.model_dump(mode="json") | {"shard": record.shard, "round": record.round}),
    )


def _discard(job: Job, captured: Captured, path: str) -> None:
    """Another worker's record stands and names other bytes: ours go, unless they are what a version had lost."""
    try:
        if (captured.task and captured.task.lost == path) or named_by_a_version(job.root, path):
            return
        job.root.delete(path)
    except StoreError as error:
        reporter().note(f"{path} is not needed but could not be deleted: {error}")


def _store_norm(job: Job, captured: Captured) -> FinalNormRef:
    """Before any record refers to it; every shard looks, so that a file that was lost meanwhile comes back."""
    norm = captured.final_norm
    if norm is None:
        return FinalNormRef(kind="unknown", reason=str(captured.engine.get("final_norm", "the engine did not say")))
    weight = np.frombuffer(norm.weight, dtype="<f4") if norm.weight else np.ones(job.model.hidden_size, dtype="<f4")
    stored = StoredNorm(
        kind=norm.kind,
        epsilon=norm.epsilon,
        offset=norm.offset,
        weight=None if norm.kind == "none" else weight,
        bias=np.frombuffer(norm.bias, dtype="<f4") if norm.bias else None,
    )
    # No name of the model: it may be a folder, which differs between machines.
    whose = {
        "architecture": job.model.architecture,
        "hub_commit": job.model.commit or "",
        "model_digest": canonical_digest(job.spec.deciding["model"]),
        "n_layers": str(job.model.n_layers),
        "written_by": "coresample",
    }
    return write_norm(job.root, stored, whose)


def _check_and_seal(job: Job, captured: Captured, norm: FinalNormRef) -> CommitRecord:
    started = time.perf_counter()
    stats, excluded = _check_rows(job, captured)
    task = captured.task
    if task is not None:
        before = {item.sample_id: item.attempts for item in task.earlier}
        excluded = [
            *task.carried,
            *(item.model_copy(update={"attempts": item.attempts + before.get(item.sample_id, 0)}) for item in excluded),
        ]
    kept = _kept(captured, stats)
    nodes = sorted({node for segments in kept.values() for node in segments})
    sealed = _seal(job, captured, nodes) if nodes else None
    return CommitRecord(
        fingerprint=job.plan.fingerprint,
        shard=captured.shard,
        round=captured.task.round if captured.task else 0,
        object=layout.shard_path(sealed.sha256) if sealed else None,
        sha256=sealed.sha256 if sealed else None,
        nbytes=sealed.nbytes if sealed else 0,
        rows=sealed.rows if sealed else 0,
        layer_ids=list(job.layer_ids),
        hidden_size=job.model.hidden_size,
        dtype=job.dtype,  # type: ignore[arg-type]
        encoding=job.encoding,
        samples=_records(captured, kept, nodes, sealed, stats) if sealed else [],
        excluded=excluded,
        attempt=captured.attempt,
        engine={**captured.engine, "final_norm": norm.model_dump(mode="json")},
        timings={
            **{name: float(value) for name, value in captured.done.counters.items()},
            "check_and_seal_s": time.perf_counter() - started,
        },
    )


def _check_rows(job: Job, captured: Captured) -> tuple[dict[str, SampleStats], list[Excluded]]:
    import torch

    excluded = {item.sample_id: item for item in captured.excluded}
    known = excluded.keys() | {item.sample_id for item in (captured.task.earlier if captured.task else ())}
    stats: dict[str, SampleStats] = {}
    faults: set[object] = set()  # of samples that share the faulty rows, one
    if len(excluded) == len(captured.samples):
        return stats, list(excluded.values())  # the engine wrote no file
    with UnsealedShard(captured.path) as shard, _one_thread():
        checker, columns = ShardChecker(shard, job.layer_ids), captured.samples
        for sample, segments, token_ids in zip(
            columns["sample_id"].to_pylist(), segments_of(columns), columns["token_ids"], strict=True
        ):
            if sample in excluded:
                continue
            result = checker.check(segments, torch.from_numpy(token_ids.values.to_numpy().copy()))
            if isinstance(result, RowFailure):
                if result.reason in CAPTURE_FAULTS:
                    raise CaptureError(
                        f"shard {captured.shard}, sample {sample}: {result.reason}: {result.detail}. Such rows "
                        "come from the capture, not from the sample; nothing of this shard is kept"
                    )
                excluded[sample] = Excluded(sample_id=sample, reason=result.reason, detail=result.detail)
                if sample not in known:
                    faults.add(checker.faulty(segments) or sample)
            else:
                stats[sample] = result
    if len(faults) > max(MOST_FAILED, MOST_FAILED_SHARE * len(columns)):
        failed = len(excluded.keys() - known)
        reasons = Counter(item.reason for item in excluded.values())
        raise CaptureError(
            f"shard {captured.shard}: {failed} of {len(columns)} samples fail their row checks ({dict(reasons)}); so "
            "many are not the samples' fault. Nothing of this shard is kept; check the machine, the dtype "
            "(model.dtype) and the model"
        )
    return stats, list(excluded.values())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Several shards are checked at once, beside an engine: torch's own threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # of this thread alone
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _kept(captured: Captured, stats: Mapping[str, SampleStats]) -> dict[str, list[Run]]:
    """Segments of the samples that are kept; rows that only others use are left out of the shard."""
    names = captured.samples["sample_id"].to_pylist()
    held = {name: runs for name, runs in zip(names, segments_of(captured.samples), strict=True) if name in stats}
    return dict(zip(held, fused(list(held.values())), strict=True))


def _seal(job: Job, captured: Captured, nodes: Sequence[Run]) -> SealedShard:
    # Only what every attempt at this shard would write: the digest must not depend on who wrote it or when.
    provenance = {
        "architecture": job.model.architecture,
        "fingerprint": job.plan.fingerprint,
        "shard": str(captured.shard),
        "norm_state": "pre",
        "n_layers": str(job.model.n_layers),
        "vllm": str(captured.engine.get("vllm", "")),
        "written_by": "coresample",
    }
    sealed = seal_shard(
        captured.path,
        keep=[Segment(first, rows) for first, rows in nodes],
        metadata=provenance,
        encoding=job.encoding,
        target=seal_target(job.root, captured.path, job.encoding),
        durable=job.root.is_local,
    )
    captured.xxh3_128 = sealed.xxh3_128
    if sealed.path != captured.path:
        captured.path.unlink()
        captured.path = sealed.path
    return sealed


def _records(
    captured: Captured,
    kept: Mapping[str, list[Run]],
    nodes: Sequence[Run],
    sealed: SealedShard,
    stats: Mapping[str, SampleStats],
) -> list[SampleRecord]:
    places = {
        node: SegmentRecord(
            shard=sealed.sha256,
            first_row=new.first_row,
            rows=new.rows,
            byte_offset=new.byte_offset,
            byte_length=new.byte_length,
            xxh3=new.xxh3,
        )
        for node, new in zip(nodes, sealed.segments, strict=True)
    }
    return [
        SampleRecord(
            sample_id=sample,
            n_tokens=sum(rows for _, rows in segments),
            segments=[places[segment] for segment in segments],
            greedy_token=captured.done.greedy.get(sample),
            top1_token=captured.done.top1.get(sample),
            norm_mean=stats[sample].norm_mean,
            norm_max=stats[sample].norm_max,
        )
        for sample, segments in kept.items()
    ]
