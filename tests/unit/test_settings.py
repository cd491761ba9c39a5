"""Job files, environment and flags; every mistake has a message that names the field and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from extract_core.errors import SettingsError
from extract_core.settings import JobSettings, load_job, parse_bytes

JOB = """
root: out
model: {path: m, dtype: bfloat16}
data: {path: d}
chat: {max_length: 100}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_flags_win_over_environment_and_that_over_the_file(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_job(job).model.dtype == "bfloat16"
    monkeypatch.setenv("CORESAMPLE_MODEL__DTYPE", "float32")
    monkeypatch.setenv("CORESAMPLE_CHAT__MAX_LENGTH", "200")
    loaded = load_job(job, {"chat.max_length": 300})
    assert (loaded.model.path, loaded.model.dtype, loaded.chat.max_length) == ("m", "float32", 300)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modell.path": "x"}, r"unknown field 'modell'; did you mean 'model'\?"),
        ({"chat.max_lenght": 5}, r"unknown field 'chat.max_lenght'; did you mean 'max_length'\?"),
        ({"chat.max_length": 1}, r"field 'chat.max_length'.*greater than or equal to 2; got 1"),
        ({"layers": [3, 3]}, r"layer ids are repeated: \[3\]"),
        ({"layers": [-1]}, r"layer ids are negative: \[-1\]"),
        ({"layers": []}, r"no layer ids given"),
        ({"store.shard_bytes": "5XB"}, r"'5XB' is not a size; write a number with one of"),
        ({"store.shard_bytes": 0}, r"field 'store.shard_bytes'.*greater than 0"),
        ({"completeness": 2}, r"field 'completeness'.*less than or equal to 1; got 2"),
        ({"store.storage_options": {"secret": "hunter2"}}, r"secret is a secret and must not be in a job"),
        (
            {"data.storage_options": {"client_kwargs": {"aws_secret_access_key": "x"}}},
            r"aws_secret_access_key is a secret",
        ),
    ],
)
def test_mistakes_name_the_field(job: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        load_job(job, change)
    assert str(job) in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_secret_is_not_repeated_in_the_message(job: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load_job(job, {"store.storage_options": {"secret": "hunter2"}})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must hold a mapping"),
        (b"- a\n- b\n", "must hold a mapping .* got list"),
        (b"root: [", "is not valid YAML"),
        (b"\xff\xfe\x00", "cannot be read|is not valid YAML"),
        (b"root: x\n", "field 'model' is required and missing"),
    ],
)
def test_files_that_are_no_job(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        load_job(path)


def test_sizes() -> None:
    assert parse_bytes("512MiB") == 512 * 2**20
    assert parse_bytes("1.5 GB") == 1_500_000_000
    assert parse_bytes("64") == 64
    assert parse_bytes(7) == 7


def test_every_field_has_a_description() -> None:
    def check(model: type, where: str) -> None:
        for name, field in model.model_fields.items():
            nested = field.annotation
            if isinstance(nested, type) and hasattr(nested, "model_fields"):
                check(nested, f"{where}{name}.")
            else:
                assert field.description, f"{where}{name}"

    check(JobSettings, "")
