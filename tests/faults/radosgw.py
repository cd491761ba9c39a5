"""A real S3 server on loopback: Ceph's radosgw over one monitor and one OSD that keeps its objects in memory.

Needs root, and Debian's packages: ``apt-get install --no-install-recommends ceph-mon ceph-osd radosgw`` (16.2).
Everything lives in one temporary folder; nothing of the machine's own Ceph configuration is read. cephx stays on, since
radosgw does not start without it. Used as a context manager or by hand:

    python -m tests.faults.radosgw        # prints the endpoint and keys, and serves until interrupted
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin", "setpriv")
PACKAGES = ("ceph-mon", "ceph-osd", "radosgw")
DEVICE_BYTES = 6 * 2**30
"""Most that the OSD stores, in memory."""
KEY, SECRET = "coresample", "coresample-secret"
_START_S = 90.0

CONFIG = """\
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon}/0
public addr = 127.0.0.1
ms bind msgr1 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon osd full ratio = 0.99
mon osd nearfull ratio = 0.98
mon data avail crit = 0
mon data avail warn = 0
mon max pg per osd = 1000
auth allow insecure global id reclaim = false
keyring = {folder}/keyring
run dir = {folder}
log file = {folder}/$name.log
admin socket = {folder}/$name.asok
pid file = {folder}/$name.pid
debug default = 0/0
log to stderr = false
mon cluster log to file = false
mon cluster log file = {folder}/cluster.log
ms type = async+posix
ms async op threads = 1
mon data = {folder}/mon
osd data = {folder}/osd

[osd]
osd objectstore = memstore
memstore device bytes = {bytes}
osd memory target = 939524096
osd memory target autotune = false
osd op num threads per shard = 1
osd op num shards = 1
osd class load list = *
osd class default list = *

[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{rgw}
rgw thread pool size = 16
rgw enable usage log = false
rgw enable ops log = false
rgw gc obj min wait = 5
rgw dynamic resharding = false
rgw override bucket index max shards = 1
rgw cache lru size = 500
rgw enable apis = s3
"""


class Unavailable(Exception):
    """radosgw cannot run here; says why."""


def missing() -> str:
    """Why radosgw cannot run here; empty when it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install --no-install-recommends {' '.join(PACKAGES)})"
    if os.getuid() != 0:
        return "Ceph's daemons are started as root only"
    return ""


