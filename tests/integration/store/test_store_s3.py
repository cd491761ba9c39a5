import json
import multiprocessing
import pickle
import socket
import subprocess
import sys
import textwrap
import uuid

import pytest
import torch

from extract_core.errors import CorruptDataError, StoreError, StoreUnavailableError
from extract_core.reader import HiddenStatesDataset
from extract_core.store import layout
from extract_core.store.commits import read_commits, write_commit
from extract_core.store.index import write_index
from extract_core.store.records import CommitRecord
from extract_core.store.root import Root
from extract_core.store.shard import HEADER_BYTES
from extract_core.store.verify import verify
from extract_core.store.versions import list_versions, publish, read_manifest
from tests.unit.store.kit import (
    FINGERPRINT,
    attempt,
    build_manifest,
    commit_shard,
    index_table,
    make_dataset,
    make_shard,
    race_to_create,
)

pytestmark = pytest.mark.integration


@pytest.fixture
def root(s3_options):
    return Root.open(f"s3://bucket/{uuid.uuid4().hex}/data/", s3_options)


def test_objects(root, tmp_path):
    assert not root.is_local
    assert root.local_path("a") is None
    assert root.list("a") == []
    assert not root.exists("a/b")
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/.*/a/b"):
        root.read_bytes("a/b")
    with pytest.raises(FileNotFoundError):
        root.read_range("a/b", 0, 3)
    root.delete("a/b")
    root.put_bytes("a/b", b"0123456789")
    assert root.list("a") == ["b"]
    root.put_bytes("a/c/d", b"new")
    assert root.list("a") == ["b", "c"]  # asked anew, folders too
    assert root.list("") == ["a"]
    assert root.exists("a/b")
    assert not root.exists("a")
    assert root.size("a/b") == 10
    assert root.read_range("a/b", 2, 5) == b"234"
    for start, stop in ((8, 12), (10, 11), (50, 60)):
        with pytest.raises(CorruptDataError, match="cut short"):
            root.read_range("a/b", start, stop)
    root.put_bytes("a/b", b"other")
    assert root.read_bytes("a/b") == b"other"
    source = tmp_path / "file"
    source.write_bytes(bytes(range(256)) * 4096)
    root.put_file(source, "shards/x")
    assert root.size("shards/x") == 2**20
    assert not source.exists()
    root.delete("a/b")
    assert root.list("a") == ["c"]
    copy = pickle.loads(pickle.dumps(root))
    assert copy.read_bytes("a/c/d") == b"new"
    assert "testing" not in repr(root)


def test_other_writers_are_seen_at_once(root, s3_options):
    other = Root.open(root.url, s3_options)
    assert root.list("versions") == []
    other.put_bytes("versions/000001.json", b"")
    assert root.list("versions") == ["000001.json"]


def test_exclusive_create(root):
    assert root.probe_exclusive() is True
    assert root.list(layout.PROBES) == []

    race_to_create(root, "versions/000001.json", 16)


LOADERS = """
import json, sys
from torch.utils.data import DataLoader
from extract_core.reader import HiddenStatesDataset

if __name__ == "__main__":
    data = HiddenStatesDataset(**json.loads(sys.argv[1]))
    seen = {}
    for context in ("fork", "spawn"):
        loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context=context)
        seen[context] = [item["sample_id"] for item in loader]
    print(json.dumps(seen))
"""


def test_whole_dataset(root, s3_options, tmp_path):
    manifest, known = make_dataset(root, tmp_path / "spool")
    assert list((tmp_path / "spool").iterdir()) == []
    report = verify(root)
    assert report.problems == []
    assert report.bytes_read == manifest.totals.bytes
    data = HiddenStatesDataset(root.url, storage_options=s3_options)
    assert len(data) == len(known)
    for item, sample in zip(data, known.values(), strict=True):
        assert torch.equal(item["hidden_states"], sample.hidden)
        assert item["input_ids"].tolist() == sample.tokens.tolist()
    # In a process of its own: forking one that holds the threads and locks of every test before is a trap.
    options = json.dumps({"root": root.url, "storage_options": s3_options})
    output = subprocess.run([sys.executable, "-c", LOADERS, options], capture_output=True, text=True, check=False)
    assert output.returncode == 0, output.stderr
    assert json.loads(output.stdout) == {"fork": list(known), "spawn": list(known)}

    shard = manifest.shards[0]
    bad = bytearray(root.read_bytes(shard.path))
    bad[HEADER_BYTES + 1] ^= 64
    root.put_bytes(shard.path, bytes(bad))
    with pytest.raises(CorruptDataError, match=rf"s0-1.*{shard.sha256}"):
        HiddenStatesDataset(root.url, storage_options=s3_options)[0]
    assert {problem.object for problem in verify(root).problems} == {shard.path}
    root.put_bytes(shard.path, bytes(bad[:-1000]))
    found = "\n".join(map(str, verify(root).problems))
    assert "wrong size in bytes" in found
    root.delete(shard.path)
    assert any("shard is missing" in str(problem) for problem in verify(root).problems)


