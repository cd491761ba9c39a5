"""The locks and the script that makes them."""

import json

import lock
import pytest


def test_names_are_compared_in_one_spelling():
    assert lock.canonical("Typing_Extensions") == lock.canonical("typing.extensions") == "typing-extensions"


def test_a_report_becomes_pins_without_local_labels_and_without_what_is_left_out():
    items = [("torch", "2.13.0+cpu"), ("torchvision", "0.29.1"), ("PyYAML", "6.0"), ("ruamel_x", "1")]
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in items]}
    assert lock.pins_of_report(report) == {"torch": "2.13.0", "pyyaml": "6.0", "ruamel-x": "1"}


def test_a_lock_is_sorted_carries_reasons_and_reads_back():
    reasons = lock.parse_reasons("b>=1  # because of c\na\n# a comment alone\nD_e[x]==3 # why\n")
    assert reasons == {"b": "because of c", "d-e": "why"}
    text = lock.render("cpu", {"b": "2", "a": "1", "d-e": "3"}, reasons, "0" * 64)
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        "a==1",
        "b==2  # because of c",
        "d-e==3  # why",
    ]
    assert text == lock.render("cpu", {"d-e": "3", "a": "1", "b": "2"}, reasons, "0" * 64)
    assert lock.parse_lock(text) == {"a": "1", "b": "2", "d-e": "3"}
    assert lock.recorded_digest(text) == "0" * 64


@pytest.mark.parametrize("line", ["torch", "torch>=2", "torch==", "-r other.lock", "==1"])
def test_a_line_that_is_no_pin_is_refused(line):
    with pytest.raises(lock.LockError, match="no pin"):
        lock.parse_lock(line)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A requirements folder with one input and its lock, and a pip that resolves it to a==1, b==2."""
    (tmp_path / "cpu.in").write_text("a  # first\n")
    answers = {"a": "1", "b": "2"}
    monkeypatch.setattr(lock, "resolve", lambda name, constraints, folder: dict(answers))
    (tmp_path / "cpu.lock").write_text(lock.make("cpu", upgrade=False, held={}, folder=tmp_path))
    return tmp_path


def test_a_fresh_lock_passes_its_check(folder):
    lock.check("cpu", online=True, folder=folder)


def test_an_edited_input_is_noticed_without_asking_pip(folder):
    (folder / "cpu.in").write_text("a\nc\n")
    with pytest.raises(lock.LockError, match=r"not made from the present cpu\.in; run: make lock LOCKS=cpu"):
        lock.check("cpu", online=False, folder=folder)


def test_an_edited_pin_is_noticed_and_both_versions_are_named(folder):
    path = folder / "cpu.lock"
    path.write_text(path.read_text().replace("b==2", "b==3") + "z==1\n")
    with pytest.raises(lock.LockError, match=r"b: lock 3, pip 2; z: lock 1, pip nothing"):
        lock.check("cpu", online=True, folder=folder)


def test_a_package_that_must_be_left_out_is_noticed(folder):
    path = folder / "cpu.lock"
    path.write_text(path.read_text() + "torchaudio==2.11.0\n")
    with pytest.raises(lock.LockError, match="must not hold torchaudio"):
        lock.check("cpu", online=False, folder=folder)


def test_present_pins_are_kept_unless_they_do_not_fit(folder, monkeypatch):
    asked = []

    def resolve(name, constraints, folder):
        asked.append(dict(constraints))
        if constraints.get("b") == "2":
            raise lock.LockError("conflict")
        return {"a": "1", "b": "9"}

    monkeypatch.setattr(lock, "resolve", resolve)
    assert "b==9" in lock.make("cpu", upgrade=False, held={}, folder=folder)
    assert asked == [{"a": "1", "b": "2"}, {}]


def test_a_lock_on_top_of_another_holds_only_its_additions(folder, monkeypatch):
    (folder / "dev.in").write_text("t\n")
    monkeypatch.setattr(lock, "resolve", lambda name, constraints, folder: {**constraints, "t": "5"})
    text = lock.make("dev", upgrade=False, held={}, folder=folder)
    assert lock.parse_lock(text) == {"t": "5"}


def test_what_pip_says_reaches_the_reader(tmp_path, monkeypatch):
    (tmp_path / "cpu.in").write_text("a\n")

    class Failed:
        returncode = 1
        stderr = "WARNING: noise\nERROR: prefect 3.8 needs fastapi>=0.139\n"

    monkeypatch.setattr(lock.subprocess, "run", lambda *_, **__: Failed)
    with pytest.raises(lock.LockError, match=r"cannot resolve requirements/cpu\.in:\nERROR: prefect 3\.8 needs"):
        lock.resolve("cpu", {}, tmp_path)


@pytest.mark.parametrize("name", lock.RECIPES)
def test_the_committed_lock_belongs_to_its_input_and_names_no_host(name):
    lock.check(name, online=False)
    text = (lock.REQUIREMENTS / f"{name}.lock").read_text() + (lock.REQUIREMENTS / f"{name}.in").read_text()
    assert "://" not in text


def test_locks_on_top_of_each_other_do_not_overlap():
    pins = {name: lock.parse_lock((lock.REQUIREMENTS / f"{name}.lock").read_text()) for name in ("cpu", "dev", "demo")}
    assert not pins["cpu"].keys() & pins["dev"].keys()
    assert not pins["cpu"].keys() & pins["demo"].keys()


def test_both_environments_hold_prefect_where_vllm_accepts_its_fastapi():
    for name in ("cpu", "cuda"):
        pins = lock.parse_lock((lock.REQUIREMENTS / f"{name}.lock").read_text())
        assert pins["prefect"] == "3.7.7"
        assert (0, 133) <= tuple(int(part) for part in pins["fastapi"].split(".")[:2]) < (0, 137)


def test_an_unknown_lock_is_bad_usage(capsys):
    with pytest.raises(SystemExit) as stopped:
        lock.main(["gpu"])
    assert stopped.value.code == 2
    assert "known: cpu, dev, demo, cuda" in capsys.readouterr().err


def test_reports_are_read_as_pip_writes_them(tmp_path, monkeypatch):
    (tmp_path / "demo.in").write_text("x==1\n")
    (tmp_path / "cpu.lock").write_text("")
    commands = []

    class Done:
        returncode = 0
        stderr = ""

    def run(command, **_):
        commands.append(command)
        report = next(part for part in command if part.startswith("--report=")).partition("=")[2]
        with open(report, "w") as file:
            json.dump({"install": [{"metadata": {"name": "x", "version": "1"}}]}, file)
        return Done

    monkeypatch.setattr(lock.subprocess, "run", run)
    assert lock.resolve("demo", {}, tmp_path) == {"x": "1"}
    assert "--no-deps" in commands[0]
    assert "--dry-run" in commands[0]
