"""The JSON records of a dataset: commit records and manifests.

Every record is written as canonical JSON (sorted keys, no spaces, UTF-8, one newline at the end) with a checksum of
itself, and read strictly: bytes that differ from what was written, unknown fields and wrong types are CorruptDataError.
A field that is added or changes its meaning raises ``schema_version``; older records stay readable.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from extract_core.errors import CorruptDataError
from extract_core.store import layout
from extract_core.store.encoding import NONE, Encoding, encodes
from extract_core.store.shard import RowFormat

LAYER_MEANING = (
    "Layer id k is the residual stream after k decoder blocks: 0 is the embeddings, k is hidden_states[k] of a Hugging "
    "Face forward with output_hidden_states=True, and n (the number of blocks) is the last block's output BEFORE the "
    "final norm (Hugging Face returns hidden_states[n] after it); final_norm says what to apply to it. vLLM counts the "
    "same way."
)

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
Attempt = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
SampleId = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Dtype = Literal["bfloat16", "float16", "float32"]
LayerIds = Annotated[list[Count], Field(min_length=1)]

_CHECKSUM = "checksum"


def utc_now() -> str:
    """The time in ISO 8601, UTC, to the second: ``2026-01-31T12:00:00Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def canonical_json(tree: Any) -> bytes:
    """JSON in the one form that records are stored and fingerprinted in: sorted keys, UTF-8, newline at the end."""
    text = json.dumps(tree, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8") + b"\n"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _Record(_Part):
    """A record with its own file."""

    kind: ClassVar[str]
    newest: ClassVar[int] = 1
    schema_version: Positive = 1

    def dump(self) -> bytes:
        """Canonical JSON with the checksum of the rest."""
        tree = self.model_dump(mode="json")
        return canonical_json({**tree, _CHECKSUM: _checksum(canonical_json(tree))})

    @classmethod
    def load(cls, data: bytes, where: str) -> Self:
        """Read a record strictly.

        Args:
            data: the bytes of its file.
            where: path or URL, for messages.

        Raises:
            CorruptDataError: says what is wrong, and whether a newer Coresample wrote it.
        """
        try:
            tree = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise CorruptDataError(f"{cls.kind} {where} is not JSON ({error}); it was damaged after writing") from error
        if not isinstance(tree, dict):
            raise CorruptDataError(f"{cls.kind} {where} holds {type(tree).__name__}, expected an object")
        found = tree.get("schema_version")
        if isinstance(found, int) and found > cls.newest:
            raise CorruptDataError(
                f"{cls.kind} {where} has schema_version {found}, this Coresample reads up to {cls.newest}; install a "
                "newer one"
            )
        checksum = tree.pop(_CHECKSUM, None)
        try:
            exact = canonical_json({**tree, _CHECKSUM: checksum}) == data
            body = canonical_json(tree)
        except ValueError:
            exact, body = False, b""
        if not exact or checksum != _checksum(body):
            raise CorruptDataError(f"{cls.kind} {where} does not match its own checksum; it was altered after writing")
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:5])
            raise CorruptDataError(f"{cls.kind} {where} does not fit its schema: {problems}") from error


def _checksum(body: bytes) -> str:
    return "sha256:" + hashlib.sha256(body).hexdigest()


class SegmentRecord(_Part):
    """A run of rows of a sample: where they are in which shard."""

    shard: Digest
    first_row: Count
    rows: Positive
    byte_offset: Count
    byte_length: Positive
    xxh3: Checksum


class SampleRecord(_Part):
    """A sample that was extracted and passed its row checks.

    ``greedy_token`` is the token that the engine chose after the last position, ``top1_token`` the argmax of
    lm_head(norm(h_n)) there; both None where layer n is not captured. Norms are L2 over channels, per layer id,
    mean and maximum over positions.
    """

    sample_id: SampleId
    n_tokens: Positive
    segments: Annotated[list[SegmentRecord], Field(min_length=1)]
    greedy_token: int | None = None
    top1_token: int | None = None
    norm_mean: list[float]
    norm_max: list[float]

    @model_validator(mode="after")
    def _rows_add_up(self) -> Self:
        rows = sum(segment.rows for segment in self.segments)
        if rows != self.n_tokens:
            raise ValueError(f"sample {self.sample_id} has {self.n_tokens} tokens but {rows} rows")
        if len(self.norm_mean) != len(self.norm_max):
            raise ValueError(
                f"sample {self.sample_id} has {len(self.norm_mean)} mean and {len(self.norm_max)} max norms"
            )
        return self


class Excluded(_Part):
    """A planned sample that was left out (quarantined): why, and after how many attempts."""

    sample_id: SampleId
    reason: Annotated[str, Field(min_length=1)]
    detail: str = ""
    attempts: Count = 1


