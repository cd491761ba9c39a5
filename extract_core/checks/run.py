"""Checks of a whole run, from its commit records, before anything is published.

They look for faults that no single sample shows: a shard captured from other layers or other requests, a layer that is
a copy of another, samples lost between plan and commits. One odd but honest chat must not stop a run, so the checks on
values fail on a pattern (many samples, or most of a shard) and only name single outliers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract_core.settings import CheckSettings
from extract_core.store.commits import ShardCommits, all_records, state_of
from extract_core.store.records import Accounting, SampleRecord

MIN_TOKENS = 8
"""Shorter samples have too few positions for a typical norm; they are not judged."""
MIN_SAMPLES = 8
"""Fewer samples have no spread to judge by."""
FLOOR_MEAN, FLOOR_MAX = 0.1, 0.5
"""Least robust standard deviation of log mean norm and log maximal norm: very uniform data must not make it tiny."""
OUTLIER_SHARE, OUTLIERS_FREE = 0.01, 2
"""Share of outliers that a run may have, and the number that is free in a small one."""
SHARD_SHARE = 0.5
"""Share of a shard's samples beyond which its outliers are a fault of the shard."""
COPY_SHARE = 0.01
"""Share of samples in which two layers may have the same norms (to 6 digits) by accident."""

_NAMED = 10
_RUN_Z, _SHARD_Z = 1.96, 3.29  # 95 % for the run, 99.9 % for each of many shards


@dataclass(frozen=True)
class CheckResult:
    """One check: its value and the threshold it is held to, where it has them."""

    name: str
    passed: bool
    value: float | None = None
    threshold: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class CheckReport:
    """All checks of a run. ``outliers`` are samples with unusual norms, worst first; naming them fails nothing.

    ``state`` says which commit records were checked (``store.commits.state_of``).
    """

    results: list[CheckResult]
    outliers: list[str] = field(default_factory=list)
    state: str = ""

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(result.passed for result in self.results)

    @property
    def failures(self) -> list[CheckResult]:
        """Checks that did not pass."""
        return [result for result in self.results if not result.passed]

    def to_dict(self) -> dict[str, Any]:
        """For the manifest: one entry per check."""
        return {
            result.name: {
                "passed": result.passed,
                "value": result.value,
                "threshold": result.threshold,
                "detail": result.detail,
            }
            for result in self.results
        }


def check_run(
    commits: Mapping[int, ShardCommits],
    planned: Mapping[int, Collection[str]],
    accounting: Accounting,
    *,
    layer_ids: Sequence[int],
    settings: CheckSettings,
) -> CheckReport:
    """Check a complete run.

    Args:
        commits: all commit records of the plan by shard number, every round.
        planned: ids of the samples that the plan puts into each shard.
        accounting: where the input rows went.
        layer_ids: the job's layer ids.
        settings: thresholds.
    """
    samples = [(shard, sample) for shard, commit in sorted(commits.items()) for sample in commit.samples]
    norms, outliers = _norms(samples, layer_ids, settings.norm_spread)
    return CheckReport(
        [
            _coverage(commits, planned),
            _accounting(commits, accounting),
            _layers(commits, layer_ids),
            _final_norm(commits),
            _copies(samples, layer_ids),
            norms,
            _agreement(samples, settings.top1_agreement),
        ],
        outliers,
        state_of(commits),
    )


def _coverage(commits: Mapping[int, ShardCommits], planned: Mapping[int, Collection[str]]) -> CheckResult:
    """Every planned sample is in the commit of its own shard, as a sample or as excluded, and in no other."""
    problems, seen = [], Counter[str]()
    for shard, ids in sorted(planned.items()):
        commit = commits.get(shard)
        if commit is None:
            problems.append(f"shard {shard} has no commit record")
            continue
        found = [item.sample_id for item in commit.samples] + [item.sample_id for item in commit.excluded]
        seen.update(found)
        for what, names in (("lacks", set(ids).difference(found)), ("has unplanned", set(found).difference(ids))):
            if names:
                problems.append(f"shard {shard} {what} {len(names)} samples: {_some(sorted(names))}")
    problems += [f"shard {shard} is committed but not planned" for shard in sorted(set(commits) - set(planned))]
    repeated = sorted(name for name, times in seen.items() if times > 1)
    if repeated:
        problems.append(f"{len(repeated)} samples are in more than one shard: {_some(repeated)}")
    total = sum(len(ids) for ids in planned.values())
    return CheckResult(
        "coverage", not problems, float(len(problems)), 0.0, _some(problems) or f"{total} samples planned"
    )


