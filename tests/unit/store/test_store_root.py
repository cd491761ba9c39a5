import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from extract_core.errors import (
    AlreadyExistsError,
    CorruptDataError,
    NoSpaceError,
    RootConflictError,
    SettingsError,
    StoreError,
)
from extract_core.store.failures import failure
from extract_core.store.root import Root
from tests.unit.store.kit import race_to_create


@pytest.fixture
def root(tmp_path):
    return Root.open(str(tmp_path / "data"))


def in_tiny_tmpfs(code: str, tmp_path: Path) -> subprocess.CompletedProcess:
    """Run Python with a 256 KiB file system at tmp_path/disk, in a mount namespace of its own."""
    (tmp_path / "disk").mkdir()
    script = 'mount -t tmpfs -o size=256k tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    done = subprocess.run(
        [*command, str(tmp_path / "disk"), sys.executable, textwrap.dedent(code)], capture_output=True, text=True
    )
    if done.returncode and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    return done


def test_absent_things(root):
    assert root.list("versions") == []
    assert not root.exists("versions/000001.json")
    assert root.is_local
    for call in (root.read_bytes, root.size, lambda rel: root.read_range(rel, 0, 1)):
        with pytest.raises(FileNotFoundError, match="a/b"):
            call("a/b")
    root.delete("a/b")
    assert not Path(root.url).exists()  # reading makes no folders


def test_write_read_list_delete(root):
    root.put_bytes("a/b/hint.json", b"one")
    root.put_bytes("a/b/hint.json", b"twotwo")
    assert root.read_bytes("a/b/hint.json") == b"twotwo"
    assert root.read_range("a/b/hint.json", 1, 4) == b"wot"
    assert root.read_range("a/b/hint.json", 2, 2) == b""
    assert root.size("a/b/hint.json") == 6
    assert root.exists("a/b/hint.json")
    assert not root.exists("a/b")
    assert root.list("a/b") == ["hint.json"]
    assert root.list("a") == ["b"]
    assert root.list("") == ["a"]
    root.delete("a/b/hint.json")
    assert root.list("a/b") == []


def test_range_past_the_end_is_damage(root):
    root.put_bytes("x", b"12345")
    with pytest.raises(CorruptDataError, match=r"cut short.*coresample verify"):
        root.read_range("x", 3, 9)


@pytest.mark.parametrize("rel", ["../x", "/x", "a//b", "", "a/./b", "a\\b", "a/../../b"])
def test_names_stay_inside_the_root(root, rel):
    for write in (root.put_bytes, root.create_exclusive, lambda rel, _: root.put_file(Path(root.url), rel)):
        with pytest.raises(ValueError, match="plain relative path"):
            write(rel, b"")
    with pytest.raises(ValueError, match="plain relative path"):
        root.delete(rel)
    assert not Path(root.url).exists()


def test_exclusive_create_has_one_winner(root):
    winner = race_to_create(root, "versions/000001.json", 32)
    assert root.read_bytes("versions/000001.json") == b"%d" % winner
    assert os.listdir(Path(root.url) / "versions") == ["000001.json"]  # no temporary files stay


def test_leftover_temporary_files_are_not_listed(root):
    root.put_bytes("versions/000001.json", b"")
    (Path(root.url) / "versions" / ".tmp-dead").write_bytes(b"half")
    assert root.list("versions") == ["000001.json"]


def test_put_file_consumes_the_local_file(root, tmp_path):
    source = tmp_path / "spool"
    source.write_bytes(b"x" * 3000)
    root.put_file(source, "shards/a")
    assert root.read_bytes("shards/a") == b"x" * 3000
    assert not source.exists()
    with pytest.raises(StoreError, match=r"store .*shards/b"):
        root.put_file(source, "shards/b")


def test_put_file_from_another_file_system(root, tmp_path):
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("only one file system here")
    source = shm / f"coresample-test-{os.getpid()}"
    try:
        source.write_bytes(b"y" * 5_000_000)
        root.put_file(source, "shards/a")
        assert root.size("shards/a") == 5_000_000
        assert not source.exists()
        assert os.listdir(Path(root.url) / "shards") == ["a"]
    finally:
        source.unlink(missing_ok=True)


