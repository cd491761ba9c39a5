"""A root that somebody else prepared: links, records that name other places, files that claim to be huge."""

# ruff: noqa: E501 -- data in tables

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from extract_core import spool
from extract_core.errors import CorruptDataError, RootError, StoreError
from extract_core.reader import HiddenStatesDataset
from extract_core.store import gc, layout
from extract_core.store.commits import read_commits
from extract_core.store.records import CommitRecord, Manifest
from extract_core.store.root import Root
from extract_core.store.shard import ShardReader
from extract_core.store.tags import write_tag
from extract_core.store.verify import verify
from tests.faults.hostile.limits import confined
from tests.faults.hostile.parsers import _checked
from tests.unit.store import kit

ELSEWHERE = (
    "../../etc/passwd", "/etc/passwd", "shards/../../x.safetensors", "s3://other/x", "http://other.host/x", "shards/a\nb",
    "shards/" + "0" * 64 + ".safetensors", "//x", "~/x", "shards/%2e%2e/x", "\\\\host\\x", "x\x00y", "",
)  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root.open(str(tmp_path / "root"))
    kit.make_dataset(made, tmp_path / "spool")
    return made


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("place", ELSEWHERE)
def test_records_cannot_name_an_object_elsewhere(root: Root, place: str) -> None:
    tree = json.loads(root.read_bytes(layout.commit_path(kit.FINGERPRINT, 0)))
    for change in ({"object": place}, {"sha256": place}, {"fingerprint": place}):
        with pytest.raises(CorruptDataError):
            CommitRecord.load(_checked({**tree, **change}), "x")
    norm = tree["engine"]["final_norm"]
    for change in ({"path": place}, {"sha256": place}):
        with pytest.raises(CorruptDataError):
            CommitRecord.load(_checked({**tree, "engine": {"final_norm": {**norm, **change}}}), "x")
    tree = json.loads(root.read_bytes(layout.manifest_path(1)))
    for part in ("index", "final_norm"):
        for name in ("path", "sha256"):
            with pytest.raises(CorruptDataError):
                Manifest.load(_checked({**tree, part: {**tree[part], name: place}}), "x")
    shard = {**tree["shards"][0], "path": place}
    with pytest.raises(CorruptDataError):
        Manifest.load(_checked({**tree, "shards": [shard, *tree["shards"][1:]]}), "x")


@pytest.mark.parametrize("place", [*ELSEWHERE[:5], "..", ".", "a//b", "a/./b", "/", "a/"])
def test_a_root_takes_only_plain_names(root: Root, place: str) -> None:
    for act in (root.read_bytes, root.delete, root.size, lambda rel: root.put_bytes(rel, b"x")):
        with pytest.raises(ValueError, match="not a plain relative path"):
            act(place)


@pytest.mark.parametrize(
    "folder", ["shards", "versions", "tags", "indexes", "norms", f"plans/{kit.FINGERPRINT}", "plans"]
)
def test_nothing_is_written_or_deleted_through_a_link(root: Root, tmp_path: Path, folder: str) -> None:
    outside = tmp_path / "outside"
    inside = Path(root.url) / folder
    if inside.exists():
        inside.rename(outside)
    else:
        outside.mkdir()
    inside.symlink_to(outside)
    before = _files(outside)
    name = next(iter(before), "old")
    victim = tmp_path / "new"
    victim.write_bytes(b"x")
    for act in (
        lambda: root.put_bytes(f"{folder}/new", b"x"),
        lambda: root.create_exclusive(f"{folder}/new", b"x"),
        lambda: root.put_file(victim, f"{folder}/new"),
        lambda: root.delete(f"{folder}/{name}"),
    ):
        with pytest.raises(RootError, match="leads out of the dataset root"):
            act()
    assert not root.delete_empty_folder(f"{folder}/empty")
    assert _files(outside) == before and victim.exists()
    if folder == "tags":
        with pytest.raises(RootError):
            write_tag(root, "name", 1)
    if folder in ("shards", "norms", "indexes"):  # reading follows links: the digests decide
        assert verify(root).ok
        assert len(HiddenStatesDataset(root.url)[0]["input_ids"])
        report = gc.survey(root, gc.Policy(keep=1, grace_s=0))
        assert not [item for item in report.items if item.path.startswith(f"{folder}/")]


