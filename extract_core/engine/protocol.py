"""Messages between the host and its engine process.

Framed msgpack over a socket pair, so nothing that crosses is ever unpickled. Token ids travel as little-endian int32
bytes. Requests go host -> engine, events go engine -> host.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from extract_core.errors import EngineError
from extract_core.planning.prefixes import lay_out

AGAIN = "+"
"""End of the id of a request that runs a second time in its shard."""


class EngineSpec(msgspec.Struct, frozen=True, tag=True):
    """How to build the engine.

    ``layer_ids`` ascend and are in vLLM's numbering. ``max_model_len`` is at least two above the longest sample, since
    vLLM reserves a position for the output token. ``dtype`` is what the model computes in, ``store_dtype`` what its
    rows are stored in ("bfloat16", "float16" or "float32"). ``capture`` is "native" (auxiliary hidden states of the
    model class), "hooks" (forward hooks on the decoder layers, eager mode only) or "auto" (native where it reaches
    every layer id). ``prefix_caching`` off leaves requests without block hashes, for samples that share no prefix.
    """

    model: str
    layer_ids: list[int]
    max_model_len: int
    dtype: str
    store_dtype: str
    trust_remote_code: bool = False
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    tensor_parallel_size: int = 1
    enforce_eager: bool | None = None
    quantization: str | None = None
    load_format: str = "auto"
    capture: str = "auto"
    prefix_caching: bool = True
    buffer_bytes: int = 256 * 2**20
    writer_threads: int = 2
    extra: dict[str, Any] = {}


class JobSample(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a shard: its rows go to these segments (first row, rows), one after the other.

    Samples that begin with the same tokens may have the same segments; then they have the same rows.
    """

    sample_id: str
    segments: list[tuple[int, int]]
    token_ids: bytes

    @property
    def tokens(self) -> int:
        """Number of tokens, and of rows."""
        return len(self.token_ids) // 4

    @property
    def last_row(self) -> int:
        """Row of the last position."""
        first, rows = self.segments[-1]
        return first + rows - 1


def laid_out(sequences: Sequence[Any], prefix: str, *, share: bool = False) -> tuple[list[JobSample], int]:
    """Samples of integer token ids in one shard, named by number, and the rows of them all.

    Args:
        sequences: token ids of each.
        prefix: of their names.
        share: whether rows of common prefixes are shared.
    """
    made = lay_out(sequences, share=share)
    samples = [
        JobSample(f"{prefix}{number}", segments, np.asarray(ids, dtype="<i4").tobytes())
        for number, (ids, segments) in enumerate(zip(sequences, made.segments, strict=True))
    ]
    return samples, made.rows


class ShardJob(msgspec.Struct, frozen=True, tag=True):
    """Fill one shard file.

    ``solo`` names samples to run alone and first, because an earlier engine died with them in flight. ``chunk`` cuts
    prefills into chunks of at most that many tokens (0: only where a step is full), for the self-test; vLLM ignores it
    for a request that is alone. ``shard`` is its name for people.

    The engine takes the next job while one runs: its samples fill the steps that the first one's leave room in.
    """

    attempt: str
    path: str
    rows: int
    samples: list[JobSample]
    solo: list[str] = []
    want_top1: bool = True
    chunk: int = 0
    shard: str = ""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the engine process."""


class Starting(msgspec.Struct, frozen=True, tag=True):
    """A sign of life while the engine loads; ``stage`` is for the user."""

    stage: str


class FinalNorm(msgspec.Struct, frozen=True):
    """The norm between block n and lm_head, float32: what turns stored rows of layer n into the model's output.

    ``kind`` "rms": ``x / sqrt(mean(x^2) + epsilon) * (weight + offset)``; "layer": the same after subtracting the mean,
    plus ``bias``; "none": the model ends without a norm. ``weight`` and ``bias`` are little-endian float32 of H values,
    empty where the norm has none.
    """

    kind: str
    epsilon: float
    offset: float
    weight: bytes
    bias: bytes = b""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is up; ``info`` goes into commit records and manifest.

    ``final_norm`` is None where the norm is of an unknown kind; ``info["final_norm"]`` then says why. ``startup`` is
    where the time went, seconds by stage.
    """

    info: dict[str, Any]
    final_norm: FinalNorm | None = None
    startup: dict[str, float] = {}


class Progress(msgspec.Struct, frozen=True, tag=True):
    """After a step: samples of a job that entered and left the engine since its last message; ``tokens`` is how many
    rows of the shard the samples have that have left it so far.
    """

    attempt: str
    entered: list[str]
    finished: list[str]
    tokens: int
    steps: int


class ShardDone(msgspec.Struct, frozen=True, tag=True):
    """All rows of a shard are in its file.

    ``greedy`` maps sample id to the token the engine chose after it; ``top1`` to the argmax of ``lm_head(norm(h_n))``
    computed from the stored last row (absent where layer n is not captured). ``refused`` maps sample id to a reason.
    """

    attempt: str
    greedy: dict[str, int]
    top1: dict[str, int]
    refused: dict[str, str]
    counters: dict[str, float]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on. ``kind`` is the name of an exception type of ``extract_core.errors``."""

    kind: str
    message: str
    traceback: str


Request = EngineSpec | ShardJob | Shutdown
Event = Starting | Ready | Progress | ShardDone | Failed

MOST_BYTES = 2**30
"""Longest message from the engine; the largest honest one is a final norm, some hundred KB."""

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_event_decoder = msgspec.msgpack.Decoder(Event)


def send(connection: Connection, message: Request | Event) -> None:
    """Send one message; raises OSError when the other side is gone."""
    connection.send_bytes(_encoder.encode(message))


def receive_request(connection: Connection) -> Request:
    """Next request, in the engine process; raises EOFError when the host is gone."""
    return _request_decoder.decode(connection.recv_bytes())


def receive_event(connection: Connection) -> Event:
    """Next event, in the host; raises EOFError when the engine process is gone."""
    try:
        return _event_decoder.decode(connection.recv_bytes(MOST_BYTES))
    except msgspec.MsgspecError as error:
        raise EngineError(f"the engine process sent a message that does not decode: {error}") from error
    except (EOFError, ConnectionError):
        raise
    except (OSError, OverflowError) as error:
        if "end of file" in str(error):  # the process died in mid-message
            raise EOFError(str(error)) from error
        raise EngineError(f"the engine process sent a message longer than {MOST_BYTES:,} bytes ({error})") from error
