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
        ({"layers": [3, 3]}, r"layer ids are repeated: 3;"),
        ({"layers": ["last", 3, " LAST"]}, r"layer ids are repeated: last;"),
        ({"layers": "every:4,every:04"}, r"layer ids are repeated: every:4;"),
        *(({"layers": value}, r"field 'layers': no layer ids given") for value in ([], "[]", "", " ")),
        *(
            ({"layers": value}, r"field 'layers': .*\(eagle3, last, all, every:4\), e.g. layers: \[eagle3, last\] or")
            for value in ("1;2", "1,", "1.5,2", [True, 2], [1.5], ["a"], True, {"a": 1}, "9" * 5000, 1.5, [None], [[1]])
        ),
        ({"layers": "eagel3,last"}, r"'eagel3' is no layer \(did you mean eagle3\?\)"),
        ({"layers": "evry:4"}, r"'evry:4' is no layer \(did you mean every:4\?\)"),
        ({"layers": "last:2"}, r"'last:2' is no layer \(did you mean last\?\)"),
        ({"layers": [{"every": 4}]}, r"field 'layers': every: 4 with a space is a section in YAML; write every:4"),
        *(
            ({"layers": value}, rf"'{value}' needs a number of blocks from 1 on, e.g. every:4")
            for value in ("every", "every:", "every:0", "every:-1", "every:x")
        ),
        ({"engine.capture": "hook"}, r"field 'engine.capture'.*'auto', 'native' or 'hooks'; got 'hook'"),
        (
            {"engine.capture": "hooks", "engine.enforce_eager": False},
            r"field 'engine.enforce_eager': capture: hooks needs eager mode; leave enforce_eager out",
        ),
        (
            {"engine.max_num_seqs": 300, "engine.max_num_batched_tokens": 256},
            r"field 'engine.max_num_seqs': more samples in a step than max_num_batched_tokens \(256\)",
        ),
        ({"preflight.reference": "yes"}, r"field 'preflight.reference'.*'auto', 'always' or 'never'; got 'yes'"),
        ({"store.shard_bytes": True}, r"field 'store.shard_bytes': true and false are no "),
        ({"store.shard_bytes": 10**30}, r"field 'store.shard_bytes': more than 2\*\*60 bytes"),
        ({"store.shard_bytes": 1e30}, r"more than 2\*\*60 bytes"),
        ({"store.shard_bytes": "1e400MiB"}, r"'1e400MiB' is more than 2\*\*60 bytes"),
        ({"store.shard_bytes": "nan"}, r"'nan' is not a size"),
        ({"engine.kv_cache_bytes": "2000000TiB"}, r"field 'engine.kv_cache_bytes'.*more than 2\*\*60"),
        ({"data.limit": True}, r"field 'data.limit': true and false are no numbers"),
        ({"completeness": True}, r"field 'completeness': true and false are no numbers"),
        ({"engine.writer_threads": False}, r"field 'engine.writer_threads': true and false are no numbers"),
        ({"root": "~nosuchuser/x"}, r"field 'root': ~nosuchuser names no home folder"),
        ({"store.spool": "~nosuchuser/x"}, r"field 'store.spool': ~nosuchuser names no home folder"),
        ({"data.path": ["ok", "a\0b"]}, r"field 'data.path.*NUL character"),
        ({"root": "a\ud800"}, r"field 'root': .*lone surrogate"),
        ({"model.path": "m" * 5000}, r"field 'model.path': a path has at most 4,096 characters, this has 5,000"),
        ({"store.shard_bytes": "5XB"}, r"'5XB' is not a size; write a number with one of"),
        ({"store.shard_bytes": 0}, r"field 'store.shard_bytes'.*greater than 0"),
        ({"completeness": 2}, r"field 'completeness'.*less than or equal to 1; got 2"),
        ({"store.storage_options": {"secret": "hunter2"}}, r"secret is a secret and must not be in a job"),
        ({"store.storage_options": {"client_kwargs": {"aws_session_token": "x"}}}, r"aws_session_token is a secret"),
        ({"store.storage_options": {"connection_string": "x"}}, r"connection_string is a secret"),
        ({"store.storage_options": {"s3_additional_kwargs": {"SSECustomerKey": "x"}}}, r"SSECustomerKey is a secret"),
        ({"engine.extra": {"hf_token": "x"}}, r"hf_token is a secret"),
        ({"root": "s3://key:hunter2@bucket/data"}, r"a URL with a password in it would be stored and shown"),
        ({"data.path": "sftp://me:hunter2@host/chats.jsonl"}, r"a URL with a password in it"),
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
    assert "hunter2" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_values_are_cut_in_messages(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 6)}]" for n in range(1, 5)]
    for text in (JOB.replace("out", "x" * 5000), JOB.replace("root: out", "root: *a4").replace("\n", "", 1)):
        path = tmp_path / "job.yaml"
        path.write_text("\n".join(lines) + "\n" + text)
        with pytest.raises(SettingsError, match="field 'root'") as caught:
            load_job(path)
        assert all(len(line) < 600 for line in str(caught.value).splitlines())