def test_a_link_in_place_of_a_file_is_replaced_not_followed(root: Root, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    (Path(root.url) / "latest.json").unlink()
    (Path(root.url) / "latest.json").symlink_to(target)
    root.put_bytes("latest.json", b"new")
    assert target.read_bytes() == b"precious" and root.read_bytes("latest.json") == b"new"
    (Path(root.url) / "tags").mkdir(exist_ok=True)
    (Path(root.url) / "tags/x.json").symlink_to(target)
    root.delete("tags/x.json")
    assert target.read_bytes() == b"precious"


def test_a_shard_that_is_a_link_to_other_bytes_is_found(root: Root, tmp_path: Path) -> None:
    shard = Path(root.url) / Manifest.load(root.read_bytes(layout.manifest_path(1)), "x").shards[0].path
    other = bytearray(shard.read_bytes())
    other[65_600] ^= 1
    (tmp_path / "other").write_bytes(other)
    shard.unlink()
    shard.symlink_to(tmp_path / "other")
    assert any("sha256 differs" in problem.what for problem in verify(root).problems)
    with pytest.raises(CorruptDataError, match="xxh3"):
        list(HiddenStatesDataset(root.url))


def test_the_sweep_of_a_spool_leaves_linked_folders_alone(tmp_path: Path) -> None:
    outside, home = tmp_path / "spool", tmp_path / "home"
    (home / "logs").mkdir(parents=True)
    outside.mkdir()
    for name in ("lock", "a.tmp"):
        (home / name).write_bytes(b"precious")
    os.utime(home / "logs", (0, 0))
    (outside / "run-evil").symlink_to(home)
    made = outside / "run-2"
    made.mkdir()
    (made / "lock").symlink_to(home / "lock")
    assert spool.clean(outside) == []
    assert (home / "lock").exists() and (home / "a.tmp").exists() and (home / "logs").exists()


def _read_everything(url: str) -> str:
    root = Root.open(url)
    problems = verify(root).problems
    try:
        read_commits(root, kit.FINGERPRINT)
        list(HiddenStatesDataset(url))
        return "read"
    except StoreError as error:
        return f"{type(error).__name__}: {error} ({len(problems)} problems)"


@pytest.mark.parametrize("kind", ["sparse", "fifo", "folder"])
@pytest.mark.parametrize("which", ["commit", "manifest", "index", "shard", "norm", "tag"])
def test_what_is_no_file_or_claims_a_terabyte_is_refused(root: Root, which: str, kind: str) -> None:
    manifest = Manifest.load(root.read_bytes(layout.manifest_path(1)), "x")
    assert manifest.final_norm is not None and manifest.final_norm.path is not None
    rel = {
        "commit": layout.commit_path(kit.FINGERPRINT, 0), "manifest": layout.manifest_path(1), "index": manifest.index.path,
        "shard": manifest.shards[0].path, "norm": manifest.final_norm.path, "tag": layout.tag_path("x"),
    }[which]  # fmt: skip
    path = Path(root.url) / rel
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "sparse":
        with path.open("wb") as file:
            file.write((10**12).to_bytes(8, "little"))
            if which != "shard":  # of which verify would read all bytes
                file.truncate(10**12)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()

    def look() -> str:
        if which == "norm":
            return str(HiddenStatesDataset(root.url).final_norm)
        if which == "tag":
            return str(HiddenStatesDataset(f"{root.url}@x"))
        return _read_everything(root.url)

    answer, text, peak = confined(look, seconds=60)
    said = text if answer == "returned" else f"{answer}: {text}"
    assert said.startswith(("CorruptDataError", "StoreError", "RootError", "NoSuchVersionError", "SettingsError")), said
    assert peak < 2


def test_a_header_of_a_terabyte_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    with path.open("wb") as file:
        file.write((10**12).to_bytes(8, "little") + b"{")
        file.truncate(2 * 10**12)
    answer, text, peak = confined(lambda: ShardReader(path), seconds=20)
    assert answer == "CorruptDataError" and "header length" in text
    assert peak < 1.5


def test_many_repeated_samples_are_found_in_time(root: Root) -> None:
    tree = json.loads(root.read_bytes(layout.commit_path(kit.FINGERPRINT, 0)))
    tree["excluded"] = [{"sample_id": f"s{n // 2}", "reason": "x", "detail": "", "attempts": 1} for n in range(100_000)]
    answer, text, _ = confined(lambda: CommitRecord.load(_checked(tree), "x"), seconds=20)
    assert answer == "CorruptDataError" and "repeated" in text
