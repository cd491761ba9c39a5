"""What the throughput benchmarks compute: ``python -m benchmarks.workloads OUT.npz [--chats N]``.

The file holds token ids only, so that a machine without packages of data and tokenizers can use it:

* ``chats``: real ShareGPT conversations, rendered and cut by the product's own reader with the tokenizer of the demo's
  model (SmolLM2, 49,152 tokens), a conversation stored once with the ends of its samples, one per assistant turn;
* ``system``: a system prompt of 1,000 tokens (an answer of another conversation, as real text).

From it come three workloads: ``uniform`` (prompts of 1,024 random tokens), ``turns`` (one sample per assistant turn)
and ``system`` (the system prompt before every conversation, a sample each). Equal samples come once, as in a plan.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LONGEST, SYSTEM_TOKENS, UNIFORM_TOKENS = 4096, 1000, 1024
NAMES = ("uniform", "turns", "system")
Ids = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Chats:
    """Real conversations as token ids.

    Attributes:
        ids: of each conversation, int32 ``[N]``.
        ends: of each, where its samples end, ascending.
        system: the system prompt, int32.
        vocabulary: tokens that the tokenizer knows.
    """

    ids: list[Ids]
    ends: list[list[int]]
    system: Ids
    vocabulary: int

    def first(self, conversations: int) -> Chats:
        """The same with fewer conversations."""
        return Chats(self.ids[:conversations], self.ends[:conversations], self.system, self.vocabulary)


@dataclass(frozen=True)
class Workload:
    """Samples in the order in which they are asked for."""

    name: str
    samples: list[Ids]

    @property
    def tokens(self) -> int:
        """Of all samples, shared ones counted for each."""
        return sum(map(len, self.samples))

    def part(self, share: float) -> Workload:
        """The first samples, at least one."""
        return Workload(self.name, self.samples[: max(1, round(len(self.samples) * share))])

    def facts(self) -> dict[str, Any]:
        """For the result file; ``distinct`` counts tokens whose whole prefix no other sample has."""
        return {
            "name": self.name,
            "samples": len(self.samples),
            "tokens": self.tokens,
            "distinct": distinct(self.samples),
            "longest": max(map(len, self.samples)),
        }


def distinct(samples: Iterable[Ids]) -> int:
    """Nodes of the trie of the samples: what has to be computed at least."""
    total, before = 0, np.empty(0, np.int32)
    for ids in sorted(samples, key=lambda ids: ids.astype(">i4").tobytes()):
        common = min(len(ids), len(before))
        differ = np.flatnonzero(ids[:common] != before[:common])
        total += len(ids) - (int(differ[0]) if len(differ) else common)
        before = ids
    return total


def make(name: str, chats: Chats, *, prompts: int, length: int = UNIFORM_TOKENS) -> Workload:
    """One of ``NAMES``.

    Args:
        name: which.
        chats: conversations for ``turns`` and ``system``; ``uniform`` takes only its vocabulary.
        prompts: number of samples of ``uniform``.
        length: tokens of each of them.
    """
    if name == "uniform":
        random = np.random.default_rng(0)
        samples: Iterable[Ids] = list(random.integers(3, chats.vocabulary, (prompts, length), dtype=np.int32))
    elif name == "turns":
        samples = (ids[:end] for ids, ends in zip(chats.ids, chats.ends, strict=True) for end in ends)
    elif name == "system":
        samples = (np.concatenate([chats.system, ids])[:LONGEST] for ids in chats.ids)
    else:
        raise ValueError(f"unknown workload {name!r}; there are {', '.join(NAMES)}")
    return Workload(name, list({ids.tobytes(): ids for ids in samples}.values()))


def save(chats: Chats, path: Path) -> None:
    """Write conversations; a few bytes per distinct token at most."""
    kind = np.uint16 if chats.vocabulary <= 2**16 else np.int32
    with path.open("wb") as file:
        np.savez_compressed(
            file,
            ids=np.concatenate(chats.ids).astype(kind),
            lengths=np.array([len(ids) for ids in chats.ids], np.int32),
            ends=np.concatenate([np.asarray(ends, np.int32) for ends in chats.ends]),
            samples=np.array([len(ends) for ends in chats.ends], np.int32),
            system=chats.system.astype(kind),
            vocabulary=np.array(chats.vocabulary),
        )


def load(path: Path) -> Chats:
    """What ``save`` wrote."""
    with np.load(path) as file:
        ids = np.split(file["ids"].astype(np.int32), np.cumsum(file["lengths"])[:-1])
        ends = [part.tolist() for part in np.split(file["ends"], np.cumsum(file["samples"])[:-1])]
        return Chats(ids, ends, file["system"].astype(np.int32), int(file["vocabulary"]))


def write_rows(samples: Sequence[Ids], path: Path) -> Path:
    """Samples as a job's input: JSON lines with ``input_ids``."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in samples)
    return path


