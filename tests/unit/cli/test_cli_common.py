"""Failures, exit codes, options and numbers."""

import errno
import json
import subprocess
import sys
import time

import pytest
import typer

from extract_core.cli.common import (
    by_reason,
    counted,
    duration,
    guarded,
    innermost,
    layer_in_words,
    open_dataset,
    parse_pairs,
    size,
    understood,
)
from extract_core.errors import (
    CheckFailedError,
    CoresampleError,
    EngineCrashedError,
    EngineReport,
    IncompleteError,
    NoSpaceError,
    SettingsError,
)
from tests.unit.cli.kit import coresample


def outcome(capsys, raised, as_json=False, name="run"):
    def command(as_json=False):
        raise raised

    command.__name__ = name
    with pytest.raises(typer.Exit) as ended:
        guarded(command)(as_json=as_json)
    shown = capsys.readouterr()
    return ended.value.exit_code, shown.out, shown.err


@pytest.mark.parametrize(
    ("error", "code"),
    [(SettingsError("wrong field"), 2), (CheckFailedError("wrong rows"), 1), (IncompleteError("too few"), 3)],
)
def test_our_errors(capsys, error, code):
    assert outcome(capsys, error) == (code, "", f"error: {error}\n")
    found, out, err = outcome(capsys, error, as_json=True)
    assert found == code and err == f"error: {error}\n"
    assert json.loads(out) == {"error": {"type": type(error).__name__, "message": str(error), "exit_code": code}}


def test_long_messages_and_brackets_are_shown_as_they_are(capsys):
    text = "[red]layers: [7] out of range[/red] " + "x" * 400
    assert outcome(capsys, SettingsError(text))[2] == f"error: {text}\n"


def test_engine_errors_show_the_message_then_the_circumstances_then_the_root_cause(capsys):
    chain = (
        "Traceback (most recent call last):\n  inner frame\nValueError: bad block\n"
        "\nThe above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n  outer frame\nRuntimeError\n"
    )
    log = f"loading\n{chain}\nbye"
    report = EngineReport(
        stage="running 9 samples, 300 tokens",
        log="/x.log",
        versions={"vllm": "0.32.0", "torch": "2.13.0"},
        settings={"model": "/m", "layer_ids": [1, 2]},
        in_flight=tuple(f"s{n}" for n in range(10)),
    )
    error = EngineCrashedError(
        "ValueError: bad block (engine log: /x.log)", engine_traceback=chain, log_tail=log, report=report
    )
    code, out, err = outcome(capsys, error)
    assert (code, out) == (1, "")
    assert err.startswith("error: ValueError: bad block (engine log: /x.log)\n")
    assert err.endswith("inner frame\nValueError: bad block\n") and "outer frame" not in err
    assert "loading\n(the traceback below)\n\nbye" in err
    for line in (
        "stage       running 9 samples, 300 tokens",
        "versions    vllm 0.32.0, torch 2.13.0",
        "settings    model=/m, layer_ids=[1, 2]",
        "in flight   s0, s1, s2, s3, s4, s5, s6, s7 and 2 more",
    ):
        assert line in err
    document = json.loads(outcome(capsys, error, as_json=True)[1])["error"]
    assert document["engine_traceback"] == chain and document["log_tail"] == log
    assert document["engine"]["versions"]["vllm"] == "0.32.0" and len(document["engine"]["in_flight"]) == 10


def test_an_engine_error_without_an_engine_is_one_line(capsys):
    assert outcome(capsys, EngineCrashedError("gone"))[2] == "error: gone\n"


def test_interrupted(capsys):
    code, out, err = outcome(capsys, KeyboardInterrupt())
    assert (code, out) == (130, "")
    assert "committed shards are kept" in err and "same command again" in err
    assert outcome(capsys, KeyboardInterrupt(), name="verify")[2] == "interrupted\n"
    assert json.loads(outcome(capsys, KeyboardInterrupt(), as_json=True)[1])["error"]["exit_code"] == 130


def test_full_disk_and_other_refusals_of_the_system(capsys):
    code, _, err = outcome(capsys, OSError(errno.ENOSPC, "No space left on device", "/data/x"))
    assert code == 1 and "/data/x: No space left on device; free space" in err and "committed shards are kept" in err
    assert isinstance(understood(OSError(errno.EDQUOT, "Disk quota exceeded")), NoSpaceError)
    code, _, err = outcome(capsys, PermissionError(errno.EACCES, "Permission denied", "/data/x"))
    assert (code, err) == (1, "error: /data/x: Permission denied\n")


def test_failure_wrapped_by_an_orchestrator():
    inner = SettingsError("wrong field")
    outer = RuntimeError("flow run failed")
    outer.__cause__ = inner
    assert understood(outer) is inner


def test_defects_keep_their_traceback(capsys):
    def command(as_json=False):
        raise ZeroDivisionError("a defect")

    with pytest.raises(ZeroDivisionError):
        guarded(command)(as_json=True)
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "ZeroDivisionError"


