"""The model's final norm beside its rows: what turns rows of layer n into what lm_head reads.

One file per norm, named by its digest: plain safetensors with ``weight`` ``[H]`` float32 (ones where the norm has no
weight), ``bias`` ``[H]`` float32 where it has one, and kind, epsilon, offset and formula in the header's metadata. The
header is written here rather than by the safetensors package, which may order metadata differently each time: the same
norm must give the same bytes on every machine.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from extract_core.errors import CorruptDataError
from extract_core.store import layout
from extract_core.store.objects import read_object
from extract_core.store.records import FinalNormRef
from extract_core.store.root import Root

if TYPE_CHECKING:
    import torch

FORMULAS: Mapping[str, str] = {
    "none": "x",
    "rms": "x / sqrt(mean(x^2) + epsilon) * (weight + offset)",
    "layer": "(x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * (weight + offset)",
}
"""By kind, in float32 over the H channels of a row x; ``+ bias`` at the end where the norm has one."""


def norm_formula(
    rows: torch.Tensor, kind: str, epsilon: float, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Zhang & Sennrich 2019 (RMS norm), Ba et al. 2016 (layer norm).

    Args:
        rows: ``[..., H]`` float32.
        kind: a key of ``FORMULAS``.
        epsilon: added to the mean square.
        weight: ``[H]`` float32 with the offset added already; None for ones.
        bias: ``[H]`` float32; None for zeros.
    """
    if kind == "none":
        return rows
    centred = rows - rows.mean(dim=-1, keepdim=True) if kind == "layer" else rows
    result = centred * (centred.pow(2).mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


@dataclass(frozen=True, eq=False)
class StoredNorm:
    """A final norm with its weights.

    Attributes:
        kind: "rms", "layer" or "none" (the model ends without a norm).
        epsilon: added to the mean square.
        offset: added to the weight: 1 for norms that scale by ``1 + weight`` (Gemma), else 0.
        weight: ``[H]`` float32; None for kind "none".
        bias: ``[H]`` float32, or None.
    """

    kind: str
    epsilon: float = 0.0
    offset: float = 0.0
    weight: NDArray[np.float32] | None = None
    bias: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        if self.kind not in FORMULAS or (self.weight is None) != (self.kind == "none"):
            raise ValueError(f"a norm of kind {self.kind!r} {'without' if self.weight is None else 'with'} a weight")
        for array in (self.weight, self.bias):
            if array is not None and (array.dtype != np.float32 or array.shape != (self.hidden_size,)):
                raise ValueError(f"a norm's vectors are float32 [H], got {array.dtype} {list(array.shape)}")

    @property
    def hidden_size(self) -> int:
        """H; 0 for kind "none"."""
        return 0 if self.weight is None else int(self.weight.size)

    @property
    def formula(self) -> str:
        """What ``apply`` computes, in words of mathematics."""
        return FORMULAS[self.kind] + ("" if self.bias is None else " + bias")

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Normed rows: of layer n, what lm_head reads.

        Args:
            rows: ``[..., H]`` of any float dtype, on any device.

        Returns:
            ``[..., H]`` float32, computed in float32 on the rows' device.

        Raises:
            ValueError: the rows have another width than the norm.
        """
        import torch

        if self.weight is None:
            return rows.float()
        if rows.shape[-1:] != (self.hidden_size,):
            raise ValueError(f"rows [..., {self.hidden_size}] are expected by the norm, got {list(rows.shape)}")
        weight = torch.from_numpy(self.weight + np.float32(self.offset)).to(rows.device)
        bias = None if self.bias is None else torch.from_numpy(self.bias.copy()).to(rows.device)
        return norm_formula(rows.float(), self.kind, self.epsilon, weight, bias)


def encode_norm(norm: StoredNorm, metadata: Mapping[str, str]) -> bytes:
    """The bytes of a norm's file; the same norm and metadata always give the same bytes.

    Args:
        norm: of a kind with a weight.
        metadata: whose norm it is; nothing that differs between machines, since the digest covers it.
    """
    vectors = {"weight": norm.weight, **({} if norm.bias is None else {"bias": norm.bias})}
    own = {"epsilon": repr(norm.epsilon), "formula": norm.formula, "kind": norm.kind, "offset": repr(norm.offset)}
    size = 4 * norm.hidden_size
    header: dict[str, Any] = {"__metadata__": dict(sorted({**metadata, **own, "format": "pt"}.items()))}
    for n, name in enumerate(vectors):
        header[name] = {"dtype": "F32", "shape": [norm.hidden_size], "data_offsets": [n * size, (n + 1) * size]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text = text.ljust(-(-len(text) // 8) * 8)
    body = b"".join(np.asarray(vector, dtype="<f4").tobytes() for vector in vectors.values())
    return len(text).to_bytes(8, "little") + text + body


def decode_norm(data: bytes, where: str) -> StoredNorm:
    """Read the bytes of a norm's file.

    Raises:
        CorruptDataError: it is no norm.
    """
    import safetensors
    import safetensors.numpy

    try:
        vectors = safetensors.numpy.load(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        epsilon, offset = float(metadata["epsilon"]), float(metadata["offset"])
        if not (0 <= epsilon < math.inf and abs(offset) < 2**64):
            raise ValueError(f"epsilon {epsilon} or offset {offset}")
        return StoredNorm(
            kind=metadata["kind"],
            epsilon=epsilon,
            offset=offset,
            weight=vectors["weight"].copy(),
            bias=vectors["bias"].copy() if "bias" in vectors else None,
        )
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CorruptDataError(f"final norm {where} cannot be read ({type(error).__name__}: {error})") from error


def write_norm(root: Root, norm: StoredNorm, metadata: Mapping[str, str]) -> FinalNormRef:
    """Store a norm and say where; durable on return. Writes nothing where it is there already, whole.

    Args:
        root: the dataset root.
        norm: of any kind; one of kind "none" has no file.
        metadata: see ``encode_norm``.

    Raises:
        NoSpaceError, StoreError: it could not be written.
    """
    if norm.weight is None:
        return FinalNormRef(kind="none")
    data = encode_norm(norm, metadata)
    digest = hashlib.sha256(data).hexdigest()
    path = layout.norm_path(digest)
    try:
        there = root.read_bytes(path) == data  # a damaged one is mended
    except FileNotFoundError:
        there = False
    if not there:
        root.put_bytes(path, data)
    return FinalNormRef(
        kind=norm.kind,  # type: ignore[arg-type]
        epsilon=norm.epsilon,
        offset=norm.offset,
        path=path,
        sha256=digest,
        nbytes=len(data),
    )


def read_norm(root: Root, ref: FinalNormRef, hidden_size: int) -> StoredNorm:
    """The norm that a manifest or a commit record refers to, after checking its digest.

    Args:
        root: the dataset root.
        ref: of a known kind.
        hidden_size: H of the rows.

    Raises:
        CorruptDataError: it is missing, damaged, or not what the reference says.
    """
    if ref.path is None:
        return StoredNorm("none")
    where = root.describe(ref.path)
    data = read_object(root, ref.path, sha256=ref.sha256, nbytes=ref.nbytes, what="final norm")
    norm = decode_norm(data, where)
    expected = (ref.kind, ref.epsilon, ref.offset, hidden_size)
    if (norm.kind, norm.epsilon, norm.offset, norm.hidden_size) != expected:
        raise CorruptDataError(
            f"final norm {where} has kind, epsilon, offset and hidden size "
            f"{(norm.kind, norm.epsilon, norm.offset, norm.hidden_size)}, expected {expected}"
        )
    return norm
