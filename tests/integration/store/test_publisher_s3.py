"""One publisher at a time on a real server that ignores ``If-None-Match``."""

import json
import multiprocessing
import threading
import time
import uuid

import pytest

from extract_core.errors import AlreadyExistsError, RootBusyError
from extract_core.progress import Silent, set_reporter
from extract_core.store import layout, publisher
from extract_core.store.gc import Policy, survey
from extract_core.store.publisher import Claim, sole_publisher
from extract_core.store.root import Root
from tests.integration.store.servers import Faulty, serving
from tests.unit.store.kit import make_dataset

pytestmark = pytest.mark.integration


def ignore_conditions(request):
    request.environ.pop("HTTP_IF_NONE_MATCH", None)


@pytest.fixture(scope="module")
def options():
    with serving(Faulty(before=ignore_conditions)) as options:
        yield options


@pytest.fixture
def url():
    return f"s3://bucket/{uuid.uuid4().hex}"


def probed(url, options):
    root = Root.open(url, options, "s3fs")
    assert root.probe_exclusive() is False
    return root


def claim_path(root):
    (name,) = root.list(layout.PUBLISHERS)
    return f"{layout.PUBLISHERS}/{name}"


def test_a_second_run_is_refused_by_name(url, options):
    root = probed(url, options)
    with sole_publisher(root):
        root.create_exclusive("versions/000001.json", b"mine")
        with (
            pytest.raises(
                RootBusyError, match=r"in use by another run \(host .*, process \d+, started 20.*publishers/"
            ),
            sole_publisher(probed(url, options)),
        ):
            pytest.fail("two publishers")
        assert len(root.list(layout.PUBLISHERS)) == 1  # the refused run took its claim back
        with pytest.raises(AlreadyExistsError):
            root.create_exclusive("versions/000001.json", b"again")
    assert root.list(layout.PUBLISHERS) == []
    with sole_publisher(probed(url, options)):
        pass


def test_probe_is_made_and_told(url, options):
    class Notes(Silent):
        def note(self, text):
            lines.append(text)

    lines = []
    set_reporter(Notes())
    try:
        root = Root.open(url, options)
        with sole_publisher(root):
            assert len(root.list(layout.PUBLISHERS)) == 1
    finally:
        set_reporter(Silent())
    assert root.exclusive is False
    assert any("only one run at a time" in line for line in lines)


def test_no_claim_where_the_store_creates_exclusively(s3_options, url):
    root = Root.open(url, s3_options)
    with sole_publisher(root):
        assert root.list("") == []
    assert root.exclusive is True


def test_of_many_at_once_never_two_go_on(url, options):
    """All write before all list, or one by one: however they meet, at most one is inside at any time."""
    inside, most, lock, refused = [0], [0], threading.Lock(), [0]
    barrier = threading.Barrier(6)

    def run():
        root = probed(url, options)
        for _ in range(3):
            barrier.wait(60)
            try:
                with sole_publisher(root):
                    with lock:
                        inside[0] += 1
                        most[0] = max(most[0], inside[0])
                    time.sleep(0.3)
                    with lock:
                        inside[0] -= 1
            except RootBusyError:
                with lock:
                    refused[0] += 1

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert most[0] <= 1
    assert refused[0] >= 10
    assert Root.open(url, options).list(layout.PUBLISHERS) == []


def _hold(url, options, ready):
    root = Root.open(url, options)
    root.probe_exclusive()
    with sole_publisher(root, lifetime_s=4):
        ready.set()
        time.sleep(600)


def test_claim_of_a_killed_run_expires_and_a_living_one_does_not(url, options):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    child = context.Process(target=_hold, args=(url, options, ready))
    child.start()
    assert ready.wait(60)
    root = probed(url, options)
    time.sleep(6)  # longer than its lifetime: it was renewed
    with pytest.raises(RootBusyError), sole_publisher(root, lifetime_s=4):
        pytest.fail("two publishers")
    child.kill()
    child.join()
    with pytest.raises(RootBusyError, match="if it is dead"), sole_publisher(root, lifetime_s=4):
        pytest.fail("its claim is young still")
    time.sleep(6)
    with sole_publisher(root, lifetime_s=4):
        assert len(root.list(layout.PUBLISHERS)) == 1  # the dead run's claim is gone


def test_a_run_that_was_stopped_writes_nothing_more(url, options):
    """Its claim may be somebody else's by now: refused before the record, and the claim does not come back."""
    root = probed(url, options)
    with sole_publisher(root, lifetime_s=4):
        guard = root.guard
        claim = guard.__self__
        claim._renewed -= 3  # as if the process had been stopped for three seconds
        with pytest.raises(RootBusyError, match=r"could not renew its claim .* nothing more is written"):
            root.create_exclusive("versions/000001.json", b"zombie")
        before = root.modified(claim._path)
        time.sleep(1.5)
        assert root.modified(claim._path) == before
    assert root.list("versions") == []


def test_damaged_claims_count_all_the_same(url, options):
    root = probed(url, options)
    root.put_bytes(layout.publisher_path("ab" * 16), b"\xff not json")
    root.put_bytes(f"{layout.PUBLISHERS}/notes.txt", b"not a claim")
    with pytest.raises(RootBusyError, match="its claim cannot be read"), sole_publisher(root):
        pytest.fail("went on")


def test_gc_finds_claims_of_dead_runs(url, options, tmp_path):
    root = probed(url, options)
    make_dataset(root, tmp_path / "spool")
    claim = Claim(root, "cd" * 16)
    claim._write()
    report = survey(root, Policy(grace_s=0), now=time.time() + 3)
    assert [item.path for item in report.items] == [layout.publisher_path("cd" * 16)]
    assert json.loads(root.read_bytes(claim_path(root)))["attempt"] == "cd" * 16
    assert survey(root, Policy(), now=time.time()).items == []


def test_local_root_without_hard_links(tmp_path, monkeypatch):
    """Some file systems (exFAT, some FUSE) have none; one run at a time may still work there."""
    import errno
    import os

    def no_links(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    root = Root.open(str(tmp_path / "data"))
    with sole_publisher(root):
        assert root.exclusive is False
        root.create_exclusive("versions/000001.json", b"x")
        with pytest.raises(RootBusyError), sole_publisher(Root.open(root.url)):
            pytest.fail("two publishers")
    assert root.list(layout.PUBLISHERS) == []
    assert publisher.LIFETIME_S >= 60