def test_exit_codes_of_commands(capsys):
    for returned, code in ((None, 0), (0, 0), (1, 1)):
        with pytest.raises(typer.Exit) as ended:
            guarded(lambda returned=returned: returned)()
        assert ended.value.exit_code == code


def test_reader_that_leaves_early():
    """``coresample ... | head -1`` ends without a word."""
    code = (
        "import sys; from extract_core.cli.common import guarded, emit\n"
        "def command():\n    for n in range(100000): emit({'n': n})\n"
        "import typer\n"
        "try: guarded(command)()\nexcept typer.Exit as end: sys.exit(end.exit_code)\n"
    )
    done = subprocess.run(
        f'"{sys.executable}" -c "{code}" | head -1', shell=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "{\n" and done.stderr == ""


def test_pairs():
    assert parse_pairs(["a.b=1", "c=x=y", "d=[1, 2]", "e="], "--set") == {"a.b": 1, "c": "x=y", "d": [1, 2], "e": None}
    for bad, words in (
        ("a", "not of the form"),
        ("=1", "not of the form"),
        ("a=[1", "--set a=...: the value is not valid YAML: line 1"),
        ("root=!!int x", "--set root=...: the value: line 1: 'x' cannot be read as int"),
        ("a=" + "[" * 3000, "--set a=...: the value: lists or sections are nested too deeply"),
        ("a={b: 1, b: 2}", "key 'b' is given twice"),
    ):
        with pytest.raises(SettingsError, match=words):
            parse_pairs([bad], "--set")


def test_storage_options_reach_the_root(tmp_path):
    (tmp_path / "job.yaml").write_text(
        "root: s3://b/p\nmodel: {path: x}\ndata: {path: y}\nstore: {storage_options: {anon: true, profile: from_job}}\n"
    )
    root, version = open_dataset("s3://b/p@3", ["profile=from_flag"], str(tmp_path / "job.yaml"))
    assert version == 3 and root.url == "s3://b/p"
    assert root._options == {"anon": True, "profile": "from_flag"}
    with pytest.raises(SettingsError, match="does not exist"):
        open_dataset(str(tmp_path / "none"), None, None)
    with pytest.raises(SettingsError, match="version 0"):
        open_dataset(f"{tmp_path}@0", None, None)
    for text in ("x", "", "-1", "1.5", "9" * 100):
        with pytest.raises(SettingsError, match=rf"after the @ is no version.*write {tmp_path}@3") as caught:
            open_dataset(f"{tmp_path}@{text}", None, None)
        assert len(str(caught.value)) < 900
        if text:
            folder = tmp_path.with_name(f"{tmp_path.name}@{text}")
            folder.mkdir()
            assert open_dataset(str(folder), None, None)[0].url == str(folder)


def test_a_folder_of_the_whole_name_is_the_root(tmp_path):
    (tmp_path / "a@0").mkdir()
    assert open_dataset(f"{tmp_path}/a@0", None, None)[1] is None
    (tmp_path / "a@3").mkdir()
    assert open_dataset(f"{tmp_path}/a@3", None, None)[0].url == f"{tmp_path}/a@3"
    (tmp_path / "a").mkdir()
    root, version = open_dataset(f"{tmp_path}/a@3", None, None)
    assert (root.url, version) == (f"{tmp_path}/a", 3)


def test_numbers_for_people():
    assert [counted(n, "shard") for n in (0, 1, 1200)] == ["0 shards", "1 shard", "1,200 shards"]
    assert [size(n) for n in (0, 1023, 1024, 9.5 * 2**20, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "9.5 MiB",
        "3.0 TiB",
    ]
    assert [duration(s) for s in (0.26, 42, 300, 7380, 300000)] == ["0.3 s", "42 s", "5 min", "2 h 03 min", "3.5 days"]
    assert by_reason({}) == "" and by_reason({"b": 1000, "a": 2}) == " (a 2, b 1,000)"
    assert "embeddings" in layer_in_words(0, 6)
    assert layer_in_words(3, 6) == "after block 3 of 6"
    assert "before the final norm" in layer_in_words(6, 6)
    assert innermost("x") == "x"


def test_help_is_quick_and_heavy_imports_are_lazy():
    heavy = "torch", "transformers", "prefect", "pyarrow", "vllm", "pydantic"
    code = f"import sys, extract_core.cli; print([name for name in {heavy!r} if name in sys.modules])"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
    assert time.monotonic() - started < 10  # a loaded machine; it is about 0.3 s
    shown = coresample("--help").stdout
    assert all(name in shown for name in ("doctor", "plan", "run", "status", "verify", "inspect"))


def test_base_of_all_errors_has_an_exit_code():
    def all_of(kind):
        return [kind, *(sub for child in kind.__subclasses__() for sub in all_of(child))]

    assert {kind.exit_code for kind in all_of(CoresampleError)} == {1, 2, 3}