def write_samples(samples: Sequence[Ids], path: Path) -> Path:
    """Samples for another process on this machine."""
    with path.open("wb") as file:
        np.savez(file, ids=np.concatenate(samples), lengths=np.array([len(ids) for ids in samples]))
    return path


def read_samples(path: Path) -> list[Ids]:
    """What ``write_samples`` wrote."""
    with np.load(path) as file:
        return np.split(file["ids"], np.cumsum(file["lengths"])[:-1])


def grouped(turns: Iterable[tuple[int, Ids]]) -> Iterator[tuple[Ids, list[int]]]:
    """Conversations with the ends of their samples, from samples with their row in the input.

    A sample that is no prefix of the row's next one (a template that writes earlier turns otherwise) stands by itself.
    """
    row, longest, ends = -1, np.empty(0, np.int32), []
    for number, ids in turns:
        grows = number == row and len(ids) >= len(longest) and np.array_equal(ids[: len(longest)], longest)
        if ends and not grows:
            yield longest, ends
            ends = []
        row, longest = number, ids
        if not ends or ends[-1] != len(ids):
            ends.append(len(ids))
    if ends:
        yield longest, ends


def from_sharegpt(conversations: int, model: Path, source: Path) -> Chats:
    """Render and tokenize real conversations.

    Args:
        conversations: how many of them are used, at most.
        model: folder of the model whose tokenizer and template are used.
        source: JSON lines with conversations, one more than are used for the system prompt.
    """
    from extract_core.chat import Sample, load_chat_tokenizer, read_samples
    from extract_core.settings import ChatSettings, DataSettings, ModelSettings

    chat = ChatSettings(samples="turn", max_length=LONGEST)
    tokenizer = load_chat_tokenizer(ModelSettings(path=str(model)), chat)
    data = DataSettings(path=str(source))
    found = read_samples(data, chat, tokenizer, max_length=LONGEST, vocab_size=tokenizer.vocab_size)
    turns = ((item.source.row, item.token_ids) for item in found if isinstance(item, Sample))
    made = list(grouped(turns))
    system = next(n for n, (ids, _) in enumerate(made) if len(ids) >= SYSTEM_TOKENS)
    text, _ = made.pop(system)
    kept = made[:conversations]
    return Chats(
        [ids for ids, _ in kept], [ends for _, ends in kept], text[:SYSTEM_TOKENS].copy(), tokenizer.vocab_size
    )


def real_chats(conversations: int, folder: Path) -> Chats:
    """``from_sharegpt`` with the demo's packages; model and chats are made in ``folder`` if they are not there."""
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "demo"))
    import prepare  # type: ignore[import-not-found, unused-ignore]

    model = prepare.prepare_model(folder)
    source = folder / f"bench-{conversations}.jsonl"
    if not source.exists():
        prepare.write_chats(source, conversations + 8)
    return from_sharegpt(conversations, model, source)


def main() -> None:
    """Write the file and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--chats", type=int, default=2000, help="conversations")
    parser.add_argument("--dir", type=Path, default=Path(".cache/coresample-demo"), help="of the demo's model")
    options = parser.parse_args()
    chats = real_chats(options.chats, options.dir)
    save(chats, options.out)
    for name in NAMES[1:]:
        print(json.dumps(make(name, chats, prompts=0).facts()))
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB, {len(chats.ids)} conversations")


if __name__ == "__main__":
    main()