class FinalNormRef(_Part):
    """The model's final norm, between layer n and lm_head: its kind, and the file that holds its weights.

    ``kind`` "none": the model ends without a norm; "unknown": neither of the formulas of ``store.norms`` is it, for
    ``reason``. Both have no file.
    """

    kind: Literal["rms", "layer", "none", "unknown"]
    epsilon: Annotated[float, Field(ge=0)] = 0.0
    offset: float = 0.0
    path: str | None = None
    sha256: Digest | None = None
    nbytes: Count = 0
    reason: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        stored = self.kind in ("rms", "layer")
        if (self.path is not None, self.sha256 is not None, self.nbytes > 0) != (stored,) * 3:
            raise ValueError(f"a final norm of kind {self.kind} has {'a' if stored else 'no'} file, digest and size")
        if self.sha256 is not None and self.path != layout.norm_path(self.sha256):
            raise ValueError(f"final norm {self.path} is not named by its digest {self.sha256}")
        return self

    @property
    def identity(self) -> tuple[object, ...]:
        """What must be the same in all shards of a version."""
        return self.kind, self.epsilon, self.offset, self.sha256


class ShardSource(_Part):
    """The commit record whose shard file another plan's shard refers to, and the digest of that file."""

    fingerprint: Fingerprint
    shard: Count
    round: Count = 0
    sha256: Digest


class CommitRecord(_Record):
    """Says that one shard of a plan is complete: every planned sample of it is in ``samples`` or in ``excluded``.

    Schema version 2 added ``round``: 0 for the first record of a shard; a later round holds only samples that were
    excluded before, which a later run tried again. 3 added ``source``: nothing was extracted, the record names samples
    of a file that an earlier plan stored, which may hold others as well; ``rows`` and ``nbytes`` are the file's.
    """

    kind: ClassVar[str] = "commit record"
    newest: ClassVar[int] = 3
    schema_version: Positive = 3

    fingerprint: Fingerprint
    shard: Count
    round: Count = 0
    object: str | None
    sha256: Digest | None
    nbytes: Count
    rows: Count
    layer_ids: LayerIds
    hidden_size: Positive
    dtype: Dtype
    encoding: Encoding = NONE
    samples: list[SampleRecord]
    excluded: list[Excluded]
    attempt: Attempt
    engine: dict[str, Any] = {}
    timings: dict[str, float] = {}
    source: ShardSource | None = None
    created: str = Field(default_factory=utc_now)

    @property
    def final_norm(self) -> FinalNormRef | None:
        """The norm of the engine that made the shard; None in records that were written before norms were kept."""
        found = self.engine.get("final_norm")
        return FinalNormRef.model_validate(found) if isinstance(found, dict) else None

    @property
    def objects(self) -> dict[str, int]:
        """Objects that the record refers to: path to size in bytes."""
        return _objects({} if self.object is None else {self.object: self.nbytes}, self.final_norm)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_time(self.created)
        _check_layers(self.layer_ids)
        self.final_norm  # noqa: B018 -- raises where it does not fit
        if self.object is None or self.sha256 is None:
            if self.object is not None or self.sha256 is not None or self.nbytes or self.rows or self.samples:
                raise ValueError("a commit without an object has no digest, bytes, rows or samples")
        elif self.object != layout.shard_path(self.sha256):
            raise ValueError(f"object {self.object} is not named by its digest {self.sha256}")
        elif not self.samples or not self.rows:
            raise ValueError("a commit with an object has rows and samples")
        if self.source is not None and self.source.sha256 != self.sha256:
            raise ValueError(
                f"the commit refers to shard {self.source.sha256}, but its object has digest {self.sha256}"
            )
        ids = [item.sample_id for item in self.samples] + [item.sample_id for item in self.excluded]
        if len(set(ids)) != len(ids):
            raise ValueError(f"samples are repeated: {sorted(i for i, n in Counter(ids).items() if n > 1)[:5]}")
        _check_encoding(self.encoding, self.dtype)
        row_bytes = RowFormat(len(self.layer_ids), self.hidden_size, self.dtype, self.encoding).row_bytes
        for sample in self.samples:
            if len(sample.norm_mean) != len(self.layer_ids):
                raise ValueError(f"sample {sample.sample_id} has norms of {len(sample.norm_mean)} layers")
            for segment in sample.segments:
                if segment.shard != self.sha256:
                    raise ValueError(f"sample {sample.sample_id} refers to another shard, {segment.shard}")
                if segment.first_row + segment.rows > self.rows:
                    raise ValueError(f"sample {sample.sample_id} ends outside the {self.rows} rows of the shard")
                if self.encoding == NONE and segment.byte_length != segment.rows * row_bytes:
                    raise ValueError(f"sample {sample.sample_id}: {segment.byte_length} bytes for {segment.rows} rows")
                if segment.byte_offset + segment.byte_length > self.nbytes:
                    raise ValueError(f"sample {sample.sample_id} ends outside the {self.nbytes} bytes of the shard")
        return self


