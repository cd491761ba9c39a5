"""From a shard of the plan to a spool file full of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from extract_core.engine.preflight import PROMPTS, SETS, Probe
from extract_core.engine.preflight import preflight as run_preflight
from extract_core.engine.protocol import FinalNorm, JobSample, ShardDone, ShardJob
from extract_core.engine.supervisor import KILLS_TO_QUARANTINE, EngineSupervisor
from extract_core.errors import (
    EngineCrashedError,
    EngineError,
)
from extract_core.job import Job, new_attempt
from extract_core.planning.memory import wants_reference
from extract_core.progress import reporter
from extract_core.spool import RunFolder
from extract_core.store.commits import read_commits
from extract_core.store.objects import lost_by_commits
from extract_core.store.records import (
    CommitRecord,
    Excluded,
)


@dataclass
class Captured:
    """A shard whose rows are in a spool file and not yet checked."""

    shard: int
    attempt: str
    path: Path
    samples: pa.Table
    done: ShardDone
    excluded: list[Excluded] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)
    final_norm: FinalNorm | None = None
    """None where it is unknown; ``engine["final_norm"]`` then says why."""
    record: CommitRecord | None = None
    """Set when the rows are checked and the file is sealed: a commit that is tried again goes on from there."""
    stored: bool = False
    """The sealed file is in the store and durable."""


def make_supervisor(job: Job, folder: RunFolder) -> EngineSupervisor:
    """The engine of a job; it starts at the first shard.

    Raises:
        MemoryPlanError: it would not fit; nothing is loaded.
    """
    job.require_memory()
    engine = job.settings.engine
    return EngineSupervisor(
        job.engine_spec,
        folder.logs,
        start_timeout_s=engine.start_timeout_s,
        step_timeout_s=engine.step_timeout_s,
        on_stage=lambda stage: reporter().note(f"engine: {stage}"),
    )


def open_shards(job: Job) -> list[int]:
    """Shards of the plan to extract: without a commit record, or whose file is no longer there.

    A lost file is made again from the same plan; where the engine computes the same bits, it is the same file under the
    same name, and the version is whole again. A lost final norm comes back with the first shard that refers to it.
    """
    commits = read_commits(job.root, job.plan.fingerprint)
    lost = lost_by_commits(job.root, commits.values())
    again: dict[str, int] = {}
    for shard, commit in sorted(commits.items()):
        for path in lost.keys() & commit.objects.keys():
            again.setdefault(path, shard)
    needed = set(again.values())
    return [shard.index for shard in job.plan.meta.shards if shard.index not in commits or shard.index in needed]


def capture_shard(
    job: Job,
    engine: EngineSupervisor,
    folder: RunFolder,
    shard: int,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Captured:
    """Run one shard through the engine, leaving out samples that kill it.

    An engine that dies is replaced here: the samples it held run alone, so that the one that kills it is known the
    second time, and the others go on.

    Args:
        job: the job.
        engine: its engine.
        folder: this run's part of the spool.
        shard: index in the plan.
        on_tokens: called with the tokens of this shard computed so far.

    Raises:
        EngineCrashedError: the engine died and no sample could be blamed (trying again may help), or so many were to
            blame that it is not the samples.
        CaptureError: rows did not arrive where they belong.
        NoSpaceError: the spool is full.
    """
    table = job.plan.shard(shard)
    samples = [
        JobSample(sample_id, first, token_ids.values.to_numpy().astype("<i4").tobytes())
        for sample_id, first, token_ids in zip(
            table["sample_id"].to_pylist(), table["first_row"].to_pylist(), table["token_ids"], strict=True
        )
    ]
    excluded: dict[str, Excluded] = {}
    while True:
        attempt = new_attempt()
        path = folder.shard(shard, attempt)
        request = ShardJob(
            attempt=attempt,
            path=str(path),
            rows=job.plan.meta.shards[shard].rows,
            samples=[s for s in samples if s.sample_id not in excluded],
            solo=engine.suspects(),
            want_top1=job.captures_last,
        )
        suspected = set(engine.suspects())
        try:
            done = engine.extract(request, lambda progress: on_tokens(progress.tokens))
        except EngineCrashedError as error:
            path.unlink(missing_ok=True)
            killers = [sample for sample in engine.killers() if sample not in excluded]
            if not killers and not set(engine.suspects()) - suspected:
                raise
            for sample in killers:
                excluded[sample] = _killer(sample, error)
                engine.kills.pop(sample)  # judged: it must not be blamed for a death in a later shard
            engine.blamed += len(killers)
            if engine.blamed > most_killers(job):
                raise EngineError(
                    f"the engine was killed by {engine.blamed} different samples, more than this job may lose; it is "
                    f"rather the engine or the machine. Last: {error}",
                    engine_traceback=error.engine_traceback,
                    log_tail=error.log_tail,
                    report=error.report,
                ) from error
            reporter().note(f"shard {shard}: {error}; replacing the engine")
            continue
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        break
    for sample, why in done.refused.items():
        reason, _, detail = why.partition(": ")
        excluded[sample] = Excluded(sample_id=sample, reason=reason, detail=detail)
    info = {**engine.info, "preflight": engine.preflight}
    return Captured(shard, attempt, path, table, done, list(excluded.values()), info, engine.final_norm)


def _killer(sample: str, error: EngineCrashedError) -> Excluded:
    return Excluded(
        sample_id=sample,
        reason="kills_engine",
        detail=f"the engine died {KILLS_TO_QUARANTINE} times with it in flight; last: {error}",
        attempts=KILLS_TO_QUARANTINE,
    )


def most_killers(job: Job) -> int:
    """Samples that may be blamed for the engine's deaths in one run, before the engine itself is."""
    return max(4, int((1 - job.settings.completeness) * job.plan.meta.input))


def preflight(job: Job, engine: EngineSupervisor, folder: RunFolder) -> dict[str, Any]:
    """Self-test of the engine on the first real samples; its figures go into every commit record.

    Raises:
        PreflightError, EngineError: nothing is extracted.
    """
    prompts = (ids.values.to_numpy() for table in job.plan.shards() for ids in table["token_ids"])
    wanted = job.settings.preflight.reference if wants_reference(job.settings, job.model) else "never"
    if wanted == "never" and not job.captures_last:
        reporter().note(
            "nothing compares these layers with the model's own output; add the layer last, or set preflight.reference "
            "to always"
        )
    engine.preflight = run_preflight(
        engine,
        list(islice(prompts, PROMPTS * SETS)),
        Probe(
            layer_ids=job.layer_ids,
            n_layers=job.model.n_layers,
            compute_dtype=job.model.dtype,
            folder=folder.path,
            reference=wanted,
        ),
    )
    return engine.preflight
