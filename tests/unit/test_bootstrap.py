"""Making and mending the environment, with pip replaced by a list of commands."""

import bootstrap
import pytest


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with two locks, and the commands that would have been run."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "requirements" / "cpu.lock").write_text("a==1\nb==1\n")
    (tmp_path / "requirements" / "dev.lock").write_text("t==1\n")
    (tmp_path / "venv").mkdir()
    commands = []
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "run", lambda *command: commands.append([str(part) for part in command][3:]))
    return tmp_path, tmp_path / "venv", commands


def installed_locks(commands):
    return [command[-1].rpartition("/")[2] for command in commands if command[0] == "install" and "-r" in command]


def test_the_second_run_does_nothing(project):
    _, venv, commands = project
    bootstrap.install(venv, ["cpu", "dev"], force=False)
    assert installed_locks(commands) == ["cpu.lock", "dev.lock"]
    assert all("--no-deps" in command for command in commands)
    assert "--editable" in commands[-1]
    commands.clear()
    bootstrap.install(venv, ["cpu"], force=False)
    assert commands == []


def test_a_changed_lock_alone_is_installed_and_what_left_it_is_removed(project):
    root, venv, commands = project
    bootstrap.install(venv, ["cpu", "dev"], force=False)
    commands.clear()
    (root / "requirements" / "cpu.lock").write_text("a==2\n")
    bootstrap.install(venv, ["cpu"], force=False)
    assert commands[0] == ["uninstall", "--quiet", "--yes", "b"]
    assert installed_locks(commands) == ["cpu.lock"]


def test_a_package_that_moved_to_another_lock_stays(project):
    root, venv, commands = project
    bootstrap.install(venv, ["cpu", "dev"], force=False)
    commands.clear()
    (root / "requirements" / "cpu.lock").write_text("a==1\n")
    (root / "requirements" / "dev.lock").write_text("b==1\nt==1\n")
    bootstrap.install(venv, ["cpu", "dev"], force=False)
    assert not [command for command in commands if command[0] == "uninstall"]


def test_a_failed_installation_is_repeated(project, monkeypatch):
    _, venv, commands = project

    def fail(*_):
        raise bootstrap.BootstrapError("no network")

    with monkeypatch.context() as broken:
        broken.setattr(bootstrap, "run", fail)
        with pytest.raises(bootstrap.BootstrapError):
            bootstrap.install(venv, ["cpu"], force=False)
    bootstrap.install(venv, ["cpu"], force=False)
    assert installed_locks(commands) == ["cpu.lock"]


def test_an_environment_that_does_not_start_is_seen(tmp_path):
    assert not bootstrap.works(tmp_path / "nothing")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(tmp_path / "gone")
    assert not bootstrap.works(tmp_path / "venv")
    python.unlink()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert not bootstrap.works(tmp_path / "venv")


def test_an_old_python_is_refused_with_its_version(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bootstrap, "OLDEST", (99, 0))
    assert bootstrap.main(["cpu", "--venv", str(tmp_path / "v")]) == 1
    assert "Python 99.0 or newer is needed, this is 3." in capsys.readouterr().err


def test_an_environment_that_fails_its_check_is_mended_once(project, monkeypatch, capsys):
    _, venv, commands = project
    monkeypatch.setattr(bootstrap, "works", lambda _: True)
    answers = [False, True]
    monkeypatch.setattr(bootstrap, "healthy", lambda *_: answers.pop(0))
    assert bootstrap.main(["cpu", "--venv", str(venv)]) == 0
    assert installed_locks(commands) == ["cpu.lock", "cpu.lock"]
    answers[:] = [False, False]
    assert bootstrap.main(["cpu", "--venv", str(venv)]) == 1
    assert "make clean" in capsys.readouterr().err
