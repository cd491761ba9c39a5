"""A Prefect site as a team has it: a server with Postgres, work pools, workers, an S3 store; each a process of its own.

Postgres comes from Debian's packages; where it is not installed, the server uses SQLite, as Prefect does by itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from base64 import b64encode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.faults.radosgw import free_port

ROOT = Path(__file__).resolve().parents[3]
AUTH = "admin:not-for-anybody-else"
"""The server's auth string; planted, to be looked for in everything that is stored."""


def postgres_tools() -> Path | None:
    """The folder of initdb and postgres; None where the package is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return found[-1].parent if found else None


class Postgres:
    """A cluster of its own on a free port."""

    def __init__(self) -> None:
        tools = postgres_tools()
        assert tools is not None
        self._tools = tools
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="coresample-pg-"))
        self._as_user: list[str] = []
        if os.geteuid() == 0:  # Postgres refuses to run as root
            shutil.chown(self.folder, "postgres", "postgres")
            self._as_user = ["runuser", "-u", "postgres", "--"]

    @property
    def url(self) -> str:
        """For Prefect."""
        return f"postgresql+asyncpg://prefect@127.0.0.1:{self.port}/prefect"

    def _run(self, tool: str, *words: str) -> str:
        command = [*self._as_user, str(self._tools / tool), *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self) -> Postgres:
        """Make the cluster, its user and its database."""
        data = str(self.folder / "data")
        self._run("initdb", "-D", data, "-U", "prefect", "--auth=trust", "-E", "UTF8", "--locale=C.UTF-8")
        options = f"-p {self.port} -k {self.folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        self._run("pg_ctl", "-D", data, "-w", "-l", str(self.folder / "log"), "-o", options, "start")
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "prefect", "prefect")
        return self

    def dump(self) -> str:
        """Everything in the database, as text."""
        return self._run("pg_dump", "-h", "127.0.0.1", "-p", str(self.port), "-U", "prefect", "--inserts", "prefect")

    def size(self) -> int:
        """Bytes of the database."""
        query = "select pg_database_size('prefect')"
        return int(
            self._run("psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", "prefect", "-Atc", query, "prefect")
        )

    def stop(self) -> None:
        """End it and remove its files."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "stop")
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Site:
    """A server and its workers.

    Args:
        folder: for everything that they write.
        environment: for workers and what they start, such as the keys of the store.
    """

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    database: Postgres | None = None
    port: int = field(default_factory=free_port)
    server: subprocess.Popen[bytes] | None = None
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Of the UI."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def api(self) -> dict[str, str]:
        """What a client needs."""
        return {
            "PREFECT_API_URL": f"{self.url}/api",
            "PREFECT_API_AUTH_STRING": AUTH,
            "PREFECT_HOME": str(self.folder / "client"),
            "PREFECT_LOGGING_TO_API_MAX_LOG_SIZE": "1000000",
        }

    def _spawn(self, name: str, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", *words],  # nothing outlives a killed test
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def start(self) -> Site:
        """Database and server."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if postgres_tools() is not None:
            self.database = Postgres().start()
        self.start_server()
        return self

    def start_server(self) -> None:
        """The server, again under the same address after ``stop_server``."""
        leases = "prefect.server.concurrency.lease_storage.filesystem"
        environment = {
            "PREFECT_HOME": str(self.folder / "server"),
            "PREFECT_SERVER_API_AUTH_STRING": AUTH,
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": leases,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_API_URL": f"{self.url}/api",
            "PREFECT_UI_STATIC_DIRECTORY": str(self.folder / "ui"),
            "DO_NOT_TRACK": "1",
        }
        if self.database is not None:
            environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = self.database.url
        words = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        self.server = self._spawn("server", *words, **environment)
        deadline = time.monotonic() + 180
        while not self._healthy():
            assert self.server.poll() is None, (self.folder / "server.log").read_text()[-3000:]
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.5)

    def _healthy(self) -> bool:
        request = urllib.request.Request(f"{self.url}/api/health")
        request.add_header("Authorization", "Basic " + b64encode(AUTH.encode()).decode())
        try:
            with urllib.request.urlopen(request, timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop_server(self, number: int = signal.SIGTERM) -> None:
        """End the server; the database stays."""
        if self.server is not None:
            os.killpg(self.server.pid, number)
            self.server.wait()
            self.server = None

    def run(self, *words: str, timeout_s: float = 300) -> str:
        """A module to its end, as a client of the server; returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env={**os.environ, **self.environment, **self.api, "CORESAMPLE_HOME": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def start_worker(self, name: str, pool: str, **environment: str) -> None:
        """A process worker that runs one flow at a time."""
        words = ["prefect", "worker", "start", "--pool", pool, "--type", "process", "--name", name, "--limit", "1"]
        more = {
            **self.environment,
            **self.api,
            "PREFECT_HOME": str(self.folder / name),
            "CORESAMPLE_HOME": str(ROOT),
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            **environment,
        }
        self.workers[name] = self._spawn(name, *words, **more)

    def flow_processes(self, worker: str) -> list[psutil.Process]:
        """The flow runs that a worker has started, without what they have started."""
        return psutil.Process(self.workers[worker].pid).children()

    def kill_worker(self, name: str) -> None:
        """As when its machine loses power: the worker and the runs under it, at once."""
        process = psutil.Process(self.workers.pop(name).pid)
        for victim in [process, *self._children(process)]:
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait()

    def _children(self, process: psutil.Process) -> list[psutil.Process]:
        return process.children(recursive=True)

    def stop(self) -> None:
        """End everything."""
        for name in list(self.workers):
            self.kill_worker(name)
        self.stop_server(signal.SIGKILL)
        if self.database is not None:
            self.database.stop()

    # -- what the server says ------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """A call of the REST API."""
        import httpx

        user, _, password = AUTH.partition(":")
        answer = httpx.request(method, f"{self.url}/api{path}", json=body, auth=(user, password), timeout=60)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def start_run(self, deployment: str, **parameters: Any) -> str:
        """Start a deployment run; returns its id."""
        flow, _, name = deployment.partition("/")
        found = self.ask("GET", f"/deployments/name/{flow}/{name}")
        run = self.ask("POST", f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters})
        return str(run["id"])

    def flow_run(self, run: str) -> dict[str, Any]:
        """A run as the server has it."""
        found: dict[str, Any] = self.ask("GET", f"/flow_runs/{run}")
        return found

    def flow_runs(self, deployment: str = "") -> list[dict[str, Any]]:
        """All runs, of a deployment if one is named, in the order of their start."""
        body: dict[str, Any] = {"sort": "START_TIME_ASC", "limit": 200}
        if deployment:
            flow, _, name = deployment.partition("/")
            body |= {"flows": {"name": {"any_": [flow]}}, "deployments": {"name": {"any_": [name]}}}
        return list(self.ask("POST", "/flow_runs/filter", body))

    def cancel(self, run: str) -> None:
        """As the UI's button does."""
        state = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
        self.ask("POST", f"/flow_runs/{run}/set_state", state)

    def logs(self, run: str) -> list[str]:
        """Messages of a run."""
        body = {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200, "sort": "TIMESTAMP_ASC"}
        return [line["message"] for line in self.ask("POST", "/logs/filter", body)]

    def wait_said(self, run: str, text: str) -> None:
        """Wait until a run's logs hold a text; they come in batches, after what they tell of."""
        self.wait_until(f"the logs say {text!r}", lambda: any(text in line for line in self.logs(run)), 30)

    def artifacts(self, kind: str = "") -> list[dict[str, Any]]:
        """Newest first."""
        found = self.ask("POST", "/artifacts/filter", {"limit": 200, "sort": "UPDATED_DESC"})
        return [item for item in found if not kind or item["type"] == kind]

    def wait_until(self, what: str, done: Any, timeout_s: float, every_s: float = 1.0) -> Any:
        """The first true value of ``done()``; an outage of the server counts as false."""
        import httpx

        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if value := done():
                    return value
            except httpx.TransportError:
                value = None
            if time.monotonic() > deadline:
                runs = [(run["name"], run["state"]["name"], run["state"]["message"]) for run in self.flow_runs()]
                raise AssertionError(f"{what}: not within {timeout_s:.0f} s; runs: {runs}")
            time.sleep(every_s)

    def wait_ended(self, run: str, timeout_s: float) -> dict[str, Any]:
        """Wait for a run's final state, which is returned."""

        def ended() -> dict[str, Any] | None:
            state = self.flow_run(run)["state"]
            return state if state["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None

        found: dict[str, Any] = self.wait_until(f"run {run} ended", ended, timeout_s)
        return found
