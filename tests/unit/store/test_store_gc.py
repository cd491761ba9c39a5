import os
import time

import pytest

from extract_core.errors import CorruptDataError, SettingsError
from extract_core.spool import RunFolder
from extract_core.store import layout
from extract_core.store.commits import read_commits
from extract_core.store.gc import Policy, collect, survey
from extract_core.store.index import write_index
from extract_core.store.root import Root
from extract_core.store.tags import list_tags, write_tag
from extract_core.store.verify import verify
from extract_core.store.versions import list_versions, read_manifest
from tests.unit.store.kit import index_table
from tests.unit.store.versions_kit import (
    add_plan,
    age,
    commit,
    fingerprint_of,
    killed_gc,
    known,
    layout_digest,
    publish_commits,
    publish_plan,
)

HOUR = Policy(grace_s=3600)


@pytest.fixture
def root(tmp_path):
    return Root.open(str(tmp_path / "data"))


@pytest.fixture
def three(root, tmp_path):
    """Versions 1 (seeds 1, 2), 2 (2, 3), 3 (3, 4), each of its own plan."""
    for plan, seeds in ((1, (1, 2)), (2, (2, 3)), (3, (3, 4))):
        publish_plan(root, tmp_path / "spool", plan, seeds)
    age(root)
    return root


def kinds(report):
    return sorted(item.kind for item in report.items)


def sound(root):
    for version in list_versions(root):
        report = verify(root, version)
        assert report.ok, (version, report.problems)


def test_nothing_goes_without_keep(three):
    assert survey(three, HOUR).items == [] and collect(three, HOUR).items == []
    assert list_versions(three) == [1, 2, 3]


def test_keep(three):
    before = survey(three, Policy(1, 3600))
    assert list_versions(three) == [1, 2, 3]
    assert [item.version for item in before.of("version")] == [1, 2] and before.versions == [3]
    assert kinds(before) == ["index"] * 2 + ["plan"] * 2 + ["shard"] * 2 + ["version"] * 2
    done = collect(three, Policy(1, 3600))
    assert {item.path for item in done.items} == {item.path for item in before.items}
    assert list_versions(three) == [3] and three.list(layout.PLANS) == [fingerprint_of(3)]
    assert len(three.list(layout.SHARDS)) == 2 and len(three.list(layout.INDEXES)) == 1
    assert b'"hint_version":3' in three.read_bytes(layout.LATEST)
    sound(three)
    assert collect(three, Policy(1, 3600)).items == []


def test_numbers_are_not_used_again(three, tmp_path):
    collect(three, Policy(1, 3600))
    assert publish_plan(three, tmp_path / "spool", 1, (1, 2)) == 4
    sound(three)


def test_tagged_and_young_versions_stay(three, tmp_path):
    write_tag(three, "good", 1)
    os.utime(three.local_path(layout.manifest_path(2)))
    report = collect(three, Policy(1, 3600))
    assert list_versions(three) == [1, 2, 3] and report.items == []
    assert "version 1 is tagged good" in report.kept and "version 2 is younger" in "".join(report.kept)
    age(three)
    assert [item.version for item in collect(three, Policy(1, 3600)).of("version")] == [2]
    sound(three)


def test_young_objects_stay(three, tmp_path):
    three.put_bytes(layout.shard_path("a" * 64), b"orphan")
    assert survey(three, HOUR).items == []
    assert kinds(survey(three, Policy(grace_s=0))) == ["shard"]
    age(three)
    (item,) = collect(three, HOUR).items
    assert item.nbytes == 6 and item.reason == "no version or plan refers to it"
    assert not three.exists(item.path)


def test_unfinished_and_unpublished_plans_stay(three, tmp_path):
    spool = tmp_path / "spool"
    add_plan(three, 4, 2)
    commit(three, spool, 4, 0, 50)
    add_plan(three, 5, 1)
    commit(three, spool, 5, 0, 60)
    age(three)
    report = collect(three, HOUR)
    assert report.items == []
    assert "1 of 2 shards are still to be extracted" in "\n".join(report.kept)
    assert "of no version yet" in "\n".join(report.kept)
    report = collect(three, Policy(grace_s=3600, unpublished=True))
    assert kinds(report) == ["plan", "shard"] and fingerprint_of(5) in report.items[0].path
    assert three.exists(read_commits(three, fingerprint_of(4))[0].records[0].object)
    assert not three.local_path(f"{layout.PLANS}/{fingerprint_of(5)}").exists()
    sound(three)


