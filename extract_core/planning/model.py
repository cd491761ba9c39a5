"""The target model as planning sees it: where it lies, its shape, its identity."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from extract_core.errors import ModelError
from extract_core.settings import ModelSettings

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
}
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


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
        parameters: weights counted from the files' sizes, for estimates only.
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


def inspect_model(settings: ModelSettings) -> ModelInfo:
    """Read a model's config without loading its weights.

    Raises:
        ModelError: no such folder or hub model, no config, no weights, or a config without the sizes needed.
    """
    from transformers import AutoConfig

    path, commit = _locate(settings)
    _check_weights(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
        text = config.get_text_config()
    except Exception as error:  # each model class checks its config in its own way
        raise ModelError(f"model {settings.path}: its config.json cannot be used: {error}") from error
    try:
        limit = int(getattr(text, "max_position_embeddings", 0) or 0)
        dtype = settings.dtype if settings.dtype != "auto" else _checkpoint_dtype(text, config)
        if dtype not in _DTYPE_BYTES:
            raise ModelError(
                f"model {settings.path}: its config says dtype {dtype}; set model.dtype to one of "
                f"{', '.join(_DTYPE_BYTES)}"
            )
        weights = sum(file.stat().st_size for file in weight_files(path))
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
            parameters=weights // _DTYPE_BYTES.get(_checkpoint_dtype(text, config), 2),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"model {settings.path}: its config.json does not describe a decoder model: {error}"
        ) from error


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


def _check_weights(path: Path) -> None:
    """Refuse a checkpoint that was cut off while it was copied: its safetensors headers say how long it must be."""
    for file in weight_files(path):
        if file.suffix != ".safetensors":
            continue
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            try:
                if length > size:
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                tensors = json.loads(stream.read(length))
                end = max((t["data_offsets"][1] for name, t in tensors.items() if name != "__metadata__"), default=0)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ModelError(f"{file} is no whole safetensors file ({error}); copy the model again") from error
        if size != 8 + length + end:
            raise ModelError(
                f"{file} has {size} bytes, its header says {8 + length + end}; it was cut off, copy the model again"
            )


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
