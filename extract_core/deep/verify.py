"""Extract some samples of a version again and hold them against what is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from extract_core import spool
from extract_core.deep.compare import Comparison, LayerResult, agreement
from extract_core.deep.rebuild import BATCH_BYTES, rebuild
from extract_core.engine.protocol import ShardJob, laid_out
from extract_core.engine.supervisor import EngineSupervisor
from extract_core.errors import CaptureError, SettingsError
from extract_core.job import new_attempt
from extract_core.progress import reporter
from extract_core.reader import HiddenStatesDataset
from extract_core.store.unsealed import UnsealedShard

SAMPLES = 16
"""Samples compared unless the caller says otherwise."""


@dataclass
class DeepReport:
    """What was compared and what differs."""

    root: str
    version: int
    seed: int
    samples: int
    rows: int = 0
    layers: list[LayerResult] = field(default_factory=list)
    next_token: dict[str, Any] | None = None
    tolerance: float = 0.0
    row_limit: float = 0.0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every compared row is what the model gives now."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"ok": self.ok, **asdict(self), "layers": [layer.to_dict() for layer in self.layers]}


def verify_deep(
    dataset: HiddenStatesDataset,
    *,
    samples: int = SAMPLES,
    seed: int = 0,
    model: str | None = None,
    trust_remote_code: bool = False,
    engine: Mapping[str, Any] | None = None,
) -> DeepReport:
    """Extract sampled rows of a version again, with the model and the engine settings that its manifest names.

    Args:
        dataset: the version, with all its layers and splits and in its stored dtype.
        samples: how many samples, or all where there are no more.
        seed: decides which.
        model: where the model is now, when it is not where the manifest says.
        trust_remote_code: allow code that came with the model, where the version was made so.
        engine: engine settings of this machine, such as ``gpu_memory_utilization``.

    Raises:
        SettingsError, ModelError, MemoryPlanError: it cannot be done here; nothing was loaded.
        EngineError: the engine failed.
        CorruptDataError: stored rows do not fit their checksum.
    """
    if samples < 1:
        raise SettingsError(f"--samples must be at least 1, got {samples}")
    manifest = dataset.manifest
    if not len(dataset):
        raise SettingsError(f"{dataset.root.url}@{manifest.version} has no samples to compare")
    chosen = np.random.default_rng(seed).choice(len(dataset), min(samples, len(dataset)), replace=False)
    positions = sorted(int(position) for position in chosen)
    lengths = dataset.index.column("n_tokens").to_numpy()
    report = DeepReport(dataset.root.url, manifest.version, seed, len(positions))
    scratch = spool.temp_spool()
    rebuilt = rebuild(
        manifest,
        [int(lengths[position]) for position in positions],
        model=model,
        trust_remote_code=trust_remote_code,
        own=engine or {},
        spool=scratch,
    )
    report.notes += rebuilt.notes
    for text in rebuilt.notes:
        reporter().note(text)
    comparison = Comparison(manifest.layer_ids, rebuilt.spec.dtype, manifest.dtype)
    report.tolerance, report.row_limit = comparison.tolerance, comparison.row_limit
    report.rows = int(sum(lengths[position] for position in positions))
    reporter().stage("Extracting again", total=report.rows, unit="tokens")
    spool.clean(scratch)
    tokens: dict[str, int] = {}
    with (
        spool.RunFolder(scratch) as folder,
        EngineSupervisor(
            rebuilt.spec,
            folder.logs,
            start_timeout_s=rebuilt.settings.start_timeout_s,
            step_timeout_s=rebuilt.settings.step_timeout_s,
            on_stage=lambda stage: reporter().note(f"engine: {stage}"),
        ) as supervisor,
    ):
        done = 0
        for batch in _batches(positions, lengths, dataset):
            done += _compare(dataset, supervisor, folder, batch, comparison, tokens, report, done)
        report.engine = dict(supervisor.info)
    report.layers = comparison.finish()
    report.problems += [str(problem) for problem in comparison.problems]
    _next_tokens(dataset, positions, tokens, report)
    return report


def _batches(positions: list[int], lengths: np.ndarray[Any, Any], dataset: HiddenStatesDataset) -> Iterator[list[int]]:
    row_bytes = dataset.manifest.row_format.row_bytes
    batch: list[int] = []
    for position in positions:
        if batch and int(lengths[[*batch, position]].sum()) * row_bytes > BATCH_BYTES:
            yield batch
            batch = []
        batch.append(position)
    yield batch


def _compare(
    dataset: HiddenStatesDataset,
    engine: EngineSupervisor,
    folder: spool.RunFolder,
    batch: list[int],
    comparison: Comparison,
    tokens: dict[str, int],
    report: DeepReport,
    before: int,
) -> int:
    """One job of the engine; returns its rows."""
    items = [dataset[position] for position in batch]
    samples, rows = laid_out([item["input_ids"].numpy() for item in items], "deep-")
    names = {sample.sample_id: item["sample_id"] for sample, item in zip(samples, items, strict=True)}
    attempt = new_attempt()
    path = folder.shard(0, attempt)
    last = dataset.manifest.layer_ids[-1] == dataset.manifest.n_layers
    try:
        done = engine.extract(
            ShardJob(attempt, str(path), rows, samples, want_top1=last),
            lambda progress: reporter().advance(before + progress.tokens),
        )
        tokens |= {names[name]: token for name, token in done.greedy.items()}
        with UnsealedShard(path) as shard:
            for sample, item in zip(samples, items, strict=True):
                if sample.sample_id in done.refused:
                    report.problems.append(
                        f"sample {item['sample_id']}: the engine refuses it now: {done.refused[sample.sample_id]}"
                    )
                    continue
                rows_again, echo = shard.sample(sample.segments)
                if not np.array_equal(echo.numpy(), item["input_ids"].numpy()):
                    raise CaptureError(
                        f"sample {item['sample_id']}: the forward read other tokens than were sent; the capture does "
                        "not work here and nothing can be said of the stored rows"
                    )
                comparison.add(item["sample_id"], item["hidden_states"], rows_again)
    finally:
        path.unlink(missing_ok=True)
    return rows


def _next_tokens(
    dataset: HiddenStatesDataset, positions: list[int], tokens: dict[str, int], report: DeepReport
) -> None:
    """Where layer n is stored, the engine's next tokens belong to the version, too."""
    if dataset.manifest.layer_ids[-1] != dataset.manifest.n_layers:
        return
    rows = dataset.index.take(positions)
    names = rows.column("sample_id").to_pylist()
    found = agreement(rows.column("greedy_token").to_pylist(), [tokens.get(name) for name in names])
    report.next_token = found
    if found is not None and found["share"] < found["least"]:
        report.problems.append(
            f"the engine's next token is that of the index for {found['same']} of {found['samples']} samples, expected "
            f"at least {found['least']:.0%}"
        )
