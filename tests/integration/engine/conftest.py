"""One engine per configuration for the whole test run: starting vLLM on a CPU costs 20 to 45 s."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from extract_core.chat import Sample, load_chat_tokenizer, read_samples
from extract_core.engine import reference
from extract_core.engine.protocol import EngineSpec, ShardDone, ShardJob, laid_out
from extract_core.engine.supervisor import EngineSupervisor
from extract_core.settings import ChatSettings, DataSettings, ModelSettings
from extract_core.store.unsealed import UnsealedShard

LAYERS = [2, 15, 27, 30]
"""2, n//2, n-3 and n of the demo model's 30 blocks."""
CHATS, MAX_LENGTH = 32, 112


@dataclass(frozen=True)
class Capture:
    """What one shard job gave: float32 rows ``[N, L, H]`` and echoed token ids per sample, in order."""

    rows: list[np.ndarray]
    token_ids: list[np.ndarray]
    done: ShardDone


Capturer = Callable[..., Capture]


def run_job(engine: EngineSupervisor, folder: Path, sequences: Sequence[np.ndarray], *, solo: bool = False) -> Capture:
    """Capture ``sequences`` as one shard; with ``solo`` one at a time."""
    samples, total = laid_out(sequences, "s")
    attempt = uuid.uuid4().hex
    path = folder / f"{attempt}.tmp"
    job = ShardJob(attempt, str(path), total, samples, solo=[s.sample_id for s in samples] if solo else [])
    done = engine.extract(job, lambda progress: None)
    with UnsealedShard(path) as shard:
        found = [shard.sample(s.segments) for s in samples]
        rows, echo = [rows.float().numpy() for rows, _ in found], [ids.numpy() for _, ids in found]
    path.unlink()
    return Capture(rows, echo, done)


@pytest.fixture(scope="session")
def chats(demo_model: Path, sharegpt: Callable[[int], Path]) -> list[Sample]:
    """32 real chats, rendered with the demo model's template and cut to at most 112 tokens."""
    chat = ChatSettings(max_length=MAX_LENGTH)
    tokenizer = load_chat_tokenizer(ModelSettings(path=str(demo_model)), chat)
    data = DataSettings(path=str(sharegpt(200)))
    items = read_samples(data, chat, tokenizer, max_length=MAX_LENGTH, vocab_size=49152)
    return [item for item in items if isinstance(item, Sample)][:CHATS]


@pytest.fixture(scope="session")
def sequences(chats: list[Sample]) -> list[np.ndarray]:
    """Token ids of the chats."""
    assert len(chats) == CHATS
    return [chat.token_ids for chat in chats]


@pytest.fixture(scope="session")
def hf_rows(
    demo_model: Path, sequences: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> list[np.ndarray]:
    """Float32 Hugging Face rows of the chats at ``LAYERS``, layer n before the final norm."""
    return reference.compute(demo_model, sequences, LAYERS, tmp_path_factory.mktemp("reference")).rows


def _engine(model: Path, folder: Path, **settings: object) -> EngineSupervisor:
    spec = EngineSpec(
        model=str(model),
        layer_ids=LAYERS,
        max_model_len=MAX_LENGTH + 2,
        kv_cache_bytes=2**29,
        **{"dtype": "float32", "store_dtype": "float32", **settings},  # type: ignore[arg-type]
    )
    return EngineSupervisor(spec, folder / "logs", start_timeout_s=280, step_timeout_s=250)


@pytest.fixture(scope="session")
def engine_f32(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSupervisor]:
    """Float32, no chunking: every chat fits a step."""
    with _engine(demo_model, tmp_path_factory.mktemp("f32"), max_num_batched_tokens=2048) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine_chunked(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSupervisor]:
    """Float32, steps of 48 tokens: every chat is cut into chunks, and chunks of several share a step."""
    with _engine(demo_model, tmp_path_factory.mktemp("chunked"), max_num_batched_tokens=48, max_num_seqs=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine_bf16(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSupervisor]:
    """The checkpoint's own dtype."""
    with _engine(
        demo_model,
        tmp_path_factory.mktemp("bf16"),
        dtype="bfloat16",
        store_dtype="bfloat16",
        max_num_batched_tokens=2048,
    ) as engine:
        yield engine
