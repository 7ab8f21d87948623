"""A real tritonserver over a model repository: the binary of the nvidia-pytriton wheel, on a CPU."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import uuid
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
READY_SECONDS = 120.0  # importing and loading takes a few; a machine may be busy
STOP_SECONDS = 20.0
PORTS = range(15000, 32000)  # below those that the system gives to clients
STACK_KB = 65536  # the server takes a request's JSON text on its stack: of 8 MB it dies of a prompt of 8 MB
STUB = "triton_python_backend_stub"


class ServerFailedError(Exception):
    """The server ended, or was not ready in time; the text holds the end of its log."""


def tritonserver() -> Path:
    """The folder of the wheel: the one that TRITONSERVER names, which must then have it, or where `make test` puts it.

    Else the test is skipped.
    """
    named = os.environ.get("TRITONSERVER")
    folder = Path(named) if named else next(iter(sorted(ROOT.glob("build/tritonserver-*"))), None)
    if folder is None:
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            pytest.skip("tritonserver is there for Linux on x86_64 only")
        pytest.skip("tritonserver is not installed: make test puts it into build/")
    return folder


class TritonServer:
    """A server that is ready. `http`, `grpc` and `metrics` are its addresses, as HOST:PORT."""

    def __init__(self, repository: Path, folder: Path, arguments: Sequence[str] = ()) -> None:
        """Starts it; `folder` is a new one for what the server needs, its log above all.

        Raises ServerFailedError.
        """
        wheel = tritonserver()
        ports = _free_ports(3)
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in ports)
        self._prefix = f"dflash_trt_test_{uuid.uuid4().hex[:12]}_"
        self._log = folder / "server.log"
        options = {
            "model-repository": repository.absolute(),
            "backend-directory": _backends(wheel, folder / "backends"),
            "backend-config": f"python,shm-region-prefix-name={self._prefix}",
            "http-address": "127.0.0.1",
            "grpc-address": "127.0.0.1",
            "metrics-address": "127.0.0.1",
            "http-port": ports[0],
            "grpc-port": ports[1],
            "metrics-port": ports[2],
            "http-thread-count": 4,
            "allow-gpu-metrics": "false",
            "allow-cpu-metrics": "false",
            "exit-timeout-secs": int(STOP_SECONDS) - 10,
        }
        command = [str(wheel / "pytriton/tritonserver/bin/tritonserver")]
        command += [f"--{name}={value}" for name, value in options.items()]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", f'ulimit -s {STACK_KB} && exec "$@"', "sh", *command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(wheel, folder / "venv"),
                cwd=folder,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def pids(self) -> list[int]:
        """The server's process and all below it: one stub for each instance of a Python model."""
        pids = [self._process.pid]
        for pid in pids:  # grows while it is read
            for thread in Path(f"/proc/{pid}/task").glob("*"):
                with contextlib.suppress(OSError):
                    pids += [int(child) for child in (thread / "children").read_text().split()]
        return pids

    def memory(self) -> dict[int, int]:
        """The resident bytes of each process that are its own: without files and shared memory."""
        return {pid: _resident(pid) for pid in self.pids()}

    def shared_memory(self) -> int:
        """The bytes of the stubs' regions that are in memory."""
        return sum(path.stat().st_blocks * 512 for path in self._regions())

    def metric_text(self) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as answer:
            return answer.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's values over all series that have these labels."""
        found = [
            float(value)
            for its_labels, value in re.findall(rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)$", self.metric_text(), re.M)
            if labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', its_labels)).items()
        ]
        assert found, f"no {name} with {labels}"
        return sum(found)

    def wait_for(self, name: str, value: float, **labels: str) -> None:
        """Until a metric has a value; they are brought up to date a few times a second."""
        end = time.monotonic() + READY_SECONDS
        while (now := self.metric(name, **labels)) != value:
            assert time.monotonic() < end, f"{name} stays {now}, not {value}"
            time.sleep(0.02)

    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> int:
        """Ends the server and what it started, gently at first; returns its exit code. Nothing of it stays."""
        pids = self.pids()
        if self.alive():
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        for pid in pids[1:]:
            _end_stub(pid)
        for region in self._regions():
            region.unlink(missing_ok=True)
        return code

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end:
            if not self.alive():
                raise ServerFailedError(f"ended with code {self._process.returncode}:\n{self._tail()}")
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=10).close()
                return
            time.sleep(0.05)
        raise ServerFailedError(f"not ready after {READY_SECONDS:.0f} s:\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-60:])

    def _regions(self) -> list[Path]:
        return list(SHARED_MEMORY.glob(f"{self._prefix}*"))


@contextlib.contextmanager
def serving(repository: Path, folder: Path, *arguments: str) -> Iterator[TritonServer]:
    """A server over the repository, stopped at the end. `folder` is made."""
    folder.mkdir(parents=True)
    server = TritonServer(repository, folder, arguments)
    try:
        yield server
    finally:
        server.stop()


def _backends(wheel: Path, folder: Path) -> Path:
    """A backend directory with the Python backend and the stub of the running Python, as links."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = wheel / "pytriton/tritonserver/python_backend_stubs" / version / STUB
    if not stub.is_file():
        pytest.fail(f"{stub} is missing: tritonserver's wheel has no stub for Python {version}")
    python = folder / "python"
    python.mkdir(parents=True)
    for path in (stub, *(wheel / "pytriton/tritonserver/backends/python").glob("*.*")):
        (python / path.name).symlink_to(path.absolute())
    return folder


def _environment(wheel: Path, folder: Path) -> dict[str, str]:
    """This process's environment with what server and stubs need.

    A stub finds its packages where the first `python3` on PATH would, whatever PYTHONPATH says. Here that is a virtual
    environment in `folder`, which has the wheel's NumPy, since the stub does not know NumPy 2, and then all that the
    running Python has.
    """
    venv.create(folder, symlinks=True)
    site_packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    added = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    (site_packages / "packages.pth").write_text(f"{wheel.absolute()}\n{added}\n")
    libraries = [str(wheel.absolute() / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    changed = {
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)]),
        "LD_LIBRARY_PATH": os.pathsep.join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep),
        "OMP_NUM_THREADS": "1",
    }
    return os.environ | changed


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise ServerFailedError("no free ports")


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) * 1024 if found else 0
    return 0


def _end_stub(pid: int) -> None:
    """A stub ends with its server; one that does not, because the server was killed, is killed."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if not _is_stub(pid):
            return
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_stub(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return STUB.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
