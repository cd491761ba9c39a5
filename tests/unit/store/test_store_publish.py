import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from extract_core.errors import CorruptDataError, SettingsError, StoreError
from extract_core.reader import HiddenStatesDataset
from extract_core.store import commits as commit_records
from extract_core.store import layout
from extract_core.store.commits import ShardCommits, read_commits, write_commit
from extract_core.store.index import INDEX_SCHEMA, read_index, write_index
from extract_core.store.root import Root
from extract_core.store.verify import verify
from extract_core.store.versions import latest_version, list_versions, parse_ref, publish, read_manifest
from tests.unit.store.kit import (
    FINGERPRINT,
    attempt,
    build_manifest,
    commit_shard,
    index_table,
    make_dataset,
    make_shard,
)


@pytest.fixture
def root(tmp_path):
    return Root.open(str(tmp_path / "data"))


def in_child(work) -> int:
    """Run work() in a forked process; how it ended (0, exit status, or minus the signal)."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            print(repr(error), file=sys.__stderr__)
        finally:
            os._exit(status)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


def die_at(step: int, folder: str) -> None:
    """From here on, kill this process right before its step-th change to (or sync of) a file below folder."""
    left = step
    plain_sync = os.fsync

    def count():
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def sync(fd):
        count()
        plain_sync(fd)

    def hook(event, args):
        if event in ("os.link", "os.rename", "os.remove", "os.mkdir") or (
            event == "open" and isinstance(args[1], str) and set(args[1]) & set("wxa+")
        ):
            names = [str(arg) for arg in args if isinstance(arg, str | os.PathLike)]
            if any(name.startswith(folder) for name in names):
                count()

    os.fsync = sync
    sys.addaudithook(hook)


def test_two_attempts_at_one_shard(root, tmp_path):
    first, second = attempt(), attempt()
    sealed, made, pieces = make_shard(tmp_path, 3, seed=1)
    again, _, _ = make_shard(tmp_path, 3, seed=1)
    assert again.sha256 == sealed.sha256  # the digest does not depend on the attempt
    mine = commit_shard(root, 0, sealed, made, pieces, first)
    assert mine.attempt == first
    assert commit_shard(root, 0, again, made, pieces, second).attempt == first
    assert write_commit(root, mine) == mine
    assert read_commits(root, FINGERPRINT) == {0: ShardCommits((mine,))}
    assert read_commits(root, "cd" * 32) == {}


def test_commit_that_was_renamed_or_damaged(root, tmp_path):
    make_dataset(root, tmp_path)
    folder = Path(root.url) / layout.commits_dir(FINGERPRINT)
    (folder / "00000.json").rename(folder / "00007.json")
    with pytest.raises(CorruptDataError, match=r"shard 0 round 0, expected plan .* shard 7"):
        read_commits(root, FINGERPRINT)
    (folder / "00007.json").write_bytes(b"{}")
    with pytest.raises(CorruptDataError, match=r"00007\.json"):
        read_commits(root, FINGERPRINT)


def test_a_record_that_was_read_before_is_still_read_from_the_store(root, tmp_path, monkeypatch):
    make_dataset(root, tmp_path)
    first = read_commits(root, FINGERPRINT)
    file = Path(root.url) / layout.commits_dir(FINGERPRINT) / "00000.json"
    good = file.read_bytes()
    file.write_bytes(good.replace(b'"shard":0', b'"shard":1'))
    with pytest.raises(CorruptDataError, match=r"00000\.json does not match its own checksum"):
        read_commits(root, FINGERPRINT)
    file.write_bytes(good)
    again = read_commits(root, FINGERPRINT)
    assert again == first
    assert again[0].records[0] is first[0].records[0]  # the same bytes are parsed once
    monkeypatch.setattr(commit_records, "_parsed", commit_records._Parsed(len(good) // 2))
    assert read_commits(root, FINGERPRINT) == first
    assert not commit_records._parsed._records  # larger than all that may be kept
    file.unlink()
    assert sorted(read_commits(root, FINGERPRINT)) == [1]


def test_versions(root, tmp_path):
    assert list_versions(root) == []
    assert latest_version(root) is None
    with pytest.raises(StoreError, match="no published version; run 'coresample run'"):
        read_manifest(root)
    manifest, _ = make_dataset(root, tmp_path)
    assert (manifest.version, list_versions(root)) == (1, [1])
    commits, who = read_commits(root, FINGERPRINT), attempt()
    second = publish(root, lambda n: build_manifest(n, who, commits, manifest.index), who)
    assert second.version == latest_version(root) == 2
    assert read_manifest(root) == second
    assert read_manifest(root, 1) == manifest
    assert publish(root, lambda n: build_manifest(n, who, commits, manifest.index), who) == second  # known by its id
    assert b'"hint_version":2' in root.read_bytes(layout.LATEST)
    with pytest.raises(StoreError, match="no version 9; there are: 1, 2"):
        read_manifest(root, 9)
    root.put_bytes(layout.LATEST, b"nonsense")  # only a hint
    assert latest_version(root) == 2
    (Path(root.url) / layout.manifest_path(2)).rename(Path(root.url) / layout.manifest_path(5))
    with pytest.raises(CorruptDataError, match="says it is version 2"):
        read_manifest(root)
    third = attempt()
    assert publish(root, lambda n: build_manifest(n, third, commits, manifest.index), third).version == 6
    with pytest.raises(ValueError, match="asked for version 7"):
        publish(root, lambda n: build_manifest(1, third, commits, manifest.index), attempt())


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("data", ("data", None)),
        ("s3://b/x@3", ("s3://b/x", 3)),
        ("/a/b@latest", ("/a/b", None)),
        ("/home/me@work/data", ("/home/me@work/data", None)),
        ("/home/me@work", ("/home/me@work", None)),
        ("a@1@2", ("a@1", 2)),
    ],
)
def test_references(text, parts):
    assert parse_ref(text) == parts


@pytest.mark.parametrize("text", ["", " ", "data@0"])
def test_bad_references(text):
    with pytest.raises(SettingsError, match=r"is empty|count from 1"):
        parse_ref(text)


def test_index_round_trip_and_refusals(root, tmp_path):
    manifest, known = make_dataset(root, tmp_path)
    table = read_index(root, manifest)
    assert table.schema.equals(INDEX_SCHEMA)
    assert table.column("sample_id").to_pylist() == list(known)
    shuffled = table.select(sorted(table.column_names))
    assert write_index(root, shuffled) == manifest.index  # the same content has the same name
    assert root.list(layout.INDEXES) == [f"{manifest.index.sha256}.parquet"]
    with pytest.raises(ValueError, match=r"missing or unknown.*split"):
        write_index(root, table.drop_columns(["split"]))
    with pytest.raises(ValueError, match="'split' has empty values"):
        write_index(root, table.set_column(4, "split", pa.nulls(table.num_rows, pa.string())))
    with pytest.raises(ValueError, match="schema"):
        write_index(root, table.set_column(5, "n_tokens", table.column("sample_id")))


def run_job(root: Root, shards, who: str) -> None:
    """What a run does after extraction: shards, commit records, index, manifest; skips what is committed."""
    known = {sample.sample_id: sample for _, made, _ in shards for sample in made}
    done = read_commits(root, FINGERPRINT)
    for number, (sealed, made, pieces) in enumerate(shards):
        if number not in done:
            commit_shard(root, number, sealed, made, pieces, who)
    commits = read_commits(root, FINGERPRINT)
    index = write_index(root, index_table(commits, known))
    publish(root, lambda version: build_manifest(version, who, commits, index), who)


def test_killed_at_every_step(tmp_path):
    """Killed before any single change: readers see nothing or a whole version, and the same job then ends well."""
    templates = [make_shard(tmp_path / "templates", 2, seed) for seed in range(2)]
    step, killed = 0, 0
    while True:
        base, spool = tmp_path / f"run{step}", tmp_path / f"spool{step}"
        root, who = Root.open(str(base)), attempt()

        def fresh_shards(spool=spool):
            shutil.copytree(tmp_path / "templates", spool, dirs_exist_ok=True)
            return [(replace(s, path=spool / s.path.name), made, pieces) for s, made, pieces in templates]

        def work(root=root, who=who, base=base, step=step, fresh_shards=fresh_shards):
            shards = fresh_shards()
            die_at(step, str(base))
            run_job(root, shards, who)

        ended = in_child(work)
        assert ended in (0, -signal.SIGKILL)
        for number, commit in read_commits(root, FINGERPRINT).items():
            assert all(root.size(path) == size for path, size in commit.objects.items()), number
        versions = list_versions(root)
        assert versions in ([], [1])
        if versions:
            assert verify(root).problems == []
        run_job(root, fresh_shards(), who)
        assert list_versions(root) == [1]
        assert verify(root).problems == []
        assert len(HiddenStatesDataset(root.url)) == 4
        if ended == 0:
            break
        shutil.rmtree(base)
        shutil.rmtree(spool)
        step, killed = step + 1, killed + 1
    assert killed > 30


def test_publishers_race(tmp_path):
    """Processes that publish at once get distinct versions, each exactly one per attempt, none lost."""
    root = Root.open(str(tmp_path / "data"))
    sealed, made, pieces = make_shard(tmp_path, 2, seed=0)
    commit_shard(root, 0, sealed, made, pieces, attempt())
    commits = read_commits(root, FINGERPRINT)
    index = write_index(root, index_table(commits, {sample.sample_id: sample for sample in made}))
    attempts = [[attempt() for _ in range(8)] for _ in range(3)]
    go, ready = os.pipe()
    children = []
    for own in attempts:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(ready)
                os.read(go, 1)  # ends when the parent closes its side: all start together
                for who in own:
                    publish(root, lambda n, who=who: build_manifest(n, who, commits, index), who)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    os.close(ready)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    os.close(go)
    versions = list_versions(root)
    assert versions == list(range(1, 25))
    published = [read_manifest(root, version).attempt for version in versions]
    assert sorted(published) == sorted(who for own in attempts for who in own)
