"""One ``JobSettings`` tree: what to extract, how to run it and where it goes.

Sources, strongest first: keyword arguments (command-line flags), environment (``CORESAMPLE_MODEL__PATH=...``), the
YAML job file, defaults. Unknown keys are refused with the nearest known name, so that a misspelt option cannot be
silently ignored.
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as SettingsSourceError

from extract_core.errors import SettingsError, shortened

_PREFIX = "CORESAMPLE_"
_OWN_VARIABLES = frozenset({"CORESAMPLE_ENGINE_FDS", "CORESAMPLE_ENGINE_PARENT", "CORESAMPLE_HOME"})
"""Variables that a process of ours sets for its child, and where prefect.yaml finds the flows: settings of nobody."""

_MOST_NODES = 100_000
_MOST_BYTES = 2**60
_LONGEST_PATH = 4096
_LAYERS_HELP = (
    "write a list of layer ids (0 = embeddings, n = last block, -1 = n, -2 = n-1 ...) and of names "
    "(eagle3, last, all, every:4), e.g. layers: [eagle3, last] or 2,15,30"
)
LAYER_NAMES = ("eagle3", "last", "all", "every")
"""Names that stand for layer ids; ``every`` is written with a number of blocks, as every:4."""
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_bytes(value: object) -> object:
    """``"512MiB"`` -> 536870912; numbers pass through.

    Raises:
        ValueError: the text is not a number with a known unit, or the size is beyond 2**60 bytes.
    """
    if isinstance(value, bool):
        raise ValueError("true and false are no sizes; write bytes, or a number with a unit such as 512MiB")
    if isinstance(value, int | float) and value > _MOST_BYTES:
        raise ValueError("more than 2**60 bytes (1 EiB); write bytes, or a number with a unit such as 512MiB")
    if not isinstance(value, str):
        return value
    text = value.strip().lower().replace(" ", "").replace("_", "")
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(number) :] or "b"
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        size = float("nan")
    if size != size:
        raise ValueError(f"{shortened(value)!r} is not a size; write a number with one of {', '.join(_UNITS)}")
    if size > _MOST_BYTES:
        raise ValueError(f"{shortened(value)!r} is more than 2**60 bytes (1 EiB); write a smaller size, e.g. 512MiB")
    return int(size)


_WITH_PASSWORD = re.compile(r"([a-z][a-z0-9+.-]*://[^/@:]*):[^/@]*@", re.IGNORECASE)

ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]


def check_path(value: str) -> str:
    """A path or URL as text that the operating system can take.

    Raises:
        ValueError: it has a NUL, is longer than any path, or its ``~user`` has no home here.
    """
    if "\0" in value:
        raise ValueError("a path cannot hold a NUL character; remove it")
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise ValueError("the path holds half a character (a lone surrogate); write it anew") from None
    if len(value) > _LONGEST_PATH:
        raise ValueError(
            f"a path has at most {_LONGEST_PATH:,} characters, this has {len(value):,}; give a shorter one"
        )
    if _WITH_PASSWORD.match(value):
        raise ValueError(
            "a URL with a password in it would be stored and shown; leave it out, and set the credentials in the "
            "environment or in the client's own configuration file"
        )
    if value.startswith("~") and os.path.expanduser(value) == value:  # noqa: PTH111 -- pathlib raises RuntimeError
        who = value.partition("/")[0]
        raise ValueError(f"{who} names no home folder on this machine; write the path in full, or ./{who} for a name")
    return value


PathText = Annotated[str, AfterValidator(check_path)]


def parse_layers(value: object) -> tuple[int | str, ...]:
    """Layer ids and names as a job, a flag or the environment has them; what they stand for depends on the model.

    Args:
        value: a list, one entry, or text such as ``eagle3,last`` or ``["eagle3", -1]``.

    Returns:
        the entries in their order, numbers as int and names in small letters.

    Raises:
        ValueError: an entry is neither a layer id nor a name, or comes twice.
    """
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("[") and text.endswith("]"):  # as the environment writes lists
            text = text[1:-1]
        value = [part.strip().strip("\"'") for part in text.split(",")] if text.strip() else []
    elif isinstance(value, int):
        value = [value]
    if not isinstance(value, list | tuple):
        raise ValueError(f"this is no list of layers; {_LAYERS_HELP}")
    if not value:
        raise ValueError("no layer ids given; leave the field out for the EAGLE-3 defaults 2, n//2, n-3, n")
    entries = tuple(_layer_entry(entry) for entry in value)
    repeated = [entry for number, entry in enumerate(entries) if entry in entries[:number]]
    if repeated:
        shown = ", ".join(map(str, dict.fromkeys(repeated[:8])))
        raise ValueError(f"layer ids are repeated: {shown}; give every id once")
    return entries


def _layer_entry(entry: object) -> int | str:
    if type(entry) is int:
        return entry
    if isinstance(entry, dict) and len(entry) == 1 and "every" in entry:
        raise ValueError("every: 4 with a space is a section in YAML; write every:4 without one")
    if not isinstance(entry, str):
        raise ValueError(f"{_kind(entry)} is no layer; {_LAYERS_HELP}")
    text = entry.strip().lower()
    if re.fullmatch(r"[-+]?[0-9]{1,9}", text):
        return int(text)
    name, colon, step = text.partition(":")
    if name == "every":
        if re.fullmatch(r"0*[1-9][0-9]{0,8}", step):
            return f"every:{int(step)}"
        raise ValueError(f"{shortened(entry, 60)!r} needs a number of blocks from 1 on, e.g. every:4")
    if name in LAYER_NAMES and not colon:
        return name
    near = difflib.get_close_matches(name, LAYER_NAMES, n=1)
    hint = f" (did you mean {'every:4' if near[0] == 'every' else near[0]}?)" if near else ""
    raise ValueError(f"{shortened(entry, 60)!r} is no layer{hint}; {_LAYERS_HELP}")


def _kind(value: object) -> str:
    return {bool: "a truth value", float: "a number with a fraction", type(None): "nothing"}.get(
        type(value), f"a {type(value).__name__}"
    )


def _takes_numbers(annotation: Any) -> bool:
    """Whether a field's type is a number, or a union with one, and not a truth value as well."""
    kinds = {annotation, *get_args(annotation)}
    kinds |= {part for kind in kinds for part in get_args(kind)}
    return bool(kinds & {int, float}) and bool not in kinds


