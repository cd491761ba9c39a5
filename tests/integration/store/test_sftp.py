"""A dataset on a file server, OpenSSH's own on loopback. Needs Debian's openssh-server."""

import os
import shutil
import socket
import subprocess
import time

import pytest

from extract_core.errors import RootBusyError
from extract_core.store.publisher import sole_publisher
from extract_core.store.root import Root
from extract_core.store.verify import verify
from tests.unit.store.kit import make_dataset

pytestmark = [pytest.mark.integration, pytest.mark.system]


@pytest.fixture
def options(tmp_path):
    sshd = shutil.which("sshd") or "/usr/sbin/sshd"
    if not os.path.exists(sshd) or os.geteuid() != 0:
        pytest.skip("no sshd here, or not root")
    os.makedirs("/run/sshd", exist_ok=True)
    for name, kind in (("user", "rsa"), ("host", "ed25519")):
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(tmp_path / name)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/user.pub\n"
        "StrictModes no\nPermitRootLogin yes\nSubsystem sftp internal-sftp\nPidFile none\n"
    )
    server = subprocess.Popen([sshd, "-D", "-f", str(tmp_path / "config")])
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield {"port": port, "username": "root", "key_filename": str(tmp_path / "user")}
    server.terminate()
    server.wait()


def test_dataset_on_a_file_server(options, tmp_path):
    root = Root.open(f"sftp://127.0.0.1{tmp_path}/data", options)
    assert root.probe_exclusive() is False
    with sole_publisher(root):
        with pytest.raises(RootBusyError), sole_publisher(Root.open(root.url, options)):
            pytest.fail("two publishers")
        make_dataset(root, tmp_path / "spool")
        for hint in (b"1", b"2"):
            root.put_bytes("hint", hint)  # posix-rename replaces
    assert root.read_bytes("hint") == b"2"
    assert root.list("nothing") == []
    assert verify(root).problems == []  # reads from many threads at once
    names = [name for _, _, files in os.walk(tmp_path / "data") for name in files]
    assert not [name for name in names if name.startswith(".tmp")]
