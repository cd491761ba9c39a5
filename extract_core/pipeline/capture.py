"""From a shard of the plan to a spool file full of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from extract_core.engine.preflight import PROMPTS, SETS, TOKENS, Probe
from extract_core.engine.preflight import preflight as run_preflight
from extract_core.engine.protocol import FinalNorm, JobSample, ShardDone, ShardJob
from extract_core.engine.supervisor import EngineSupervisor
from extract_core.errors import (
    EngineCrashedError,
    EngineError,
)
from extract_core.job import Job, new_attempt
from extract_core.pipeline.todo import ShardTask
from extract_core.planning.memory import wants_reference
from extract_core.planning.plan import segments_of
from extract_core.progress import reporter
from extract_core.spool import RunFolder
from extract_core.store.records import (
    CommitRecord,
    Excluded,
)

_SHARDS_LOOKED_AT = 4  # for prompts of the self-test


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
    xxh3_128: str = ""
    """Of the sealed file."""
    committed: bool = False
    """Its commit record stands, and the spool file is gone."""
    stored: bool = False
    """The sealed file is in the store and durable."""
    task: ShardTask | None = None
    """What was asked for; None: the whole planned shard."""

    @property
    def name(self) -> str:
        """For people: ``00012``, ``00012.r1``."""
        return self.task.name if self.task is not None else f"{self.shard:05d}"


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


def capture_shard(
    job: Job,
    engine: EngineSupervisor,
    folder: RunFolder,
    task: ShardTask,
    on_tokens: Callable[[int], None] = lambda tokens: None,
    following: Callable[[], ShardTask | None] = lambda: None,
) -> Captured:
    """Run the samples of one shard through the engine, leaving out those that kill it.

    An engine that dies is replaced here: the samples it held run alone, so that the one that kills it is known the
    second time, and the others go on. Samples that an earlier run knew as killers run alone from the start, and one
    more death decides.

    Args:
        job: the job.
        engine: its engine.
        folder: this run's part of the spool.
        task: which samples.
        on_tokens: called with the tokens of this shard computed so far.
        following: asked until it gives the shard to go on with, which the engine gets so that its steps stay full.

    Raises:
        EngineCrashedError: the engine died and no sample could be blamed (trying again may help), or so many were to
            blame that it is not the samples.
        CaptureError: rows did not arrive where they belong.
        NoSpaceError: the spool is full.
    """
    shard, table = task.shard, task.table(job)
    known = set(task.known_killers)
    excluded: dict[str, Excluded] = {}
    request = engine.begun(task.name)
    samples = _samples(table) if request is None else request.samples
    while True:
        if len(excluded) == len(samples):  # no engine is needed to say so
            attempt = new_attempt()
            path = folder.shard(shard, attempt)
            done = ShardDone(attempt=attempt, greedy={}, top1={}, refused={}, counters={})
            break
        if request is None:
            left = [s for s in samples if s.sample_id not in excluded]
            request = _request(job, folder, task, left, {*engine.suspects(), *known})
        attempt, path = request.attempt, Path(request.path)
        suspected = set(engine.suspects())

        def ahead(suspected: set[str] = suspected) -> ShardJob | None:
            # Not while it is unknown which sample kills the engine: the next shard would be lost with this one.
            if suspected or (then := following()) is None or then.known_killers:
                return None
            return _request(job, folder, then, _samples(then.table(job)))

        try:
            done = engine.extract(request, lambda progress: on_tokens(progress.tokens), ahead)
        except EngineCrashedError as error:
            path.unlink(missing_ok=True)
            request = None
            again = [sample for sample in known if engine.kills[sample] and sample not in excluded]
            killers = [*again, *(sample for sample in engine.killers() if sample not in {*excluded, *again})]
            if not killers and not set(engine.suspects()) - suspected:
                raise
            for sample in killers:
                excluded[sample] = _killer(sample, error, engine.kills.pop(sample))  # judged, not to be blamed again
            engine.blamed += len(killers) - len(again)
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
    if repeated := int(done.counters.get("samples_again", 0)):
        reporter().note(
            f"shard {task.name}: {repeated} of {len(samples)} samples were computed again without the prefix cache, "
            "which had served rows that no other sample stores"
        )
    info = {**engine.info, "preflight": engine.preflight}
    return Captured(shard, attempt, path, table, done, list(excluded.values()), info, engine.final_norm, task=task)


def _samples(table: pa.Table) -> list[JobSample]:
    columns = zip(table["sample_id"].to_pylist(), segments_of(table), table["token_ids"], strict=True)
    return [JobSample(name, segments, ids.values.to_numpy().astype("<i4").tobytes()) for name, segments, ids in columns]


def _request(
    job: Job, folder: RunFolder, task: ShardTask, samples: list[JobSample], solo: Iterable[str] = ()
) -> ShardJob:
    attempt = new_attempt()
    return ShardJob(
        attempt=attempt,
        path=str(folder.shard(task.shard, attempt)),
        rows=task.rows,
        samples=samples,
        solo=sorted(solo),
        want_top1=job.captures_last,
        shard=task.name,
    )


def _killer(sample: str, error: EngineCrashedError, kills: int) -> Excluded:
    times = f"{kills} times" if kills > 1 else "again, as in an earlier run,"
    return Excluded(
        sample_id=sample,
        reason="kills_engine",
        detail=f"the engine died {times} with it in flight; last: {error}",
        attempts=kills,
    )


def most_killers(job: Job) -> int:
    """Samples that may be blamed for the engine's deaths in one run, before the engine itself is."""
    return max(4, int((1 - job.settings.completeness) * job.plan.meta.input))


def preflight(job: Job, engine: EngineSupervisor, folder: RunFolder) -> dict[str, Any]:
    """Self-test of the engine on the first real samples; its figures go into every commit record.

    Raises:
        PreflightError, EngineError: nothing is extracted.
    """
    wanted = job.settings.preflight.reference if wants_reference(job.settings, job.model) else "never"
    if wanted == "never" and not job.captures_last:
        reporter().note(
            "nothing compares these layers with the model's own output; add the layer last, or set preflight.reference "
            "to always"
        )
    engine.preflight = run_preflight(
        engine,
        _prompts(job),
        Probe(
            layer_ids=job.layer_ids,
            n_layers=job.model.n_layers,
            compute_dtype=job.model.dtype,
            folder=folder.path,
            reference=wanted,
            shares=job.plan.meta.rows < job.plan.meta.tokens,
        ),
    )
    return engine.preflight


def _prompts(job: Job) -> list[np.ndarray[Any, Any]]:
    """Samples for the self-test, of different beginnings as far as a look at some shards finds them."""
    found: dict[bytes, np.ndarray[Any, Any]] = {}
    tables = islice(job.plan.shards(), _SHARDS_LOOKED_AT)
    for ids in (ids.values.to_numpy() for table in tables for ids in table["token_ids"]):
        found.setdefault(ids[:TOKENS].tobytes(), ids)
        if len(found) == PROMPTS * SETS:
            break
    return list(found.values())