def _publish(url, options, who, commits, index, go):
    root = Root.open(url, options)
    go.wait()
    for own in who:
        publish(root, lambda n, own=own: build_manifest(n, own, commits, index), own)


def test_publishers_race(root, s3_options, tmp_path):
    sealed, made, pieces = make_shard(tmp_path, 2, seed=0)
    commit_shard(root, 0, sealed, made, pieces, attempt())
    commits = read_commits(root, FINGERPRINT)
    index = write_index(root, index_table(commits, {sample.sample_id: sample for sample in made}))
    attempts = [[attempt() for _ in range(3)] for _ in range(2)]
    context = multiprocessing.get_context("spawn")
    go = context.Barrier(2)
    children = [
        context.Process(target=_publish, args=(root.url, s3_options, own, commits, index, go)) for own in attempts
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    assert list_versions(root) == [1, 2, 3, 4, 5, 6]
    published = [read_manifest(root, version).attempt for version in range(1, 7)]
    assert sorted(published) == sorted(who for own in attempts for who in own)


def test_no_bucket(s3_options):
    root = Root.open("s3://no-such-bucket/data", s3_options)
    assert list_versions(root) == []
    for call in (lambda: root.put_bytes("x", b""), lambda: root.create_exclusive("x", b""), root.probe_exclusive):
        with pytest.raises(StoreError, match=r"no-such-bucket.*create the bucket"):
            call()


def test_server_that_is_not_there(s3_options):
    """Nobody listens: retryable, with the address in the message and no traceback of the client."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = """
        import sys
        from extract_core.errors import StoreUnavailableError
        from extract_core.store.root import Root
        where = {"endpoint_url": sys.argv[1], "region_name": "us-east-1"}
        options = {"key": "a", "secret": "b", "client_kwargs": where}
        root = Root.open("s3://bucket/data", {**options, "config_kwargs": {"retries": {"max_attempts": 1}}})
        for call in (root.read_bytes, root.size, root.list, lambda rel: root.put_bytes(rel, b""),
                     lambda rel: root.create_exclusive(rel, b"")):
            try:
                call("x")
            except StoreUnavailableError as error:
                print(error)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), f"http://127.0.0.1:{port}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert all("s3://bucket/data/x" in line and "try again later" in line for line in lines)
    assert issubclass(StoreUnavailableError, StoreError)


def test_wrong_credentials_or_none(s3_options, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    options = {name: value for name, value in s3_options.items() if name == "client_kwargs"}
    with pytest.raises(StoreError, match=r"credential"):
        Root.open("s3://bucket/data", options).put_bytes("x", b"")


def test_a_commit_record_is_replaced_once_its_shard_is_lost(root, tmp_path):
    """Only the record that is known to be lost goes; the winner of a race stands."""
    sealed, made, pieces = make_shard(tmp_path, 2, seed=0)
    lost = commit_shard(root, 0, sealed, made, pieces, attempt())
    other, made, pieces = make_shard(tmp_path, 2, seed=1)
    scratch = Root.open(str(tmp_path / "scratch"))
    new = commit_shard(scratch, 0, other, made, pieces, attempt())
    assert write_commit(root, new) == lost
    assert write_commit(root, new, replaces={"f" * 32}) == lost
    assert write_commit(root, new, replaces={lost.attempt}) == new
    late = new.model_copy(update={"attempt": attempt()})
    assert write_commit(root, late, replaces={lost.attempt}) == new
    retry = CommitRecord.model_validate({**new.model_dump(), "round": 1, "attempt": attempt()})
    assert write_commit(root, retry) == retry
    known = read_commits(root, FINGERPRINT)[0]
    assert known.records == (new, retry) and known.stored == [new] and known.next_round == 2
    root.put_bytes(layout.commit_path(FINGERPRINT, 0, 1), b"{}")
    damaged = []
    assert read_commits(root, FINGERPRINT, damaged=damaged)[0].records == (new,)
    assert [(item.shard, item.round) for item in damaged] == [(0, 1)]
    assert write_commit(root, retry, replaces={damaged[0].sha256}) == retry