LAYERS = [
    ("30, 2,15", (30, 2, 15)),
    ("[30,2,15]", (30, 2, 15)),
    ("eagle3,last", ("eagle3", "last")),
    ('["eagle3", -1]', ("eagle3", -1)),
    ("[Every:4, '7']", ("every:4", 7)),
    ("last", ("last",)),
    ("-2", (-2,)),
    ("all", ("all",)),
]


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        *LAYERS,
        ([30, 2, 15], (30, 2, 15)),
        ((2, -15), (2, -15)),
        (["eagle3", -1, "4", "EVERY:8"], ("eagle3", -1, 4, "every:8")),
        (5, (5,)),
        (None, None),
    ],
)
def test_layers_as_text_or_list(job: Path, value: object, layers: object) -> None:
    assert load_job(job, {"layers": value}).layers == layers


@pytest.mark.parametrize(("value", "layers"), LAYERS)
def test_layers_from_the_environment(
    job: Path, monkeypatch: pytest.MonkeyPatch, value: str, layers: tuple[int | str, ...]
) -> None:
    monkeypatch.setenv("CORESAMPLE_LAYERS", value)
    assert load_job(job).layers == layers


def test_capture_preflight_and_sizes_are_open_by_default(job: Path) -> None:
    loaded = load_job(job, {"engine.capture": "hooks"})
    assert (loaded.engine.capture, loaded.engine.enforce_eager, loaded.engine.buffer_bytes) == ("hooks", None, None)
    assert loaded.preflight.reference == "auto"
    assert load_job(job, {"engine.buffer_bytes": "1GiB"}).engine.buffer_bytes == 2**30


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("CORESAMPLE_COMPLETNESS", "did you mean CORESAMPLE_COMPLETENESS?"),
        ("coresample_completness", "did you mean CORESAMPLE_COMPLETENESS?"),
        ("CORESAMPLE_MODEL_PATH", "did you mean CORESAMPLE_MODEL__PATH?"),
        ("CORESAMPLE_ROOT__X", "did you mean CORESAMPLE_ROOT?"),
        ("CORESAMPLE_", "Correct or unset it"),
        ("CORESAMPLE_QQQQQQQQQQQQQQQQ", "correct or unset it"),
    ],
)
def test_unknown_variables(job: Path, monkeypatch: pytest.MonkeyPatch, name: str, nearest: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError) as caught:
        load_job(job)
    assert f"environment variable {name} sets no field" in str(caught.value) and nearest in str(caught.value)


def test_own_variables_are_no_settings(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORESAMPLE_ENGINE_FDS", "3")
    monkeypatch.setenv("CORESAMPLE_CHAT", '{"max_length": 50}')
    assert load_job(job).chat.max_length == 50


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
        (b"root: a\nmodel: {path: m}\nroot: b\n", "'root', line 3: key 'root' is given twice, in line 1 and in line 3"),
        (
            b"chat: {mask: auto,\n mask: prefix}",
            "'chat.mask', line 2: key 'mask' is given twice, in line 1 and in line 2",
        ),
        (b"1: x\n", "field '1', line 1: key 1 is int, but names of fields are text; correct it, or quote it"),
        (b"model: {on: x}\n", "field 'model.on', line 1: key on is bool"),
        (b"? [a]\n: x\n", "key here is seq"),
        (b"? !!str [a]\n: x\n", "key here is str"),
        (b"root: !!timestamp nonsense\n", "field 'model' is required"),
        (b"data: {limit: 0b_}\n", "field 'data.limit', line 1: '0b_' cannot be read as int"),
        (b"data: [1, !!bool perhaps]\n", r"field 'data\[1\]', line 1: 'perhaps' cannot be read as bool"),
        (b"root: " + b"9" * 5000, "field 'root', line 1: .* cannot be read as int"),
        (b"root: " + b"[" * 3000, "nested too deeply in line 1"),
        (b"root: &a [*a]\n", "field 'root', line 1: an alias holds itself"),
        (b"root: !!python/object:os.system x\n", "is not valid YAML: line 1, column 7"),
    ],
)
def test_files_that_are_no_job(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=message) as caught:
        load_job(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 900
    if b"root: x" not in content and b"timestamp" not in content:
        assert "\n" not in str(caught.value)


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    bomb = ["a0: &a0 {k: [x, x]}"] + [
        f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}" for n in range(1, 30)
    ]
    path = tmp_path / "job.yaml"
    path.write_text("\n".join(bomb))
    with pytest.raises(SettingsError, match="aliases multiply to more than 100,000 values"):
        load_job(path)


def test_dates_are_text_and_merges_work(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "root: 2025-13-45\nmodel: &m {path: m, dtype: float32}\ndata: {path: d}\n"
        "chat: {template_date: 2025-02-03, template_kwargs: {<<: *m, path: mine}}\n"
    )
    job = load_job(path)
    assert (job.root, job.chat.template_date) == ("2025-13-45", "2025-02-03")
    assert job.chat.template_kwargs == {"path": "mine", "dtype": "float32"}


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
