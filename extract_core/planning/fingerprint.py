"""The fingerprint: a digest of everything that decides the values and their places.

Two runs with one fingerprint are interchangeable. What only decides speed (threads, buffers, GPU memory share) stays
out, so that a resume on another machine finds its plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from extract_core.errors import SettingsError
from extract_core.planning.model import ModelInfo, canonical_digest, model_identity
from extract_core.settings import JobSettings
from extract_core.store.encoding import BF16_SPLIT_ZSTD, NONE, Encoding, encodes
from extract_core.store.root import is_remote
from extract_core.store.shard import DTYPES

SPEC_VERSION = 1
_PLACES = ("shard_bytes", "share_prefixes")  # of a layout: where rows are, not what they are
RENDERING_VERSION = 1
"""To be raised when the same chats would give other token ids or masks than before."""


@dataclass(frozen=True)
class JobSpec:
    """The document behind a fingerprint (stored in plan and manifest)."""

    document: dict[str, Any]

    @property
    def deciding(self) -> dict[str, Any]:
        """The document without what only names things: a checkpoint may lie in another folder on each machine."""
        return {**self.document, "model": {k: v for k, v in self.document["model"].items() if k != "name"}}

    @cached_property
    def fingerprint(self) -> str:
        """Hex sha256 of the canonical document, cut to 32 digits; names the plan folder."""
        return canonical_digest(self.deciding)[:32]

    @cached_property
    def values_digest(self) -> str:
        """Digest of what decides the rows of a sample, whatever samples there are and however they are sharded.

        Samples with the same id have interchangeable rows in all plans with the same digest.
        """
        layout = {k: v for k, v in self.document.get("layout", {}).items() if k not in _PLACES}
        return canonical_digest({k: v for k, v in self.deciding.items() if k != "inputs"} | {"layout": layout})

    @property
    def shares(self) -> bool:
        """Whether samples of a shard share the rows of common prefixes; plans did not before schema 4."""
        found = self.document.get("layout")
        return isinstance(found, dict) and found.get("share_prefixes") is True

    @property
    def row_bytes(self) -> int:
        """Bytes of one token position: L * H * size of a value."""
        return int(self.document["layout"]["row_bytes"])


def store_dtype(settings: JobSettings, model: ModelInfo) -> str:
    """Dtype of the stored rows."""
    return settings.store.dtype if settings.store.dtype != "auto" else model.dtype


def store_encoding(settings: JobSettings, model: ModelInfo) -> Encoding:
    """Encoding of the rows in a shard.

    Raises:
        SettingsError: it cannot hold the stored dtype.
    """
    chosen, dtype = settings.store.encoding, store_dtype(settings, model)
    if chosen == "auto":
        return BF16_SPLIT_ZSTD if is_remote(settings.root) and dtype == "bfloat16" else NONE
    if not encodes(chosen, dtype):
        raise SettingsError(
            f"store.encoding {chosen} holds bfloat16 rows, but these are {dtype}; set store.dtype to bfloat16, or "
            "store.encoding to none"
        )
    return chosen


def job_spec(
    settings: JobSettings,
    model: ModelInfo,
    *,
    layer_ids: tuple[int, ...],
    max_length: int,
    tokenizer: dict[str, Any],
    inputs: list[dict[str, Any]],
    engine: dict[str, Any],
) -> JobSpec:
    """Build the document.

    Args:
        settings: the job.
        model: the model, whose files are hashed here (cached).
        layer_ids: resolved ids, ascending.
        max_length: resolved truncation length.
        tokenizer: digests of tokenizer and template, template variables, mask method asked for.
        inputs: name and sha256 of each input file, in order, with the row limit.
        engine: package and versions of vLLM, torch and transformers.
    """
    e = settings.engine
    return JobSpec(
        {
            "spec_version": SPEC_VERSION,
            "model": model_identity(model, trust_remote_code=settings.model.trust_remote_code),
            "trust_remote_code": settings.model.trust_remote_code,
            "tokenizer": tokenizer,
            "samples": {
                "per": settings.chat.samples,
                "mask": settings.chat.mask,
                "max_length": max_length,
                "rendering_version": RENDERING_VERSION,
                "truncation": "right",
                "max_characters": settings.chat.max_characters,
            },
            "layer_ids": list(layer_ids),
            "compute_dtype": model.dtype,
            "dtype": store_dtype(settings, model),
            "encoding": store_encoding(settings, model),
            "engine": {
                **engine,
                "max_model_len": e.max_model_len,
                "max_num_batched_tokens": e.max_num_batched_tokens,
                "enforce_eager": e.enforce_eager,
                "tensor_parallel_size": e.tensor_parallel_size,
                "quantization": e.quantization,
                "load_format": e.load_format,
                "extra": e.extra,
            },
            "inputs": {"files": inputs, "limit": settings.data.limit, "split": settings.data.split},
            "layout": {
                "shard_bytes": settings.store.shard_bytes,
                "share_prefixes": settings.store.share_prefixes,
                "row_bytes": len(layer_ids) * model.hidden_size * DTYPES[store_dtype(settings, model)][1],
            },
        }
    )