class RadosGateway:
    """A server that runs between ``start`` and ``stop``.

    Args:
        device_bytes: what the object store may hold, in memory.

    Attributes:
        endpoint: ``http://127.0.0.1:port``.
        key, secret: the user's.
    """

    key, secret = KEY, SECRET

    def __init__(self, device_bytes: int = DEVICE_BYTES):
        self._device_bytes = device_bytes
        self._processes: list[subprocess.Popen[bytes]] = []
        self.folder: Path | None = None
        self.endpoint = ""

    def start(self) -> RadosGateway:
        """Start all three; raises Unavailable with the daemons' own last words."""
        if reason := missing():
            raise Unavailable(reason)
        self.folder = Path(tempfile.mkdtemp(prefix="coresample-ceph-"))
        try:
            self._start(self.folder)
        except BaseException as error:
            words = self._last_words()
            self.stop()
            if isinstance(error, subprocess.CalledProcessError):
                words = f"{error.cmd}: {(error.stderr or b'').decode(errors='replace')}\n{words}"
            if isinstance(error, Exception):
                raise Unavailable(f"radosgw did not start: {error}\n{words}") from error
            raise
        return self

    def _start(self, folder: Path) -> None:
        mon, rgw = free_port(), free_port()
        fsid = str(uuid.uuid4())
        config = folder / "ceph.conf"
        config.write_text(CONFIG.format(fsid=fsid, mon=mon, rgw=rgw, folder=folder, bytes=self._device_bytes))
        keyring = folder / "keyring"
        tool = ["ceph-authtool", str(keyring), "--gen-key"]
        run = self._run
        run("ceph-authtool", "--create-keyring", str(keyring), "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        everything = [part for kind in ("mon", "osd", "mgr", "mds") for part in ("--cap", kind, "allow *")]
        run(*tool, "-n", "client.admin", *everything)
        run(*tool, "-n", "osd.0", "--cap", "mon", "allow profile osd", "--cap", "osd", "allow *")
        run(*tool, "-n", "client.rgw", "--cap", "mon", "allow rwx", "--cap", "osd", "allow rwx")
        # Before the first monitor there is a map that names it.
        run("monmaptool", "--create", "--addv", "a", f"[v2:127.0.0.1:{mon}]", "--fsid", fsid, str(folder / "monmap"))
        (folder / "mon").mkdir()
        (folder / "osd").mkdir()
        conf = ("-c", str(config))
        run("ceph-mon", *conf, "--mkfs", "-i", "a", "--monmap", str(folder / "monmap"), "--keyring", str(keyring))
        self._spawn("ceph-mon", *conf, "-i", "a", "-f")
        self._until("the monitor", lambda: self._ceph("-s") is not None)
        osd = str(uuid.uuid4())
        run("ceph", *conf, "osd", "new", osd)
        run("ceph", *conf, "auth", "import", "-i", str(keyring))
        run("ceph-osd", *conf, "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._spawn("ceph-osd", *conf, "-i", "0", "-f")
        self._until("the OSD", lambda: json.loads(self._ceph("osd", "stat") or "{}").get("num_up_osds") == 1)
        self._spawn("radosgw", *conf, "-n", "client.rgw", "-f")
        self.endpoint = f"http://127.0.0.1:{rgw}"
        self._until("radosgw", lambda: _answers(self.endpoint))
        user = ("--uid=coresample", "--display-name=coresample", f"--access-key={KEY}", f"--secret={SECRET}")
        run("radosgw-admin", *conf, "-n", "client.rgw", "user", "create", *user)

    def stop(self) -> None:
        """End all daemons and remove the folder."""
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes.clear()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    @property
    def pids(self) -> list[int]:
        """The daemons."""
        return [process.pid for process in self._processes]

    def pause(self) -> None:
        """Stop answering, as a server does that hangs."""
        os.kill(self._processes[-1].pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Answer again."""
        os.kill(self._processes[-1].pid, signal.SIGCONT)

    def __enter__(self) -> RadosGateway:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def options(self, endpoint: str = "") -> dict[str, Any]:
        """Storage options for s3fs (they hold the keys: not for a job file)."""
        return {"key": KEY, "secret": SECRET, "client_kwargs": {"endpoint_url": endpoint or self.endpoint}}

    def environment(self) -> dict[str, str]:
        """Variables that give a process the keys."""
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}

    def make_bucket(self, name: str) -> None:
        """Create a bucket."""
        import boto3

        boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        ).create_bucket(Bucket=name)

    # -- daemons -------------------------------------------------------------------------------------------------

    def _run(self, *command: str) -> bytes:
        return subprocess.run(command, check=True, capture_output=True, timeout=60, cwd=self.folder).stdout

    def _spawn(self, *command: str) -> None:
        assert self.folder is not None
        # The daemons die with the thread that starts them, so that a killed test leaves none behind.
        bound = ("setpriv", "--pdeathsig", "KILL", *command)
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            self._processes.append(
                subprocess.Popen(bound, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder)
            )

    def _ceph(self, *words: str) -> str | None:
        try:
            command = ("ceph", "-c", f"{self.folder}/ceph.conf", "--connect-timeout", "5", *words, "-f", "json")
            return self._run(*command).decode()
        except subprocess.SubprocessError:
            return None

    def _until(self, what: str, done: Any) -> None:
        deadline = time.monotonic() + _START_S
        while not done():
            if (status := self._processes[-1].poll()) is not None:
                raise Unavailable(f"{what} ended with status {status}")
            if time.monotonic() > deadline:
                raise Unavailable(f"{what} was not ready after {_START_S:.0f} s")
            time.sleep(0.2)

    def _last_words(self) -> str:
        paths = [*self.folder.glob("*.out"), *self.folder.glob("*.log")] if self.folder else []
        texts = {path.name: path.read_text(errors="replace")[-1000:].strip() for path in sorted(paths)}
        return "\n".join(f"{name}: {text}" for name, text in texts.items() if text)


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(endpoint, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def main() -> None:
    """Serve until interrupted."""
    with RadosGateway() as server:
        server.make_bucket("bucket")
        print(json.dumps({"endpoint": server.endpoint, "bucket": "bucket", **server.environment()}), flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()
    sys.exit(0)
