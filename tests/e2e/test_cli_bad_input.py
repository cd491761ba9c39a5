"""What a user sees for each mistake: exit code 2, a message that names it, no traceback, and an untouched root."""

import json
import subprocess
import sys
import time

import pytest

from extract_core.job import prepare
from tests.unit.cli.kit import BLOCKS, POSITIONS, coresample, make_chats, make_model, settings, tree, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]  # the limit of all: it is long, so that it comes early


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def place(tmp_path, model):
    (tmp_path / "model").symlink_to(model)
    make_chats(tmp_path / "chats.jsonl")
    return tmp_path


def refused(place, *arguments, code=2, command="run"):
    """Run, and return what the user reads; the root is as it was before."""
    before = tree(place)
    done = coresample(command, place / "job.yaml", *arguments)
    shown = done.stdout + done.stderr
    assert done.returncode == code, shown
    assert "Traceback" not in shown
    assert tree(place) == before
    last = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(last) == 1, shown
    return done.stderr[done.stderr.index("error: ") :]


# -- the job file: answered before anything heavy is imported --------------------------------------------------------


def test_no_such_job_file(place):
    started = time.monotonic()
    assert "job.yaml does not exist" in refused(place)
    assert time.monotonic() - started < 20  # a loaded machine; it is about one second


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("root: [1\nmodel: {", ["job.yaml is not valid YAML", "line 2"]),
        ("just words", ["must hold a mapping", "str"]),
        ("", ["must hold a mapping"]),
        ("root: a\nroot: b", ["job.yaml", "'root'", "line 1 and in line 2"]),
        ("1: x", ["job.yaml", "field '1', line 1"]),
        ("root: " + "[" * 3000, ["job.yaml", "nested too deeply"]),
    ],
)
def test_job_file_that_is_no_job(place, text, words):
    (place / "job.yaml").write_text(text)
    message = refused(place)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chat__max_lenght": 64}, ["unknown field 'chat.max_lenght'", "did you mean 'max_length'"]),
        ({"modle": {"path": "x"}}, ["unknown field 'modle'", "did you mean 'model'"]),
        ({"model__path": None}, ["'model.path' is required and missing"]),
        ({"root": None}, ["'root' is required and missing"]),
        ({"store__shard_bytes": "12 parsecs"}, ["store.shard_bytes", "'12 parsecs' is not a size", "mib"]),
        ({"layers": [1, 1]}, ["'layers'", "repeated: 1;"]),
        ({"layers": ["middle"]}, ["'layers'", "'middle' is no layer", "eagle3, last, all, every:4"]),
        ({"layers": []}, ["'layers'", "no layer ids given"]),
        ({"completeness": 3}, ["'completeness'", "less than or equal to 1"]),
    ],
)
def test_job_file_with_wrong_fields(place, change, words):
    write_job(place / "job.yaml", **change)
    message = refused(place)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("chat.max_length", ["--set 'chat.max_length' is not of the form name=value"]),
        ("chat.max_length=many", ["chat.max_length", "'many'"]),
        ("chat.max_lengths=3", ["unknown field 'chat.max_lengths'", "did you mean 'max_length'"]),
        ("root.x=3", ["cannot set root.x"]),
        ("store.shard_bytes=1e400MiB", ["store.shard_bytes", "more than 2**60 bytes"]),
        ("layers=al", ["'layers'", "'al' is no layer (did you mean all?)"]),
    ],
)
def test_flags(place, pair, words):
    write_job(place / "job.yaml")
    message = refused(place, "--set", pair)
    assert all(word in message for word in words), message


# -- what the job names: answered before Prefect starts --------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": [2, 99]}, ["[99] out of range", f"{BLOCKS} blocks", "0 (embeddings)"]),
        ({"chat__max_length": 4096}, ["chat.max_length is 4096", f"at most {POSITIONS - 1} tokens"]),
        ({"model__path": "/no/such/model"}, ["model.path '/no/such/model' does not exist"]),
        ({"data__path": "/no/such/chats.jsonl"}, ["/no/such/chats.jsonl", "no such file or folder", "data.path"]),
        ({"data__path": "/no/such/*.jsonl"}, ["no file matches this pattern"]),
        ({"chat__template": "/no/such/template.jinja"}, ["/no/such/template.jinja"]),
    ],
)
def test_things_that_do_not_exist(place, change, words):
    write_job(place / "job.yaml", **change)
    message = refused(place)
    assert all(word in message for word in words), message


def test_empty_file(place):
    write_job(place / "job.yaml")
    (place / "chats.jsonl").write_text("")
    message = refused(place)
    assert "chats.jsonl" in message and "empty (0 bytes)" in message


def test_model_folder_without_weights(place):
    write_job(place / "job.yaml", model__path=str(place / "other"))
    (place / "other").mkdir()
    (place / "other" / "config.json").write_text("{}")
    assert "holds no weights" in refused(place)


def test_root_with_other_files(place):
    write_job(place / "job.yaml")
    (place / "dataset").mkdir()
    (place / "dataset" / "thesis.tex").write_text("years of work")
    message = refused(place)
    assert "holds other files (thesis.tex)" in message and "choose an empty or new folder" in message


