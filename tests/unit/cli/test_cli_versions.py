"""versions, tag, diff and gc over small whole datasets."""

import json

import pytest
from typer.testing import CliRunner

from extract_core.cli import app
from extract_core.cli.versions import parse_age
from extract_core.errors import SettingsError
from extract_core.store import layout
from extract_core.store.root import Root
from extract_core.store.versions import list_versions
from tests.unit.store.versions_kit import age, publish_plan


@pytest.fixture
def root(tmp_path):
    root = Root.open(str(tmp_path / "data"))
    for plan, seeds in ((1, (1, 2)), (2, (2, 3)), (3, (3, 4))):
        publish_plan(root, tmp_path / "spool", plan, seeds)
    age(root, 2 * 86400)
    return root


def call(*arguments, code=0):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.stdout if code != 2 else done.stderr


def as_json(*arguments, code=0):
    return json.loads(call(*arguments, "--json", code=code))


def test_versions(root):
    call("tag", f"{root.url}@2", "good")
    first, second, third = as_json("versions", root.url)["versions"]
    assert (first["tags"], second["tags"], third["latest"], second["latest"]) == ([], ["good"], True, False)
    assert second["samples"] == 4 and second["layer_ids"] == [2, 4, 6] and second["model"] == "tiny"
    assert (first["shards"], first["shards_shared"], second["shards_shared"]) == (2, 1, 2)
    assert 0 < second["own_bytes"] < first["own_bytes"] < first["bytes"]
    text = call("versions", root.url)
    assert "3 versions" in text and "(latest)" in text and "good" in text and "2 (1 shared)" in text


def test_versions_of_damaged_ones(root, tmp_path):
    root.put_bytes(layout.manifest_path(2), b"{}")
    root.put_bytes("tags/good.json", b"{}")
    document = as_json("versions", root.url, code=1)
    assert "own checksum" in document["versions"][1]["problem"] and "good" in document["damaged_tags"]
    assert "damaged" in call("versions", root.url, code=1)
    (tmp_path / "empty").mkdir()
    assert "no published version" in call("versions", tmp_path / "empty", code=2)
    assert "give the root alone" in call("versions", f"{root.url}@1", code=2)


def test_tag(root):
    assert as_json("tag", root.url, "newest")["version"] == 3
    assert "names version 3, not 1" in call("tag", f"{root.url}@1", "newest", code=2)
    assert as_json("tag", f"{root.url}@1", "newest", "--force")["before"] == 3
    for command in ("verify", "inspect"):
        assert as_json(command, f"{root.url}@newest")["version"] == 1
    assert "is no name for a tag" in call("tag", root.url, "../x", code=2)
    assert "no version 9" in call("tag", f"{root.url}@9", "x", code=2)
    assert "names version 1, not 2" in call("tag", f"{root.url}@2", "newest", "--delete", code=2)
    call("tag", root.url, "newest", "--delete")
    text = call("verify", f"{root.url}@newest", code=2)
    assert "has no tag 'newest'" in text and "after the @ is no version" in text


def test_diff(root):
    document = as_json("diff", f"{root.url}@1", f"{root.url}@3")
    assert document["before"]["version"] == 1 and document["after"]["version"] == 3
    assert as_json("diff", root.url)["before"]["version"] == 2
    assert as_json("diff", f"{root.url}@1")["after"]["version"] == 3
    assert document["samples"]["changed"] == {
        "count": 4, "first": ["s1-1 -> s3-1", "s1-2 -> s3-2", "s2-1 -> s4-1", "s2-2 -> s4-2"]
    }  # fmt: skip
    text = call("diff", f"{root.url}@1", f"{root.url}@2")
    assert "added" in text and "from another input row" in text and "1 shared" in text
    assert "The same samples" in call("diff", f"{root.url}@1", f"{root.url}@1")
    assert "no version 7" in call("diff", f"{root.url}@7", code=2)


def test_gc(root):
    text = call("gc", root.url, "--keep", 1)
    assert "Would remove" in text and "2 plans" in text and "2 index files" in text and "Give --yes" in text
    assert list_versions(root) == [1, 2, 3]
    assert "Nothing to remove" in call("gc", root.url)
    assert "Nothing to remove" in call("gc", root.url, "--keep", 1, "--grace", "7d", "--yes")
    document = as_json("gc", root.url, "--keep", 1, "--yes")
    assert document["deleted"] and document["versions"] == [3] and document["bytes"] > 0
    assert {item["kind"] for item in document["items"]} == {"version", "plan", "shard", "index"}
    call("verify", root.url)
    assert list_versions(root) == [3]


def test_gc_refusals(root, tmp_path):
    assert "at least 1" in call("gc", root.url, "--keep", 0, code=2)
    assert "is no time; write it like 24h" in call("gc", root.url, "--grace", "soon", code=2)
    assert "does not exist" in call("gc", tmp_path / "none", code=2)
    (tmp_path / "empty").mkdir()
    assert "no published version and no plan" in call("gc", tmp_path / "empty", code=2)
    root.put_bytes(layout.manifest_path(3), b"{}")
    assert as_json("gc", root.url, "--yes", code=1)["error"]["type"] == "CorruptDataError"


def test_times():
    assert [parse_age(text) for text in ("0", "90s", "1.5h", "7d", " 2m ")] == [0, 90, 5400, 604800, 120]
    for text in ("", "-1", "1w", "h", "1e9", "nan", "٣h"):
        with pytest.raises(SettingsError, match="is no time"):
            parse_age(text)
