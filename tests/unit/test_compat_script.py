"""scripts/compat.py: requirements, stamps, comparison with committed results and the page; no environment is built."""

from __future__ import annotations

import json

import compat
import pytest
from packaging.requirements import Requirement


def cell(family="llama", mode="native", status="works", layers=(1, 2, 3), **changes):
    base = {
        "family": family,
        "mode": mode,
        "dtype": "float32",
        "status": status,
        "reason": "" if status == "works" else "LayerIdError: no",
        "capture": "native",
        "layers": list(layers),
        "rounds": {"batch": {"max": 2e-6, "p50": 1e-6}} if status == "works" else {},
    }
    return {**base, **changes}


def result(version, *cells, error=""):
    return {
        "engine": {"vllm": version, "torch": "2.13.0", "transformers": "5.19.0"},
        "date": "2026-01-02",
        "machine": {"cpu": "a | b", "cores": 2, "python": "3.11.7"},
        "error": error,
        "cells": list(cells),
    }


def test_requirements_are_those_that_hold_here_without_the_left_out():
    lines = [
        "numpy",
        "torch==2.11.0+cpu",
        "torchvision; platform_system != 'Nowhere'",
        "ray; extra == 'ray'",
        "uvloop; platform_system == 'Nowhere'",
    ]
    found = compat.applicable(lines)
    assert [str(r) for r in found] == ["numpy", "torch==2.11.0+cpu", "torchvision"]
    assert compat.torch_of(found) == "2.11.0"
    wanted = compat.needed(found)
    assert "numpy" in wanted and "pytest" in wanted
    assert not [name for name in wanted if name.startswith("torch")]


def test_a_release_without_a_torch_pin_is_refused():
    with pytest.raises(compat.CompatError, match="pins no torch"):
        compat.torch_of([Requirement("torch>=2"), Requirement("numpy")])


def test_a_folder_counts_as_made_only_by_the_same_recipe(tmp_path):
    assert not compat.fresh(tmp_path, "a")
    compat.finish(tmp_path, "a")
    assert compat.fresh(tmp_path, "a")
    assert not compat.fresh(tmp_path, "b")


def test_a_version_that_cannot_be_built_is_an_error_row(tmp_path, monkeypatch):
    def fail(version):
        raise compat.CompatError("no such release")

    monkeypatch.setattr(compat, "environment", fail)
    row = compat.try_version("9.9.9", tmp_path / "r" / "9.9.9.json", [], [])
    assert row["error"] == "no such release"
    assert json.loads((tmp_path / "r" / "9.9.9.json").read_text()) == row
    page = compat.render([row, result("0.32.0", cell())])
    assert "| 9.9.9 |" in page and "error: no such release" in page
    assert "| llama | 1-3: 2e-06 | not run |" in page


def test_a_failing_command_shows_the_end_of_its_output():
    with pytest.raises(compat.CompatError, match="exit status 3 of sh .*: first / last words"):
        compat.run("sh", "-c", "echo first; echo last words; exit 3")


def test_regressions_are_cells_that_worked_and_layers_that_were_reached():
    before = result("1", cell("llama"), cell("qwen2"), cell("opt", status="refused"), cell("gpt2"))
    now = result("1", cell("llama", status="fails"), cell("qwen2", layers=[1, 2]), cell("opt", status="refused"))
    assert compat.regressions(before, now) == [
        "llama, native: fails: LayerIdError: no",
        "qwen2, native: layers [3] are not reached any more",
    ]
    assert compat.regressions(before, before) == []


def test_the_page_marks_nothing_as_working_that_did_not():
    page = compat.render(
        [
            result("0.32.0", cell(), cell(mode="auto", layers=[2, 3, 5, 6], capture="hooks")),
            result("0.9.0", cell(status="refused"), cell(mode="auto", status="fails", reason="a < b | c")),
        ]
    )
    assert page.index("| 0.9.0 |") < page.index("| 0.32.0 |")
    assert "| llama | refused | 1-3: 2e-06 |" in page
    assert "| llama | fails | hooks, 2, 3, 5, 6: 2e-06 |" in page
    assert "- llama (auto, 0.9.0): fails: a &lt; b \\| c" in page


def test_bfloat16_shows_the_median():
    rounds = {"batch": {"max": 0.5, "p50": 0.021}}
    assert compat.shown(cell(dtype="bfloat16", rounds=rounds)) == "1-3: bfloat16, 2.1%"


def test_main_checks_against_committed_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compat, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(compat, "ROOT", tmp_path)
    monkeypatch.setattr(compat, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(compat, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(compat, "try_version", lambda version, *rest: result(version, cell(status="refused")))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "1.json").write_text(json.dumps(result("1", cell())))
    assert compat.main(["--check", "1"]) == 1
    assert "llama, native: refused" in capsys.readouterr().out
    assert compat.main(["--check", "2"]) == 1
    assert "to compare with" in capsys.readouterr().out
    assert not (tmp_path / "page.md").exists()
    assert compat.main(["1"]) == 0
    assert "| llama | 1-3: 2e-06 |" in (tmp_path / "page.md").read_text()
