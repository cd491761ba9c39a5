"""The processes of docker/compose.yaml on this machine, with ports and folders of their own.

Commands, health checks and environments are read from the files; only host names, ports and paths are rewritten.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.deploy import kit

SECRETS = {
    "POSTGRES_PASSWORD": "pgpass1",
    "REDIS_PASSWORD": "redispass1",
    "PREFECT_AUTH_STRING": "team:authpass1",
    "S3_ACCESS_KEY_ID": "key1",
    "S3_SECRET_ACCESS_KEY": "secret1",
}
PORTS = ("postgres", "redis", "server", "worker")


def postgres_program(name: str) -> str | None:
    """A program of Debian's PostgreSQL, which is on no PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


def missing() -> list[str]:
    """What has to be installed first."""
    lacks = [] if postgres_program("initdb") else ["postgresql"]
    return lacks + [name for name in ("redis-server", "tini") if shutil.which(name) is None]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Site:
    """Starts services of the compose file and ends them all."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="compose-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.port = {name: free_port() for name in PORTS}
        self.services: dict[str, Any] = kit.interpolate(kit.compose()["services"], SECRETS)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        # The database refuses to run as root.
        self.user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None

    def here(self, text: str) -> str:
        """A text of the compose file as it has to read on this machine."""
        for old, new in (
            ("@postgres:5432/", f"@127.0.0.1:{self.port['postgres']}/"),
            ("@redis:6379/", f"@127.0.0.1:{self.port['redis']}/"),
            ("http://server:4200/", f"http://127.0.0.1:{self.port['server']}/"),
            ("http://127.0.0.1:4200/", f"http://127.0.0.1:{self.port['server']}/"),
            ("http://127.0.0.1:8080/", f"http://127.0.0.1:{self.port['worker']}/"),
            ("0.0.0.0", "127.0.0.1"),
            ("/app/", f"{kit.ROOT}/"),
            ("dir /data", f"dir {self.folder}"),
            ("exec redis-server -", f"exec redis-server --port {self.port['redis']} --bind 127.0.0.1 -"),
            ("redis-cli ping", f"redis-cli -p {self.port['redis']} ping"),
        ):
            text = text.replace(old, new)
        return text

    def environment(self, service: str) -> dict[str, str]:
        """The environment of a service's container."""
        given = {key: self.here(str(value)) for key, value in self.services[service].get("environment", {}).items()}
        home = self.folder / service
        home.mkdir(exist_ok=True)
        return given | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(home),
            "PREFECT_HOME": str(home),
            "PREFECT_UI_STATIC_DIRECTORY": str(home / "ui"),
            "PREFECT_SERVER_API_PORT": str(self.port["server"]),
            "PREFECT_WORKER_WEBSERVER_PORT": str(self.port["worker"]),
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "CORESAMPLE_HOME": str(kit.ROOT),
            "PYTHONUNBUFFERED": "1",
        }

    def start(self, service: str) -> subprocess.Popen[bytes]:
        """Start a service as its image does: under tini, which is all that stands between it and its signals."""
        command = [self.here(str(word)) for word in self.services[service]["command"]]
        init = [] if service == "redis" else ["tini", "-s", "--"]
        with (self.folder / f"{service}.log").open("wb") as log:
            self.running[service] = subprocess.Popen(
                [*init, *command], env=self.environment(service), cwd=kit.ROOT, stdout=log, stderr=log
            )
        return self.running[service]

    def run(self, service: str) -> subprocess.CompletedProcess[str]:
        """Run a service that ends by itself."""
        command = [self.here(str(word)) for word in self.services[service]["command"]]
        return self.client(*command, service=service)

    def client(self, *command: str, service: str = "bootstrap") -> subprocess.CompletedProcess[str]:
        """Run any command with a service's environment."""
        environment = self.environment(service)
        return subprocess.run(
            command, env=environment, cwd=kit.ROOT, capture_output=True, text=True, check=False, timeout=300
        )

    def start_postgres(self) -> None:
        """A database with the user, name and password of the compose file; its image does this."""
        data, owner = self.folder / "pg", {"user": self.user.pw_uid, "group": self.user.pw_gid} if self.user else {}
        data.mkdir()
        if self.user:
            os.chown(data, self.user.pw_uid, self.user.pw_gid)
        given = self.environment("postgres")
        password = self.folder / "pg.password"
        password.write_text(given["POSTGRES_PASSWORD"])
        initdb = [postgres_program("initdb"), "-D", str(data), f"--username={given['POSTGRES_USER']}"]
        initdb += [f"--pwfile={password}", "--auth=scram-sha-256", "--no-sync"]
        subprocess.run(initdb, check=True, capture_output=True, cwd=data, **owner)  # type: ignore[call-overload]
        where = ["-p", str(self.port["postgres"]), "-k", str(data), "-c", "listen_addresses=127.0.0.1"]
        with (self.folder / "postgres.log").open("wb") as log:
            self.running["postgres"] = subprocess.Popen(  # type: ignore[call-overload]
                [postgres_program("postgres"), "-D", str(data), *where], cwd=data, stdout=log, stderr=log, **owner
            )
        login = {"PGHOST": "127.0.0.1", "PGPORT": str(self.port["postgres"]), "PGPASSWORD": given["POSTGRES_PASSWORD"]}
        self.services["postgres"]["environment"] |= login
        self.wait("postgres", 60)
        createdb = [postgres_program("createdb"), f"--username={given['POSTGRES_USER']}", given["POSTGRES_DB"]]
        subprocess.run(createdb, env=os.environ | login, check=True, capture_output=True)  # type: ignore[arg-type]

    def health(self, service: str) -> subprocess.CompletedProcess[str]:
        """Run a service's own health check once."""
        kind, *words = self.services[service]["healthcheck"]["test"]
        words = [self.here(word) for word in words]
        if words[0] == "pg_isready":
            words[0] = postgres_program("pg_isready") or words[0]
        command = ["sh", "-c", words[0]] if kind == "CMD-SHELL" else words
        return self.client(*command, service=service)

    def wait(self, service: str, seconds: float) -> None:
        """Wait until a service says that it is healthy.

        Raises:
            AssertionError: it ended or took too long; with the end of its log.
        """
        until = time.monotonic() + seconds
        while (done := self.health(service)).returncode:
            ended = self.running[service].poll() is not None
            if ended or time.monotonic() > until:
                log = (self.folder / f"{service}.log").read_text(errors="replace")[-3000:]
                raise AssertionError(f"{service} {'ended' if ended else 'is not healthy'}: {done.stderr}\n{log}")
            time.sleep(1)

    def stop(self, service: str, seconds: float = 40) -> int:
        """SIGTERM, as `docker stop` sends it; the exit status."""
        process = self.running.pop(service)
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def close(self) -> None:
        """End everything, the last started first."""
        for service in reversed(list(self.running)):
            try:
                self.stop(service)
            except subprocess.TimeoutExpired:
                continue
        shutil.rmtree(self.folder, ignore_errors=True)