def test_a_version_whose_plan_is_extracted_again(three):
    three.delete(layout.commit_path(fingerprint_of(1), 0))  # as the advice for a damaged record says
    report = collect(three, Policy(1, 3600))
    shard = read_commits(three, fingerprint_of(1))[1].records[0].object
    assert three.exists(shard) and list_versions(three) == [3]
    assert "1 of 2 shards are still" in "\n".join(report.kept)


def test_planning_that_never_finished(three):
    fingerprint = fingerprint_of(9)
    three.put_bytes(layout.dropped_path(fingerprint), b"")
    assert survey(three, HOUR).items == []
    lost = layout.plan_path(fingerprint_of(3), "f" * 64)
    three.put_bytes(lost, b"of a run that lost")
    age(three)
    assert {item.path for item in collect(three, HOUR).items} == {f"plans/{fingerprint}", lost}
    assert fingerprint not in three.list(layout.PLANS)
    assert three.exists(layout.plan_path(fingerprint_of(3), layout_digest(3)))


def test_leftovers(three):
    folder = three.local_path("")
    for name in ("shards/.tmp-1", "versions/.tmp-2", ".tmp-3", ".probe/4", "plans/.tmp-5"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    for name in ("shards/notes.txt", "mine.txt", "shards/" + "A" * 64 + ".safetensors"):  # not ours
        (folder / name).write_bytes(b"x")
    assert survey(three, HOUR).items == []
    age(three)
    assert kinds(collect(three, HOUR)) == ["temporary"] * 5
    assert (folder / "mine.txt").exists() and (folder / "shards" / "notes.txt").exists()


def test_links_are_neither_followed_nor_removed(three, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ("b" * 64 + ".safetensors")).write_bytes(b"x")
    (three.local_path("shards") / ("c" * 64 + ".safetensors")).symlink_to(outside / ("b" * 64 + ".safetensors"))
    (three.local_path("plans") / ("d" * 32)).symlink_to(outside)
    os.utime(outside / ("b" * 64 + ".safetensors"), (0, 0))
    assert collect(three, Policy(grace_s=0)).items == []
    assert len(list(outside.iterdir())) == 1


def test_spool(three, tmp_path):
    live = RunFolder(three.local_path(".spool"))
    live.shard(0, "a" * 32).write_bytes(b"x")
    dead = three.local_path(".spool") / "run-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "00001-x.tmp").write_bytes(b"xyz")
    assert survey(three, HOUR).items == []
    age(three)
    report = survey(three, Policy(1, 3600))
    assert not report.of("plan", "norm") and "a run is at work" in "\n".join(report.kept)
    assert [item.path for item in collect(three, HOUR).items] == [".spool/run-dead"]
    assert not dead.exists() and live.shard(0, "a" * 32).exists()
    live.close()
    assert survey(three, Policy(1, 3600)).of("plan")


def test_logs_of_a_dead_run_stay_a_week(three):
    logs = three.local_path(".spool/run-dead/logs")
    logs.mkdir(parents=True)
    (logs / "engine.log").write_text("why")
    age(three)
    assert survey(three, HOUR).items == []
    os.utime(logs / "engine.log", (time.time() - 8 * 86400,) * 2)
    assert kinds(collect(three, HOUR)) == ["spool"]
    assert not logs.parent.exists()


def test_what_is_being_published_stays(three, tmp_path):
    """A publisher of a plan whose version went: its index is there, its manifest is not yet."""
    spool, fingerprint = tmp_path / "spool", fingerprint_of(1)
    commits = read_commits(three, fingerprint)
    write_index(three, index_table(commits, known((1, 2), spool)))
    report = collect(three, Policy(1, 3600))
    assert list_versions(three) == [3] and fingerprint in three.list(layout.PLANS)
    assert "perhaps being published" in "\n".join(report.kept)
    assert publish_commits(three, spool, fingerprint, (1, 2)) == 4
    sound(three)


def test_a_publisher_between_manifests_and_objects(three, tmp_path, monkeypatch):
    plain, spool = Root.delete, tmp_path / "spool"

    def delete(self, rel):
        plain(self, rel)
        if rel == layout.manifest_path(2):
            publish_plan(three, spool, 7, (1, 2, 9))  # uses the shards of version 1 again

    monkeypatch.setattr(Root, "delete", delete)
    collect(three, Policy(1, 3600))
    assert list_versions(three) == [3, 4]
    sound(three)


def test_a_commit_between_objects(three, tmp_path, monkeypatch):
    """A running plan that uses an old shard again, found out by the look before each few objects."""
    monkeypatch.setattr("extract_core.store.gc._CHUNK", 1)
    plain, spool, made = Root.delete, tmp_path / "spool", []

    def delete(self, rel):
        plain(self, rel)
        if rel.startswith("indexes/") and not made:
            made.append(rel)
            publish_plan(three, spool, 7, (1, 2))
            age(three)  # even if their times stayed old

    monkeypatch.setattr(Root, "delete", delete)
    collect(three, Policy(1, 3600))
    assert made and list_versions(three) == [3, 4]
    sound(three)


def test_a_tag_that_comes_while_its_version_goes(three, monkeypatch):
    plain = Root.delete

    def delete(self, rel):
        if rel == layout.manifest_path(1):
            write_tag(three, "late", 1)
        plain(self, rel)

    monkeypatch.setattr(Root, "delete", delete)
    collect(three, Policy(1, 3600))
    assert list_versions(three) == [1, 3] and list_tags(three) == {"late": 1}
    sound(three)


def test_dangling_tags_go(three):
    write_tag(three, "good", 2)
    three.delete(layout.manifest_path(2))
    assert not survey(three, HOUR).of("tag")
    age(three)
    assert [item.path for item in collect(three, HOUR).of("tag")] == ["tags/good.json"]
    assert list_tags(three) == {}


def flip(root, rel):
    path = root.local_path(rel)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    age(root)


@pytest.mark.parametrize(
    ("rel", "words"),
    [
        (layout.manifest_path(3), "what version 3 refers to cannot be known"),
        (layout.commit_path(fingerprint_of(3), 1), "which shards are in use cannot be known"),
    ],
)
def test_damaged_records_stop_it(three, rel, words):
    flip(three, rel)
    before = three.entries("")
    for step in (survey, collect):
        with pytest.raises(CorruptDataError, match=f"nothing is removed, since {words}.*{rel}"):
            step(three, Policy(1, 3600))
    assert three.entries("") == before


def test_a_damaged_tag_may_protect_a_version(three):
    write_tag(three, "good", 1)
    flip(three, "tags/good.json")
    with pytest.raises(CorruptDataError, match=r"tag .*good.json.*set it again: coresample tag"):
        collect(three, Policy(1, 3600))
    assert "good.json" in collect(three, HOUR).kept[0] and list_versions(three) == [1, 2, 3]


def test_a_damaged_version_may_go(three):
    flip(three, layout.manifest_path(1))
    assert 1 in [item.version for item in collect(three, Policy(2, 3600)).of("version")]
    assert list_versions(three) == [2, 3]
    sound(three)


def test_a_damaged_plan_stays(three):
    three.put_bytes(layout.plan_meta_path(fingerprint_of(1)), b"{}")
    age(three)
    report = collect(three, Policy(1, 3600))
    assert fingerprint_of(1) in three.list(layout.PLANS) and "plan.json cannot be read" in "\n".join(report.kept)
    assert three.exists(read_commits(three, fingerprint_of(1))[0].records[0].object)


def test_refusals(root, three, tmp_path):
    with pytest.raises(SettingsError, match="at least 1"):
        Policy(0)
    with pytest.raises(SettingsError, match="0 or more"):
        Policy(grace_s=-1.0)
    other = Root.open(str(tmp_path / "other"))
    other.put_bytes(layout.shard_path("a" * 64), b"x")
    with pytest.raises(SettingsError, match="no published version and no plan"):
        collect(other, Policy(grace_s=0))
    assert other.exists(layout.shard_path("a" * 64))


@pytest.mark.parametrize("step", range(0, 40, 3))
def test_killed_anywhere_and_run_again(three, step):
    if killed_gc(three, Policy(1, 3600), step):
        sound(three)
    now = time.time() + 10
    collect(three, Policy(1, 3600), now=now)
    assert list_versions(three) == [3] and three.list(layout.PLANS) == [fingerprint_of(3)]
    assert len(three.list(layout.SHARDS)) == 2 and len(three.list(layout.INDEXES)) == 1
    assert survey(three, Policy(1, 0)).items == []
    sound(three)
    assert read_manifest(three).version == 3


def test_two_at_once(three, monkeypatch):
    plain, depth = Root.delete, []

    def delete(self, rel):
        if len(depth) < 6:  # another whole one before each of the first deletions
            depth.append(rel)
            with monkeypatch.context() as patch:
                patch.setattr(Root, "delete", plain)
                collect(three, Policy(2 if len(depth) < 3 else 1, 3600))
        plain(self, rel)

    monkeypatch.setattr(Root, "delete", delete)
    collect(three, Policy(1, 3600))
    assert list_versions(three) == [3] and three.list(layout.PLANS) == [fingerprint_of(3)]
    assert survey(three, Policy(1, 0)).items == []
    sound(three)