def _accounting(commits: Mapping[int, ShardCommits], accounting: Accounting) -> CheckResult:
    """The equation of the accounting holds, and the commits hold what is said to be published."""
    problems = []
    if accounting.total != accounting.input:
        problems.append(f"{accounting.input} input rows but {accounting.total} accounted for")
    published = sum(len(commit.samples) for commit in commits.values())
    if published != accounting.published:
        problems.append(f"{accounting.published} samples are said to be published, the commits hold {published}")
    excluded = Counter(item.reason for commit in commits.values() for item in commit.excluded)
    stated = {reason: count for reason, count in accounting.quarantined.items() if count}
    if dict(excluded) != stated:
        problems.append(f"quarantined is said to be {stated}, the commits exclude {dict(excluded)}")
    equation = (
        f"{accounting.input} = {accounting.published} published + {accounting.duplicates} duplicates + "
        f"{sum(accounting.dropped.values())} dropped + {sum(accounting.quarantined.values())} quarantined"
    )
    return CheckResult("accounting", not problems, float(len(problems)), 0.0, _some(problems) or equation)


def _layers(commits: Mapping[int, ShardCommits], layer_ids: Sequence[int]) -> CheckResult:
    """All shards have the job's layers, one hidden size and one dtype."""
    shapes = Counter((tuple(record.layer_ids), record.hidden_size, record.dtype) for record in all_records(commits))
    problems = [
        f"{count} shards have layers {list(layers)}, the job asks for {list(layer_ids)}"
        for (layers, _, _), count in shapes.items()
        if layers != tuple(layer_ids)
    ]
    if len({(size, dtype) for _, size, dtype in shapes}) > 1:
        problems.append(f"hidden sizes or dtypes differ: {sorted({(size, dtype) for _, size, dtype in shapes})}")
    return CheckResult("layers", not problems, float(len(problems)), 0.0, _some(problems))


def _final_norm(commits: Mapping[int, ShardCommits]) -> CheckResult:
    """The engines of all shards had the same final norm; records from before norms were kept say nothing."""
    shards: dict[tuple[object, ...], list[str]] = {}
    for record in all_records(commits):
        if record.final_norm is not None and (record.object is not None or not record.round):
            name = f"{record.shard}.r{record.round}" if record.round else str(record.shard)
            shards.setdefault(record.final_norm.identity, []).append(name)
    problems = [
        f"shards {_some(numbers, ', ')} have norm {kind}, epsilon {epsilon:g}, offset {offset:g}, sha256 {digest}"
        for (kind, epsilon, offset, digest), numbers in shards.items()
    ]
    detail = _some(problems) + "; delete the files of the wrong shards and run the job again"
    passed = len(shards) < 2
    return CheckResult("final_norm", passed, float(len(shards)), 1.0, "" if passed else detail)


def _copies(samples: Sequence[tuple[int, SampleRecord]], layer_ids: Sequence[int]) -> CheckResult:
    """No two layers are the same: their mean and maximal norms differ."""
    worst, detail = 0.0, ""
    if samples:
        mean, peak = (np.array([getattr(s, name) for _, s in samples]) for name in ("norm_mean", "norm_max"))
        for i in range(mean.shape[1]):
            for j in range(i + 1, mean.shape[1]):
                share = float(np.mean((mean[:, i] == mean[:, j]) & (peak[:, i] == peak[:, j])))
                if share > worst:
                    worst = share
                    detail = f"layers {layer_ids[i]} and {layer_ids[j]} have the same norms in {share:.1%} of samples"
    return CheckResult("layers_differ", worst <= COPY_SHARE, worst, COPY_SHARE, detail)