def _refuse_truth_values(fields: dict[str, Any], value: object, name: str | None) -> object:
    if isinstance(value, bool) and name in fields and _takes_numbers(fields[name].annotation):
        raise ValueError("true and false are no numbers; write a number")
    return value


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_values_are_no_numbers(cls, value: object, info: ValidationInfo) -> object:
        return _refuse_truth_values(cls.model_fields, value, info.field_name)


_SECRETS = re.compile(
    r"token$|secret|passw|passphrase|credential|(^|_|access|customer)key$|connection_string", re.IGNORECASE
)


def refuse_secrets(options: dict[str, Any]) -> dict[str, Any]:
    """Options without secrets: jobs are stored, logged and shown in Prefect's UI.

    Raises:
        ValueError: names the option and where it belongs.
    """
    found = sorted(name for name in _flat_names(options) if _SECRETS.search(name))
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

    path: PathText = Field(description="Local directory or hub id of the model whose hidden states are captured.")
    revision: str | None = Field(None, description="Hub revision (commit, tag or branch) of model and tokenizer.")
    tokenizer: PathText | None = Field(None, description="Tokenizer directory or hub id; the model's own when absent.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Compute dtype of the engine; auto is the checkpoint's own, bfloat16 for float32 ones."
    )
    trust_remote_code: bool = Field(False, description="Run Python code shipped with the model; recorded if on.")


