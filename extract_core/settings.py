"""One ``JobSettings`` tree: what to extract, how to run it and where it goes.

Sources, strongest first: keyword arguments (command-line flags), environment (``CORESAMPLE_MODEL__PATH=...``), the
YAML job file, defaults. Unknown keys are refused with the nearest known name, so that a misspelt option cannot be
silently ignored.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as SettingsSourceError

from extract_core.errors import SettingsError

_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_bytes(value: object) -> object:
    """``"512MiB"`` -> 536870912; numbers pass through.

    Raises:
        ValueError: the text is not a number with a known unit.
    """
    if not isinstance(value, str):
        return value
    text = value.strip().lower().replace(" ", "").replace("_", "")
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(number) :] or "b"
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        raise ValueError(f"{value!r} is not a size; write a number with one of {', '.join(_UNITS)}") from None


ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_SECRETS = {"key", "secret", "token", "password", "secret_key", "access_key", "aws_secret_access_key", "account_key"}


def refuse_secrets(options: dict[str, Any]) -> dict[str, Any]:
    """Storage options without secrets: jobs are stored, logged and shown in Prefect's UI.

    Raises:
        ValueError: names the option and where it belongs.
    """
    found = sorted(name for name in _flat_names(options) if name.lower() in _SECRETS)
    if found:
        raise ValueError(
            f"{', '.join(found)} is a secret and must not be in a job; set it in the environment (AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, ...) or in the client's own configuration file"
        )
    return options


def _flat_names(options: dict[str, Any]) -> list[str]:
    return [
        n for name, value in options.items() for n in (name, *(_flat_names(value) if isinstance(value, dict) else ()))
    ]


StorageOptions = Annotated[dict[str, Any], AfterValidator(refuse_secrets)]


class ModelSettings(_Section):
    """The target model; ``path`` is a local directory or a hub id."""

    path: str = Field(description="Local directory or hub id of the model whose hidden states are captured.")
    revision: str | None = Field(None, description="Hub revision (commit, tag or branch) of model and tokenizer.")
    tokenizer: str | None = Field(None, description="Tokenizer directory or hub id; the model's own when absent.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Compute dtype of the engine; auto is the checkpoint's own, bfloat16 for float32 ones."
    )
    trust_remote_code: bool = Field(False, description="Run Python code shipped with the model; recorded if on.")


class DataSettings(_Section):
    """Where the chats are."""

    path: str | list[str] = Field(
        description="JSONL or Parquet file(s), a folder of them, a glob, or a Hugging Face dataset saved to disk."
    )
    format: Literal["auto", "jsonl", "parquet", "hf"] = Field("auto", description="Input format; auto by name.")
    split: str = Field("train", description="Split name recorded for every sample (and chosen in an HF DatasetDict).")
    limit: int | None = Field(None, gt=0, description="Use only the first N rows.")
    storage_options: StorageOptions = Field(
        default_factory=dict, description="fsspec options of the input (endpoint_url, profile, anon ...); no secrets."
    )


class ChatSettings(_Section):
    """How conversations become token ids and loss masks."""

    samples: Literal["conversation", "turn"] = Field(
        "conversation", description="One sample per conversation, or one per assistant turn with its history."
    )
    mask: Literal["auto", "generation", "prefix", "markers"] = Field(
        "auto", description="Method of the loss mask; auto takes the first that applies and records which."
    )
    max_length: int | None = Field(
        None, ge=2, description="Right-truncate samples to this many tokens; default: what the model allows."
    )
    template: str | None = Field(None, description="File with a chat template that replaces the tokenizer's own.")
    template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Extra template variables.")
    template_date: str = Field(
        "2025-01-01",
        pattern=r"^\d{4}-\d{2}-\d{2}$",
        description="The date seen by templates that print today's date, so that a plan is the same on every day.",
    )
    max_characters: int = Field(
        4_000_000, gt=0, description="Drop rows whose messages together are longer than this, before tokenizing."
    )


class EngineSettings(_Section):
    """How vLLM runs; names as vLLM has them."""

    max_num_batched_tokens: int | None = Field(None, gt=0, description="Tokens of one step; also the chunk size.")
    max_num_seqs: int | None = Field(None, gt=0, description="Samples in flight in one step.")
    max_model_len: int | None = Field(
        None, ge=3, description="Positions of the engine; default: chat.max_length (or the longest sample) and two."
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of GPU memory for weights and KV cache.")
    kv_cache_bytes: ByteSize | None = Field(None, description="KV cache size; default on CPU 1 GiB, on GPU vLLM's.")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that hold one copy of the model.")
    enforce_eager: bool | None = Field(None, description="No compilation; default: true on CPU, false on GPU.")
    quantization: str | None = Field(None, description="vLLM quantization method, where the checkpoint needs one.")
    load_format: str = Field("auto", description="vLLM weight loader; 'dummy' makes random weights for speed tests.")
    buffer_bytes: ByteSize = Field(
        256 * 2**20, description="Bytes of states in flight between engine and writer; bounds memory."
    )
    writer_threads: int = Field(2, ge=1, le=32, description="Threads that write rows.")
    start_timeout_s: float = Field(900, gt=0, description="Give up when the engine is not ready after this long.")
    step_timeout_s: float = Field(600, gt=0, description="Replace the engine when no step ends for this long.")
    extra: dict[str, Any] = Field(default_factory=dict, description="Further vLLM engine arguments, passed through.")


class StoreSettings(_Section):
    """How shards are laid out and stored."""

    shard_bytes: ByteSize = Field(512 * 2**20, description="Target size of one shard file.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Dtype of the stored rows; auto is the engine's compute dtype."
    )
    encoding: Literal["none"] = Field("none", description="Encoding of the rows in a shard.")
    spool: str | None = Field(
        None, description="Local folder for shards being written; default: beside a local root, else the temp folder."
    )
    storage_options: StorageOptions = Field(
        default_factory=dict, description="fsspec options of the root (endpoint_url, profile, anon ...); no secrets."
    )


class CheckSettings(_Section):
    """Thresholds of the checks that every published row must pass."""

    top1_agreement: float = Field(
        0.9, ge=0, le=1, description="Lowest share of samples whose lm_head(norm(h_n)) gives the engine's own token."
    )
    norm_spread: float = Field(
        8.0,
        gt=0,
        description=(
            "Robust standard deviations (of the logarithm, per layer) that a sample's typical norm may lie from the "
            "run's median; the run fails when over 1 % of its samples, or most of a shard, lie beyond."
        ),
    )


class JobSettings(BaseSettings):
    """Everything about one extraction job."""

    model_config = SettingsConfigDict(
        env_prefix="CORESAMPLE_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    root: str = Field(description="Where the dataset goes: a directory or s3://bucket/prefix.")
    model: ModelSettings
    data: DataSettings
    chat: ChatSettings = ChatSettings()
    layers: tuple[int, ...] | None = Field(
        None, description="Layer ids k (stream after k blocks); default for EAGLE-3: 2, n//2, n-3 and n."
    )
    engine: EngineSettings = EngineSettings()
    store: StoreSettings = StoreSettings()
    checks: CheckSettings = CheckSettings()
    allow_change: bool = Field(
        False, description="Let a root's next version differ from its last in model, template, layers or dtype."
    )
    completeness: float = Field(
        0.99,
        ge=0,
        le=1,
        description="Publish only if at least this share of the input is published or excluded by rule.",
    )

    @field_validator("layers")
    @classmethod
    def _layers_are_distinct(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        if not value:
            raise ValueError("no layer ids given; leave the field out for the EAGLE-3 defaults 2, n//2, n-3, n")
        repeated = sorted({k for k in value if value.count(k) > 1})
        if repeated:
            raise ValueError(f"layer ids are repeated: {repeated}; give every id once")
        negative = [k for k in value if k < 0]
        if negative:
            raise ValueError(f"layer ids are negative: {negative}; ids count from 0 (embeddings) to n (last block)")
        return tuple(sorted(value))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keyword arguments, then the environment; ``load_job`` lays the job file below both."""
        return (init_settings, env_settings)