def test_probe(root):
    assert root.exclusive is None
    assert root.probe_exclusive() is True
    assert root.exclusive is True
    assert os.listdir(root.url) == []


def test_root_without_exclusive_create_checks_first(root):
    root.exclusive = False
    root.create_exclusive("a", b"1")
    with pytest.raises(AlreadyExistsError) as caught:
        root.create_exclusive("a", b"2")
    assert caught.value.existing == b"1"


def test_pickle_keeps_what_the_probe_found(root):
    root.probe_exclusive()
    copy = pickle.loads(pickle.dumps(root))
    assert (copy.url, copy.exclusive, copy.is_local) == (root.url, True, True)


def test_kinds_of_url(tmp_path):
    assert Root.open(f"file://{tmp_path}/x").url == str(tmp_path / "x")
    assert Root.open(f"{tmp_path}/x/../y/").url == str(tmp_path / "y")
    for url, message in (
        ("", "empty"),
        ("nonsense://bucket/x", "nonsense"),
        ("s3://", "no bucket"),
        ("simplecache::s3://bucket/x", "chains"),
    ):
        with pytest.raises(SettingsError, match=message):
            Root.open(url)
    (tmp_path / "file").write_text("")
    with pytest.raises(RootConflictError, match="is a file"):
        Root.open(str(tmp_path / "file"))


def test_options_are_not_shown():
    shown = repr(Root.open("memory://bucket/x", {"key": "hunter2"}))
    assert "hunter2" not in shown


def test_file_in_the_way_is_a_store_error(root):
    root.put_bytes("versions", b"")
    with pytest.raises(StoreError, match=r"versions/000001.json"):
        root.create_exclusive("versions/000001.json", b"")


def test_unwritable_root_says_so(tmp_path):
    if os.geteuid() == 0:
        target = "/proc/coresample-test"
    else:
        (tmp_path / "closed").mkdir(mode=0o500)
        target = str(tmp_path / "closed" / "data")
    with pytest.raises(StoreError, match=target):
        Root.open(target).probe_exclusive()


def test_full_disk(tmp_path):
    done = in_tiny_tmpfs(
        """
        import sys, os
        from extract_core.errors import NoSpaceError
        from extract_core.store.root import Root
        root = Root.open(sys.argv[1] + "/data")
        root.put_bytes("hint", b"old")
        for call in (root.put_bytes, root.create_exclusive):
            try:
                call("hint" if call == root.put_bytes else "versions/000001.json", bytes(10**6))
            except NoSpaceError as error:
                print(error)
        assert root.read_bytes("hint") == b"old"
        assert root.list("versions") == [] and os.listdir(sys.argv[1] + "/data/versions") == []
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("No space left on device; free space or raise the quota, then run the same command") == 2


def test_file_size_limit(tmp_path):
    code = """
        import resource, sys
        from extract_core.errors import NoSpaceError
        from extract_core.store.root import Root
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            Root.open(sys.argv[1]).put_bytes("x", bytes(10**6))
        except NoSpaceError as error:
            print(error)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "ulimit -f" in done.stdout
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (OSError(28, "No space left on device"), NoSpaceError, False),
        (OSError(122, "Disk quota exceeded"), NoSpaceError, False),
        (PermissionError(13, "Permission denied"), StoreError, False),
        (TimeoutError("slow"), StoreError, True),
        (ConnectionResetError(104, "reset"), StoreError, True),
        (OSError(16, "SlowDown"), StoreError, True),
        (ValueError("odd"), StoreError, False),
    ],
)
def test_kinds_of_failure(error, kind, retryable):
    made = failure(error, "write", "s3://bucket/x")
    assert isinstance(made, kind)
    assert made.retryable is retryable
    assert "cannot write s3://bucket/x" in str(made)
