"""The target model as planning sees it: where it lies, its shape, its identity."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from extract_core.errors import ModelError
from extract_core.settings import ModelSettings

_MOST_HEADER = 100 * 2**20  # the limit of the safetensors format
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_PICKLES = (".bin", ".pt")
_TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_WHOLE_NUMBERS = ("I", "U")
"""Safetensors dtypes that pack several weights of a quantized model into one number begin with these."""
_NOT_LATENT = {"minicpm3"}
"""Model types with a ``kv_lora_rank`` whose keys and values vLLM caches in full all the same."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Values per token inside a block; decides how much memory a forward takes.

    Attributes:
        kv_heads: key-value heads of one block.
        head_dim: values of one head.
        latent: values per token and block that multi-head latent attention caches instead
            (``kv_lora_rank + qk_rope_head_dim``); 0 for other attention.
        widest: width of the widest intermediate, experts of one token together.
        heads: query heads, which tensor parallelism has to divide.
    """

    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    widest: int = 0
    heads: int = 0

    def kv_values(self, tensor_parallel: int = 1) -> int:
        """Values that the KV cache of one GPU holds per token and block.

        Heads are divided, at least one a GPU; a latent is whole on each (vLLM's ``ModelConfig.get_num_kv_heads``).
        Sliding-window and linear-attention blocks count like others, so this can be too much for such models.
        """
        if self.latent:
            return self.latent
        return 2 * max(1, self.kv_heads // tensor_parallel) * self.head_dim if self.kv_heads else 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Shape and identity of a model.

    Attributes:
        path: local folder with config and weights.
        name: what the job calls it.
        commit: hub commit, None for a local folder.
        n_layers: decoder blocks n.
        hidden_size: H.
        vocab_size: ids go from 0 to vocab_size - 1.
        max_length: most tokens of a sample; one position below the model's limit, for the engine's output token.
        dtype: compute dtype.
        parameters: weights counted from the files' headers (or sizes, where they have none), for estimates only.
        file_bytes: bytes of the weight files that are loaded.
        quantized: the weights are stored in fewer bits than they are computed in.
        widths: of attention and of the intermediates.
    """

    path: Path
    name: str
    commit: str | None
    architecture: str
    n_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int
    dtype: str
    parameters: int
    file_bytes: int = 0
    quantized: bool = False
    widths: Widths = Widths()

    def weights_bytes(self, *, quantized: bool = False) -> int:
        """Bytes of the weights once loaded: in the compute dtype, or as stored where they are ``quantized``."""
        if self.quantized or quantized:
            return self.file_bytes
        return self.parameters * DTYPE_BYTES[self.dtype]


def inspect_model(settings: ModelSettings) -> ModelInfo:
    """Read a model's config without loading its weights.

    Raises:
        ModelError: no such folder or hub model, no config, no weights, or a config without the sizes needed.
    """
    from transformers import AutoConfig

    path, commit = _locate(settings)
    headers = _check_weights(path)
    raw = _raw_config(path, settings)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
        text = config.get_text_config()
    except Exception as error:  # each model class checks its config in its own way
        raise ModelError(f"model {settings.path}: its config.json cannot be used: {error}") from error
    try:
        limit = int(getattr(text, "max_position_embeddings", 0) or 0)
        dtype = settings.dtype if settings.dtype != "auto" else _checkpoint_dtype(text, config)
        if dtype not in DTYPE_BYTES:
            raise ModelError(
                f"model {settings.path}: its config says dtype {dtype}; set model.dtype to one of "
                f"{', '.join(DTYPE_BYTES)}"
            )
        for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
            if not 1 <= int(getattr(text, name)) < 2**31:
                raise ValueError(f"{name} is {getattr(text, name)}")
        files = loaded_files(path)
        if pickles := [file.name for file in files if file.suffix in _PICKLES]:
            raise ModelError(
                f"model {settings.path}: its weights are pickles ({', '.join(pickles[:3])}), which are never read, "
                "since they can run code; convert them to safetensors"
            )
        quantized = "quantization_config" in raw or any(file.suffix == ".gguf" for file in files)
        return ModelInfo(
            path=path,
            name=settings.path,
            commit=commit,
            architecture=(config.architectures or [type(config).__name__])[0],
            n_layers=int(text.num_hidden_layers),
            hidden_size=int(text.hidden_size),
            vocab_size=int(text.vocab_size),
            max_length=limit - 1 if limit else 2**31 - 1,
            dtype=dtype,
            parameters=_count(files, headers, raw),
            file_bytes=sum(file.stat().st_size for file in files),
            quantized=quantized,
            widths=_widths(text, raw),
        )
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(
            f"model {settings.path}: its config.json does not describe a decoder model: {error}"
        ) from error


def _raw_config(path: Path, settings: ModelSettings) -> dict[str, Any]:
    """``config.json`` as written: transformers renames and fills in fields that say how wide attention is."""
    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if isinstance(raw, dict):
            return raw
        raise ValueError("it holds no object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model {settings.path}: its config.json cannot be used: {error}") from error


def _text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's own part of a config that holds several (``text_config`` and its like)."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        if isinstance(raw.get(name), dict):
            return _text_part(raw[name])
    return raw


def _widths(text: Any, raw: dict[str, Any]) -> Widths:
    """From the file first, from transformers' defaults where it says nothing."""
    written = _text_part(raw)

    def number(*names: str) -> int:
        for name in names:
            for value in (written.get(name), getattr(text, name, None)):
                values = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
                if values and max(values) > 0:  # a list has a value per block; 0 and None mean "not given"
                    return max(values)
        return 0

    hidden = number("hidden_size")
    heads = number("num_attention_heads", "n_head")
    kv_heads = number("n_head_kv", "num_kv_heads", "num_key_value_heads") or heads
    if written.get("multi_query") and not written.get("new_decoder_architecture"):
        kv_heads = 1
    head_dim = max(number("head_dim"), number("global_head_dim")) or (hidden // heads if heads else 0)
    latent = 0
    if number("kv_lora_rank") and written.get("model_type") not in _NOT_LATENT:
        latent = number("kv_lora_rank") + number("qk_rope_head_dim")
        if os.environ.get("VLLM_MLA_DISABLE", "0") not in ("", "0"):
            latent, kv_heads, head_dim = 0, heads, number("qk_nope_head_dim") + number("qk_rope_head_dim")
    dense = number("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner") or 4 * hidden
    experts = number("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
    each = number("moe_intermediate_size", "expert_ffn_hidden_size") or dense
    return Widths(kv_heads, head_dim, latent, max(dense, experts * each), heads)


def _count(files: list[Path], headers: dict[Path, dict[str, Any]], raw: dict[str, Any]) -> int:
    """Weights of the files: exactly from safetensors headers; packed and other files by their bytes."""
    quantization = raw.get("quantization_config")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    bits = bits if isinstance(bits, int) and bits > 0 else 4
    stored = str(_text_part(raw).get("dtype") or _text_part(raw).get("torch_dtype") or "bfloat16")
    total = 0
    for file in files:
        if file not in headers:
            total += file.stat().st_size // DTYPE_BYTES.get(stored, 2)
            continue
        for tensor in headers[file].values():
            if quantization and str(tensor["dtype"]).startswith(_WHOLE_NUMBERS):
                total += (tensor["data_offsets"][1] - tensor["data_offsets"][0]) * 8 // bits
            else:
                total += math.prod(tensor["shape"])
    return total


def _checkpoint_dtype(*configs: Any) -> str:
    for config in configs:
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        if dtype is not None:
            name = str(dtype).removeprefix("torch.")
            # vLLM's "auto" runs float32 checkpoints in bfloat16; rows follow the compute dtype.
            return "bfloat16" if name == "float32" else name
    return "bfloat16"


def _locate(settings: ModelSettings) -> tuple[Path, str | None]:
    given = Path(settings.path).expanduser()
    looks_local = given.exists() or settings.path.startswith((".", "/", "~")) or settings.path.count("/") != 1
    if looks_local:
        if not given.is_dir():
            raise ModelError(
                f"model.path {settings.path!r} does not exist or is not a folder; give a folder with config.json and "
                "weights, or a hub id such as org/name"
            )
        if not (given / "config.json").is_file():
            raise ModelError(f"model.path {settings.path!r} holds no config.json; it is not a model folder")
        if not weight_files(given):
            raise ModelError(f"model.path {settings.path!r} holds no weights ({', '.join(_WEIGHT_SUFFIXES)})")
        return given.resolve(), None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = Path(
            snapshot_download(settings.path, revision=settings.revision, ignore_patterns=["*.gguf", "*.onnx"])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model.path {settings.path!r} is neither a folder here nor a hub model that can be fetched: {error}"
        ) from error
    return snapshot, snapshot.name


def _check_weights(path: Path) -> dict[Path, dict[str, Any]]:
    """Refuse a checkpoint that was cut off while it was copied: its safetensors headers say how long it must be.

    Returns:
        the tensors that each safetensors file describes, by name.
    """
    headers: dict[Path, dict[str, Any]] = {}
    for file in weight_files(path):
        if file.suffix != ".safetensors":
            continue
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            try:
                if length > min(size, _MOST_HEADER):
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                tensors = json.loads(stream.read(length))
                tensors.pop("__metadata__", None)
                end = max((t["data_offsets"][1] for t in tensors.values()), default=0)
                for tensor in tensors.values():  # what _count reads
                    _ = math.prod(tensor["shape"]) + tensor["data_offsets"][0], str(tensor["dtype"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ModelError(f"{file} is no whole safetensors file ({error}); copy the model again") from error
        if size != 8 + length + end:
            raise ModelError(
                f"{file} has {size} bytes, its header says {8 + length + end}; it was cut off, copy the model again"
            )
        headers[file] = tensors
    return headers


def loaded_files(path: Path) -> list[Path]:
    """The weight files that an engine loads: safetensors where there are any, and of those the ones that the index
    names, since some checkpoints hold the same weights a second time (``consolidated.safetensors``).
    """
    files = weight_files(path)
    best = [file for file in files if file.suffix == ".safetensors"] or files
    try:
        index = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))
        named = set(index["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return best
    return [file for file in best if file.name in named] or best


def weight_files(path: Path) -> list[Path]:
    """The weight files of a model folder, sorted by name."""
    return sorted(file for file in path.iterdir() if file.suffix in _WEIGHT_SUFFIXES)


def model_identity(model: ModelInfo, *, trust_remote_code: bool) -> dict[str, Any]:
    """Digests of everything in the model folder that can decide a value, so that a changed checkpoint is never reused.

    Weights and every JSON file (quantization settings among them) but the tokenizer's, which the fingerprint covers by
    what they make; and the model's own code where the job runs it.
    """
    patterns = ["*.json", *(["*.py"] if trust_remote_code else [])]
    files = [f for pattern in patterns for f in sorted(model.path.glob(pattern)) if f.name not in _TOKENIZER_FILES]
    return {
        "name": model.name,
        "commit": model.commit,
        "architecture": model.architecture,
        "files": {file.name: file_sha256(file) for file in [*files, *weight_files(model.path)]},
    }


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file; remembered in the user's cache by path, size, inode and time of change.

    Weights are hashed once instead of at every start: 140 GB take two minutes.
    """
    stat = path.stat()
    key = f"{path.resolve()}:{stat.st_size}:{stat.st_ino}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
    cache = _cache_folder() / hashlib.sha256(key.encode()).hexdigest() if stat.st_size > 2**20 else None
    if cache is not None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            remembered = cache.read_text(encoding="ascii")
            if re.fullmatch(r"[0-9a-f]{64}", remembered):
                return remembered
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if cache is not None:
        with contextlib.suppress(OSError):  # no cache only costs time
            cache.parent.mkdir(parents=True, exist_ok=True)
            temporary = cache.with_suffix(f".{os.getpid()}")
            temporary.write_text(digest, encoding="ascii")
            temporary.replace(cache)
    return digest


@lru_cache
def _cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "coresample" / "sha256"


def canonical_digest(value: Any) -> str:
    """Hex sha256 of a value as canonical JSON (sorted keys, no spaces)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