class DataSettings(_Section):
    """Where the chats are."""

    path: PathText | list[PathText] = Field(
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
    template: PathText | None = Field(None, description="File with a chat template that replaces the tokenizer's own.")
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

    max_num_batched_tokens: int | None = Field(
        None,
        gt=0,
        description=(
            "Tokens of one step; also the chunk size. Default: 2048 on CPU, 16384 on GPU, no more than the job has."
        ),
    )
    max_num_seqs: int | None = Field(
        None, gt=0, description="Samples in flight in one step; default: 256, or the tokens of a step if that is less."
    )
    max_model_len: int | None = Field(
        None, ge=3, description="Positions of the engine; default: chat.max_length (or the longest sample) and two."
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of GPU memory for weights and KV cache.")
    kv_cache_bytes: ByteSize | None = Field(
        None,
        description=(
            "KV cache size. Default on CPU: what a step and two samples of the greatest length need, 64 MiB to 4 GiB; "
            "on GPU: what gpu_memory_utilization leaves."
        ),
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that hold one copy of the model.")
    capture: Literal["auto", "native", "hooks"] = Field(
        "auto",
        description=(
            "Where rows come from: the model class's own auxiliary hidden states (native), or forward hooks on its "
            "decoder layers, which need eager mode (hooks); auto is native where that reaches every layer. Both give "
            "the same rows."
        ),
    )
    enforce_eager: bool | None = Field(
        None, description="No compilation; default: true on CPU and with capture: hooks, false on GPU."
    )
    quantization: str | None = Field(None, description="vLLM quantization method, where the checkpoint needs one.")
    load_format: str = Field("auto", description="vLLM weight loader; 'dummy' makes random weights for speed tests.")
    buffer_bytes: ByteSize | None = Field(
        None,
        description=(
            "Host memory for states in flight between engine and writer, pinned with a GPU; bounds memory. Default: "
            "the rows of two steps, 64 MiB to 4 GiB."
        ),
    )
    writer_threads: int | None = Field(
        None, ge=1, le=32, description="Threads that write rows; default: half of the CPUs, 2 to 8."
    )
    start_timeout_s: float = Field(
        900,
        gt=0,
        description=(
            "Give up when the engine, while it loads, neither computes nor reads for this long, or is not ready after "
            "ten times as long."
        ),
    )
    step_timeout_s: float = Field(600, gt=0, description="Replace the engine when no step ends for this long.")
    extra: Annotated[dict[str, Any], AfterValidator(refuse_secrets)] = Field(
        default_factory=dict, description="Further vLLM engine arguments, passed through."
    )

    @field_validator("enforce_eager")
    @classmethod
    def _hooks_need_eager_mode(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value is False and info.data.get("capture") == "hooks":
            raise ValueError("capture: hooks needs eager mode; leave enforce_eager out, or choose another capture")
        return value

    @field_validator("max_num_seqs")
    @classmethod
    def _a_sample_has_a_token(cls, value: int | None, info: ValidationInfo) -> int | None:
        tokens = info.data.get("max_num_batched_tokens")
        if value is not None and tokens is not None and value > tokens:
            raise ValueError(f"more samples in a step than max_num_batched_tokens ({tokens}); lower it or raise that")
        return value


class PreflightSettings(_Section):
    """The self-test on the real model before the first shard."""

    reference: Literal["auto", "always", "never"] = Field(
        "auto",
        description=(
            "Compare rows with a Hugging Face forward on the CPU; auto: where the weights are at most 2 GiB and fit a "
            "quarter of the free host memory."
        ),
    )


class StoreSettings(_Section):
    """How shards are laid out and stored."""

    shard_bytes: ByteSize = Field(512 * 2**20, description="Target size of one shard file.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Dtype of the stored rows; auto is the engine's compute dtype."
    )
    encoding: Literal["auto", "none", "bf16-split-zstd"] = Field(
        "auto",
        description=(
            "How rows are stored: none (as they are), bf16-split-zstd (lossless, about 1.45 times smaller, bfloat16 "
            "only); auto: none on a local root, bf16-split-zstd for bfloat16 rows on an object store."
        ),
    )
    spool: PathText | None = Field(
        None, description="Local folder for shards being written; default: beside a local root, else the temp folder."
    )
    spool_bytes: ByteSize | None = Field(
        None,
        description=(
            "Most bytes of shards in the spool; the engine waits when it is full. Default: what is stored at once "
            "(commit_threads) and two more shards, at least four, but not more than half of what is free. One shard "
            "fits always."
        ),
    )
    commit_threads: int | None = Field(
        None, ge=1, le=64, description="Shards checked, encoded and stored at once; default: half the CPUs, 8 at most."
    )
    reuse: bool = Field(
        True,
        description=(
            "Refer to rows that an earlier version of the root holds for the same samples, model and settings; false: "
            "extract everything."
        ),
    )
    share_prefixes: bool = Field(
        True,
        description=(
            "Compute and store token prefixes that samples have in common (system prompts, earlier turns) once per "
            "shard; false: every sample by itself."
        ),
    )
    client: Literal["auto", "s3fs", "obstore"] = Field(
        "auto",
        description=(
            "Who carries the bytes of shards to S3: s3fs, obstore (faster, an optional package), or auto: obstore "
            "where it is installed and can do what storage_options ask."
        ),
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
        env_prefix=_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    root: PathText = Field(description="Where the dataset goes: a directory or s3://bucket/prefix.")
    model: ModelSettings
    data: DataSettings
    chat: ChatSettings = ChatSettings()
    layers: Annotated[tuple[int | str, ...] | None, NoDecode] = Field(
        None,
        description=(
            "Layer ids k (stream after k of n blocks; -1 is n, -2 is n-1 ...) and names: eagle3 (2, n//2, n-3), last "
            "(n), all (0 to n), every:K (0, K, 2K ... up to n). A list or text such as eagle3,last. Default: eagle3 "
            "and last."
        ),
    )
    engine: EngineSettings = EngineSettings()
    preflight: PreflightSettings = PreflightSettings()
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
    quarantine_runs: int = Field(
        3,
        ge=0,
        description="Runs that try a sample which fails its row checks or kills the engine; 0 and 1: never retried.",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _truth_values_are_no_numbers(cls, value: object, info: ValidationInfo) -> object:
        if info.field_name == "layers":
            return value
        return _refuse_truth_values(cls.model_fields, value, info.field_name)

    @field_validator("layers", mode="before")
    @classmethod
    def _layers_as_written(cls, value: object) -> object:
        return None if value is None else parse_layers(value)

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


def job_tree(path: str | os.PathLike[str] | None, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a job file and overrides say, as one tree, without the environment and without any check of the values.

    For a process on another machine, which has an environment of its own; see ``load_job``.

    Raises:
        SettingsError: the file cannot be read, or an override names a field of a value.
    """
    flags: dict[str, Any] = {}
    for dotted, value in (overrides or {}).items():
        _set(flags, dotted, value)
    return _merged(_read_yaml(Path(path)) if path is not None else {}, flags)


def load_job(path: str | os.PathLike[str] | None, overrides: dict[str, Any] | None = None) -> JobSettings:
    """Read a job file, the environment and overrides into one validated tree.

    Args:
        path: YAML file, or None when everything comes from elsewhere.
        overrides: dotted names to values, e.g. ``{"chat.max_length": 512}``.

    Raises:
        SettingsError: names the file, the field, what came and, for an unknown field, the nearest known name.
    """
    source = str(path) if path is not None else "settings"
    tree, flags = job_tree(path), job_tree(None, overrides)
    _refuse_unknown_variables()
    try:
        environment = EnvSettingsSource(JobSettings)()
        return JobSettings(**_merged(_merged(tree, environment), flags))
    except SettingsSourceError as error:
        raise SettingsError(f"environment: {error}; nested fields are written CORESAMPLE_MODEL__PATH") from error
    except ValidationError as error:
        raise SettingsError(_explain(error, source)) from error
    except RecursionError:
        raise SettingsError(f"{source}: a value is nested too deeply; write it flatter") from None


def _refuse_unknown_variables() -> None:
    """Refuse environment variables with our prefix that set nothing: pydantic-settings would pass them over.

    Raises:
        SettingsError: names the variable and the nearest one that exists.
    """
    known = dict(_variables(JobSettings, _PREFIX))
    for name in sorted(os.environ):
        upper = name.upper()
        if not upper.startswith(_PREFIX) or upper in _OWN_VARIABLES:
            continue
        top, *rest = upper.removeprefix(_PREFIX).split("__")
        if f"{_PREFIX}{top}" in known and (not rest or known[f"{_PREFIX}{top}"]):
            continue  # a field, or something in a section, which is refused there if it is unknown
        near = difflib.get_close_matches(upper, known, n=1)
        hint = f"did you mean {near[0]}? Correct or unset it" if near else "correct or unset it"
        raise SettingsError(
            f"environment variable {shortened(name)} sets no field of a job; {hint} (fields of sections are written "
            "with two underscores, e.g. CORESAMPLE_MODEL__PATH)"
        )


def _variables(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, bool]]:
    """Every variable of a model, and whether it is a section."""
    for field, info in model.model_fields.items():
        name = f"{prefix}{field.upper()}"
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield name, True
            yield from _variables(section, f"{name}__")
        else:
            yield name, False


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``, section by section."""
    result = dict(below)
    for name, value in above.items():
        old = result.get(name)
        result[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _read_yaml(path: Path) -> dict[str, Any]:
    where = f"job file {shortened(str(path))}"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(f"{where} does not exist") from None
    except OSError as error:
        raise SettingsError(f"{where} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise SettingsError(f"{where} cannot be read: {error}") from error
    tree = parse_yaml(text, where)
    if not isinstance(tree, dict):
        raise SettingsError(f"{where} must hold a mapping (root, model, data, ...), got {type(tree).__name__}")
    return tree


class _Wrong(yaml.YAMLError):
    """Valid YAML that no job may hold; ``node`` is what is wrong."""

    def __init__(self, problem: str, node: yaml.Node):
        super().__init__(problem)
        self.problem, self.node = problem, node


class _Loader(yaml.SafeLoader):
    """Plain values only: keys are text and unique, dates stay text, and aliases cannot multiply without bound."""

    tree: yaml.Node | None = None

    def get_single_node(self) -> yaml.Node | None:
        self.tree = super().get_single_node()
        if self.tree is not None:
            _count(self.tree, {})
        return self.tree

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            shown = shortened(str(node.value)) if isinstance(node, yaml.ScalarNode) else "this"
            kind = node.tag.rpartition(":")[2]
            raise _Wrong(
                f"{shown!r} cannot be read as {kind} ({shortened(str(error))}); correct or quote it", node
            ) from error


def _as_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _as_text)


def _check_keys(node: yaml.MappingNode) -> None:
    """Refuse keys that are no text or come twice; YAML itself lets the last one win."""
    seen: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
            shown = shortened(str(key.value)) if isinstance(key, yaml.ScalarNode) else "here"
            kind = key.tag.rpartition(":")[2]
            raise _Wrong(f"key {shown} is {kind}, but names of fields are text; correct it, or quote it", key)
        if key.value in seen:
            raise _Wrong(
                f"key {shortened(key.value)!r} is given twice, in line {seen[key.value]} and in line {line}; "
                "remove one",
                key,
            )
        seen[key.value] = line


def _count(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Values that a node comes to when its aliases are written out; checks the keys on the way.

    Raises:
        _Wrong: without end, or more than any job has; or a key that no job has.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    if node in known:
        if not known[node]:
            raise _Wrong("an alias holds itself; write the value out", node)
        return known[node]
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
    known[node] = 0
    total = 1
    for item in node.value:
        total += sum(_count(part, known) for part in item) if isinstance(item, tuple) else _count(item, known)
    if total > _MOST_NODES:
        raise _Wrong(f"aliases multiply to more than {_MOST_NODES:,} values; write what is meant", node)
    known[node] = total
    return total


def _field(tree: yaml.Node | None, wanted: yaml.Node) -> str:
    """Dotted name of the field that is, or holds, a node; empty when it is none."""
    waiting: list[tuple[yaml.Node, str]] = [(tree, "")] if tree is not None else []
    seen = set()
    while waiting:
        node, name = waiting.pop()
        if node is wanted:
            return name
        if isinstance(node, yaml.ScalarNode) or node in seen:
            continue
        seen.add(node)
        for number, item in enumerate(node.value):
            if not isinstance(item, tuple):
                waiting.append((item, f"{name}[{number}]"))
                continue
            key, value = item
            inner = f"{name}.{key.value}".lstrip(".") if isinstance(key, yaml.ScalarNode) else name
            waiting += [(value, inner), (key, inner)]
    return ""


def parse_yaml(text: str, where: str) -> Any:
    """Read YAML as job files and ``--set`` have it: plain values, no key twice, dates as text.

    Args:
        text: the YAML.
        where: file or flag, for messages.

    Raises:
        SettingsError: one line that names place, line and what to do.
    """
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except _Wrong as error:
        name = _field(loader.tree if loader is not None else None, error.node)
        field = f"field {shortened(name)!r}, " if name else ""
        raise SettingsError(f"{where}: {field}line {error.node.start_mark.line + 1}: {error.problem}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise SettingsError(f"{where} is not valid YAML: {place}{shortened(problem)}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{where} is not valid YAML: {shortened(' '.join(str(error).split()))}") from error
    except RecursionError:
        line = f" in line {loader.line + 1}" if loader is not None else ""
        raise SettingsError(f"{where}: lists or sections are nested too deeply{line}; write them flatter") from None
    finally:
        if loader is not None:
            loader.dispose()


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    fields: Any = JobSettings.model_fields
    for part in parents:
        info = fields.get(part)
        fields = getattr(info.annotation, "model_fields", {}) if info is not None else {}
        if info is not None and not fields and get_origin(info.annotation) is not dict:
            raise SettingsError(f"cannot set {shortened(dotted)}: {part} is a value, not a section; set {part} itself")
        nested = tree.setdefault(part, {})
        if not isinstance(nested, dict):
            raise SettingsError(f"cannot set {shortened(dotted)}: {part} is {type(nested).__name__}, not a section")
        tree = nested
    tree[leaf] = value


def _explain(error: ValidationError, source: str) -> str:
    lines = []
    for item in error.errors():
        field = shortened(".".join(str(part) for part in item["loc"]) or "(job)")
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(item["loc"][-1]), _known(item["loc"][:-1]), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            lines.append(f"{source}: unknown field {field!r}{hint}")
        elif item["type"] == "missing":
            lines.append(f"{source}: field {field!r} is required and missing")
        else:
            message = item["msg"].removeprefix("Value error, ")
            secret = {"storage_options", "extra"} & set(item["loc"])
            came = "" if secret else f"; got {_brief(item['input'])}"
            lines.append(f"{source}: field {field!r}: {message}{came}")
    return "\n".join(lines)


class _Brief(reprlib.Repr):
    """Never makes the whole text first: a value of a few lines of YAML can have more characters than memory."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlong, self.maxother = 3, 200, 60, 120
        self.maxlist = self.maxtuple = self.maxdict = 8


def _brief(value: object) -> str:
    """A value for a message, in about 200 characters, without passwords of URLs."""
    return shortened(_WITH_PASSWORD.sub(r"\1:***@", _Brief().repr(value)))


def _known(loc: tuple[int | str, ...]) -> list[str]:
    fields = JobSettings.model_fields
    for part in loc:
        info = fields.get(str(part))
        if info is None or not isinstance(info.annotation, type) or not issubclass(info.annotation, BaseModel):
            return []
        fields = info.annotation.model_fields
    return list(fields)