class IndexRef(_Part):
    """The index of a version."""

    path: str
    sha256: Digest
    nbytes: Positive
    rows: Count

    @model_validator(mode="after")
    def _named_by_digest(self) -> Self:
        if self.path != layout.index_path(self.sha256):
            raise ValueError(f"index {self.path} is not named by its digest {self.sha256}")
        return self


class ShardRef(_Part):
    """A shard of a version."""

    path: str
    sha256: Digest
    nbytes: Positive
    rows: Positive

    @model_validator(mode="after")
    def _named_by_digest(self) -> Self:
        if self.path != layout.shard_path(self.sha256):
            raise ValueError(f"shard {self.path} is not named by its digest {self.sha256}")
        return self


class Accounting(_Part):
    """Where every input row went: input = published + duplicates + dropped + quarantined."""

    input: Count
    published: Count
    duplicates: Count = 0
    dropped: dict[str, Count] = {}
    quarantined: dict[str, Count] = {}

    @property
    def total(self) -> int:
        """The right side of the equation."""
        return self.published + self.duplicates + sum(self.dropped.values()) + sum(self.quarantined.values())

    @model_validator(mode="after")
    def _equation(self) -> Self:
        if self.total != self.input:
            raise ValueError(
                f"{self.input} input rows, but {self.published} published + {self.duplicates} duplicates + "
                f"{sum(self.dropped.values())} dropped + {sum(self.quarantined.values())} quarantined = {self.total}"
            )
        return self


class Totals(_Part):
    """Size of a version: samples, tokens of all samples (shared prefixes count for each), bytes of the shards."""

    samples: Count
    tokens: Count
    bytes: Count


class Manifest(_Record):
    """One published version of a dataset. ``spec`` is everything that the fingerprint covers.

    Schema version 2 added ``final_norm``, which is None where no commit record says what the norm is; 3 encodings.
    """

    kind: ClassVar[str] = "manifest"
    newest: ClassVar[int] = 3
    schema_version: Positive = 3

    version: Positive
    attempt: Attempt
    created: str = Field(default_factory=utc_now)
    coresample_version: str
    fingerprint: Fingerprint
    spec: dict[str, Any]
    layer_ids: LayerIds
    layer_meaning: str = LAYER_MEANING
    n_layers: Positive
    hidden_size: Positive
    dtype: Dtype
    norm_state: Literal["pre"] = "pre"
    final_norm: FinalNormRef | None = None
    encoding: Encoding = NONE
    index: IndexRef
    shards: list[ShardRef]
    accounting: Accounting
    totals: Totals
    checks: dict[str, Any] = {}
    provenance: dict[str, Any] = {}
    timings: dict[str, float] = {}

    @property
    def row_format(self) -> RowFormat:
        """How its rows are stored."""
        return RowFormat(len(self.layer_ids), self.hidden_size, self.dtype, self.encoding)

    @property
    def objects(self) -> dict[str, int]:
        """Objects that hold the values of the version (the index is apart): path to size in bytes."""
        return _objects({shard.path: shard.nbytes for shard in self.shards}, self.final_norm)

    @field_validator("shards")
    @classmethod
    def _distinct(cls, value: list[ShardRef]) -> list[ShardRef]:
        if len({shard.sha256 for shard in value}) != len(value):
            raise ValueError("a shard is listed twice")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_time(self.created)
        _check_layers(self.layer_ids)
        _check_encoding(self.encoding, self.dtype)
        if self.layer_ids[-1] > self.n_layers:
            raise ValueError(f"layer id {self.layer_ids[-1]} is above the model's {self.n_layers} blocks")
        samples = {"totals": self.totals.samples, "accounting": self.accounting.published, "index": self.index.rows}
        if len(set(samples.values())) != 1:
            raise ValueError(f"numbers of samples differ: {samples}")
        stored = sum(shard.nbytes for shard in self.shards)
        if stored != self.totals.bytes:
            raise ValueError(f"totals say {self.totals.bytes} bytes, the shards have {stored}")
        return self


def _objects(shards: dict[str, int], norm: FinalNormRef | None) -> dict[str, int]:
    return shards if norm is None or norm.path is None else {**shards, norm.path: norm.nbytes}


def _check_layers(layer_ids: list[int]) -> None:
    if layer_ids != sorted(set(layer_ids)):
        raise ValueError(f"layer ids {layer_ids} are not distinct and ascending")


def _check_encoding(encoding: Encoding, dtype: str) -> None:
    if not encodes(encoding, dtype):
        raise ValueError(f"encoding {encoding} does not hold {dtype}")


def _check_time(text: str) -> None:
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)", text):
        raise ValueError(f"{text!r} is not a UTC time such as 2026-01-31T12:00:00Z")