def _norms(
    samples: Sequence[tuple[int, SampleRecord]], layer_ids: Sequence[int], spread: float
) -> tuple[CheckResult, list[str]]:
    """Typical norms of samples lie within the run's own spread, per layer.

    A sample's typical norm leaves out its largest position: the first token of a sequence often has a norm hundreds of
    times that of the others, which would make the mean a measure of the sample's length. The spread is 1.4826 times
    the median absolute deviation of the logarithm, at least ``FLOOR_MEAN``. The maximal norm is judged on its upper
    side alone, for single rows of garbage.
    """
    name, allowed = "norms", OUTLIER_SHARE
    judged = [(shard, sample) for shard, sample in samples if sample.n_tokens >= MIN_TOKENS]
    if len(judged) < MIN_SAMPLES:
        few = f"not judged: {len(judged)} samples of at least {MIN_TOKENS} tokens, {MIN_SAMPLES} are needed"
        return CheckResult(name, True, None, allowed, few), []
    tokens = np.array([sample.n_tokens for _, sample in judged], dtype=float)[:, None]
    mean, peak = (np.array([getattr(s, key) for _, s in judged], dtype=float) for key in ("norm_mean", "norm_max"))
    rest = np.maximum((tokens * mean - peak) / (tokens - 1), 0)
    with np.errstate(divide="ignore"):
        typical, highest = np.log(rest), np.log(peak)
    z = np.maximum(np.abs(_robust_z(typical, FLOOR_MEAN)), _robust_z(highest, FLOOR_MAX))
    worst_layer = z.argmax(axis=1)
    worst = z[np.arange(len(judged)), worst_layer]
    beyond = worst > spread
    order = [int(i) for i in np.argsort(-worst, kind="stable") if beyond[i]]
    outliers = [judged[i][1].sample_id for i in order]

    problems = []
    if len(outliers) > max(OUTLIERS_FREE, OUTLIER_SHARE * len(judged)):
        problems.append(f"{len(outliers)} of {len(judged)} samples have unusual norms")
    totals, bad = Counter(shard for shard, _ in judged), Counter(judged[i][0] for i in order)
    for shard, count in sorted(bad.items()):
        if count > OUTLIERS_FREE and count > SHARD_SHARE * totals[shard]:
            problems.append(f"{count} of {totals[shard]} samples of shard {shard} have unusual norms")
    examples = [
        f"sample {judged[i][1].sample_id} layer {layer_ids[worst_layer[i]]}: "
        f"typical norm {rest[i, worst_layer[i]]:.4g}, "
        f"run median {math.exp(float(np.median(typical[:, worst_layer[i]]))):.4g}, {worst[i]:.1f} deviations"
        for i in order[:_NAMED]
    ]
    detail = "; ".join(problems + examples) or f"{len(judged)} samples within {spread:g} robust deviations"
    return CheckResult(name, not problems, len(outliers) / len(judged), allowed, detail), outliers


def _robust_z(logs: NDArray[np.float64], floor: float) -> NDArray[np.float64]:
    """Distance from the median per column, in robust standard deviations."""
    median = np.median(logs, axis=0)
    with np.errstate(invalid="ignore"):
        off = np.nan_to_num(logs - median, nan=0.0, posinf=np.inf, neginf=-np.inf)
    deviation = np.maximum(1.4826 * np.median(np.abs(off), axis=0), floor)
    return np.asarray(off / deviation)


def _agreement(samples: Sequence[tuple[int, SampleRecord]], threshold: float) -> CheckResult:
    """argmax(lm_head(norm(h_n))) at the last position is the token that the engine chose.

    Rounding makes a few near-ties disagree, and a small run may have bad luck, so the rate fails when even the upper
    end of its Wilson score interval (E. B. Wilson, 1927) is below the threshold; likewise for each shard, more
    strictly, because rows of other requests would hide in one shard of many.
    """
    name = "top1_agreement"
    measured = [
        (shard, sample.greedy_token == sample.top1_token, sample.sample_id)
        for shard, sample in samples
        if sample.greedy_token is not None and sample.top1_token is not None
    ]
    if not measured:
        return CheckResult(name, True, None, threshold, "not measured: the last layer is not captured")
    hits = sum(agrees for _, agrees, _ in measured)
    rate = hits / len(measured)
    problems = []
    if _wilson_upper(hits, len(measured), _RUN_Z) < threshold:
        problems.append(f"{hits} of {len(measured)} samples agree ({rate:.1%}), at least {threshold:.1%} are expected")
    totals = Counter(shard for shard, _, _ in measured)
    good = Counter(shard for shard, agrees, _ in measured if agrees)
    for shard, count in sorted(totals.items()):
        if count >= MIN_SAMPLES and _wilson_upper(good[shard], count, _SHARD_Z) < threshold:
            problems.append(f"{good[shard]} of {count} samples of shard {shard} agree")
    wrong = [sample_id for _, agrees, sample_id in measured if not agrees]
    detail = "; ".join([*problems, *([f"disagreeing: {_some(wrong)}"] if wrong else [])])
    return CheckResult(name, not problems, rate, threshold, detail or f"all {len(measured)} samples agree")


def _wilson_upper(hits: int, count: int, z: float) -> float:
    rate = hits / count
    centre = rate + z * z / (2 * count)
    margin = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return (centre + margin) / (1 + z * z / count)


def _some(items: Sequence[str], between: str = "; ") -> str:
    more = len(items) - _NAMED
    return between.join(items[:_NAMED]) + (f" and {more} more" if more > 0 else "")