def load_job(path: str | os.PathLike[str] | None, overrides: dict[str, Any] | None = None) -> JobSettings:
    """Read a job file, the environment and overrides into one validated tree.

    Args:
        path: YAML file, or None when everything comes from elsewhere.
        overrides: dotted names to values, e.g. ``{"chat.max_length": 512}``.

    Raises:
        SettingsError: names the file, the field, what came and, for an unknown field, the nearest known name.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        tree = _read_yaml(Path(path))
    flags: dict[str, Any] = {}
    for dotted, value in (overrides or {}).items():
        _set(flags, dotted, value)
    try:
        environment = EnvSettingsSource(JobSettings)()
        return JobSettings(**_merged(_merged(tree, environment), flags))
    except SettingsSourceError as error:
        raise SettingsError(f"environment: {error}; nested fields are written CORESAMPLE_MODEL__PATH") from error
    except ValidationError as error:
        raise SettingsError(_explain(error, str(path) if path is not None else "settings")) from error


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``, section by section."""
    result = dict(below)
    for name, value in above.items():
        old = result.get(name)
        result[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"job file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"job file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"job file {path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise SettingsError(f"job file {path} must hold a mapping (root, model, data, ...), got {type(tree).__name__}")
    return tree


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for part in parents:
        nested = tree.setdefault(part, {})
        if not isinstance(nested, dict):
            raise SettingsError(f"cannot set {dotted}: {part} is {type(nested).__name__}, not a section")
        tree = nested
    tree[leaf] = value


def _explain(error: ValidationError, source: str) -> str:
    lines = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"]) or "(job)"
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(item["loc"][-1]), _known(item["loc"][:-1]), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            lines.append(f"{source}: unknown field {field!r}{hint}")
        elif item["type"] == "missing":
            lines.append(f"{source}: field {field!r} is required and missing")
        else:
            message = item["msg"].removeprefix("Value error, ")
            came = "" if "storage_options" in item["loc"] else f"; got {item['input']!r}"  # may hold a secret
            lines.append(f"{source}: field {field!r}: {message}{came}")
    return "\n".join(lines)


def _known(loc: tuple[int | str, ...]) -> list[str]:
    fields = JobSettings.model_fields
    for part in loc:
        info = fields.get(str(part))
        if info is None or not isinstance(info.annotation, type) or not issubclass(info.annotation, BaseModel):
            return []
        fields = info.annotation.model_fields
    return list(fields)