def test_root_that_is_a_file(place):
    write_job(place / "job.yaml")
    (place / "dataset").write_text("a file")
    assert "is a file; give a folder" in refused(place)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("under a file", ["chats.jsonl, which is no folder; give another one"]),
        ("/proc", ["cannot be made in /proc", "give another folder"]),
        ("loop", ["lead in a circle"]),
        ("dangling", ["is a link to /no/such/folder, which does not exist"]),
        ("NUL", ["'root'", "NUL character"]),
        ("long", ["'root'", "at most 4,096 characters"]),
        ("long name", ["too long"]),
        ("no home", ["'root'", "~nosuchuser names no home folder"]),
        ("store.spool", ["store.spool", "is a file; give a folder"]),
        ("spool beside", ["spool", "is a file; give a folder"]),
    ],
)
def test_places_that_cannot_be_used(place, kind, words):
    (place / "loop").symlink_to("loop")
    (place / "dangling").symlink_to("/no/such/folder")
    (place / "beside").mkdir()
    (place / "beside" / ".spool").write_text("a file")
    roots = {
        "under a file": place / "chats.jsonl" / "x",
        "/proc": "/proc/coresample-test",
        "loop": place / "loop" / "x",
        "dangling": place / "dangling" / "x",
        "NUL": "a\0b",
        "long": "/" + "x/" * 2500,
        "long name": place / ("x" * 300),
        "no home": "~nosuchuser/x",
        "spool beside": place / "beside",
    }
    if kind == "store.spool":
        write_job(place / "job.yaml", store__spool=str(place / "chats.jsonl"))
    else:
        write_job(place / "job.yaml", root=str(roots[kind]))
    message = refused(place, "--no-prefect")
    assert "root" in message and all(word in message for word in words), message
    assert "File exists" not in message and len(message) < 900
    if kind in ("loop", "dangling"):
        assert "root" in refused(place, command="plan")


def test_root_that_is_read_only(place):
    write_job(place / "job.yaml")
    (place / "disk").mkdir()
    script = 'mount -t tmpfs -o ro tmpfs "$1" && exec "$2" -m extract_core.cli plan "$3" --root "$1/data"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    done = subprocess.run(
        [*command, str(place / "disk"), sys.executable, str(place / "job.yaml")], capture_output=True, text=True
    )
    if done.returncode and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.returncode == 2, done.stderr
    assert "root" in done.stderr and "Read-only file system" in done.stderr and "Traceback" not in done.stderr


def test_root_of_another_job(place):
    write_job(place / "job.yaml")
    job = prepare(settings(place / "job.yaml"))
    commits = place / "dataset" / "plans" / job.plan.fingerprint / "commits"
    commits.mkdir()
    (commits / "00000.json").write_text("{}")  # a plan alone may be replaced, extracted shards may not
    message = refused(place, "--set", "layers=[1,3]")
    assert "of another job; it differs in" in message
    assert "layer_ids: there [2, 3, 6], in this job [1, 3]" in message
    assert "allow_change: true" in message


# -- rows: found while planning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["plan"], ["run", "--no-prefect"]])
def test_all_rows_bad(place, command):
    write_job(place / "job.yaml")
    (place / "chats.jsonl").write_text('{"messages": [\nnot json\n')
    message = refused(place, *command[1:], command=command[0])
    assert "chats.jsonl, row 1: not one of 2 rows can be used (2 not_json)" in message


def test_zero_rows(place):
    write_job(place / "job.yaml")
    (place / "chats.jsonl").write_text("\n\n")
    message = refused(place, "--no-prefect")
    assert "chats.jsonl" in message and "no row" in message


def test_template_that_fails_on_every_row(place):
    write_job(place / "job.yaml", chat__template=str(place / "bad.jinja"), chat__mask="prefix")
    (place / "bad.jinja").write_text("{% for m in messages %}{{ raise_exception('roles must sing') }}{% endfor %}")
    message = refused(place, "--no-prefect")
    assert "roles must sing" in message and "chat.template" in message


def test_template_with_a_syntax_error(place):
    write_job(place / "job.yaml", chat__template=str(place / "bad.jinja"))
    (place / "bad.jinja").write_text("{% for m in messages %}{{ m.content }}")
    assert "template" in refused(place)


@pytest.mark.slow
def test_bad_rows_through_prefect(place):
    """The same words and no traceback of Prefect's own before them."""
    write_job(place / "job.yaml")
    (place / "chats.jsonl").write_text("not json\n")
    assert "row 1: not one of 1 rows can be used" in refused(place)


# -- json, and the commands that read --------------------------------------------------------------------------------


def test_errors_as_json(place):
    write_job(place / "job.yaml", layers=[99])
    done = coresample("run", place / "job.yaml", "--json")
    error = json.loads(done.stdout)["error"]
    assert done.returncode == error["exit_code"] == 2
    assert error["type"] == "LayerIdError" and "[99] out of range" in error["message"]


def test_misspelt_variable(place):
    write_job(place / "job.yaml")
    done = coresample("plan", place / "job.yaml", CORESAMPLE_COMPLETNESS="1")
    assert done.returncode == 2 and "did you mean CORESAMPLE_COMPLETENESS?" in done.stderr


@pytest.mark.parametrize("arguments", [["plan"], ["run", "a.yaml", "--unknown"], ["dance"], []])
def test_usage_errors_as_json(arguments):
    done = coresample(*arguments, "--json")
    error = json.loads(done.stdout)["error"]
    assert done.returncode == error["exit_code"] == 2
    assert error["type"] == "UsageError" and error["message"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["status", "verify", "inspect"])
def test_root_that_does_not_exist(tmp_path, command):
    done = coresample(command, tmp_path / "nothing")
    assert done.returncode == 2
    assert f"dataset root {tmp_path}/nothing does not exist" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "nothing").exists()


def test_usage_errors(tmp_path):
    for arguments in (["run"], ["run", "a.yaml", "--unknown"], ["dance"]):
        done = coresample(*arguments)
        assert done.returncode == 2
        assert "Usage:" in done.stderr and "Traceback" not in done.stderr
