"""A process that may die: it runs jobs one at a time, and is killed with all it started when it is late.

Kernels under test hang, write out of bounds and leave their CUDA context unusable; compilers hang and
crash. None of that may reach the tuner, so both run in such children. A child is a fresh interpreter, not
a fork: a fork would inherit the caller's threads and CUDA context. Nothing here needs a GPU.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

from flashgen.spec.record import Status

START_TIMEOUT_S = 120.0
"""From the start of the interpreter to readiness: importing torch can take 20 s on a cold disk."""

# What an exception means, by its kind or by what it says; anything else is a crash.
_KINDS = {
    "MemoryError": Status.OUT_OF_MEMORY,
    "OutOfMemoryError": Status.OUT_OF_MEMORY,
    "MemoryDamage": Status.WRONG,
}
_SAYINGS = {
    "CUDA_ERROR_OUT_OF_MEMORY": Status.OUT_OF_MEMORY,
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": Status.TOO_LARGE,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job has no answer; the child that ran it is gone."""

    status: Status
    reason: str
    blameless: bool = False
    """Whether no job is to blame: the process does not start, or the machine failed it (disk, files)."""


class Child:
    """A persistent child process; `call` runs one job in it and never raises for what the job did.

    Args:
        entry: `module:function` of a factory. Called once in the child with `options`, it returns the
            function that answers each job. Jobs, options and answers must pickle.
        environment: variables added to those of the parent.

    The child starts at the first call, and again at the call after it failed. It and all that it started die
    with its parent and, as Linux sees it, with the parent's thread that made the call. One thread at a time
    may call; `close` may come from any thread.
    """

    def __init__(
        self,
        entry: str,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._entry, self._options = entry, dict(options or {})
        self._environment = dict(environment or {})
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._log: BinaryIO | None = None
        self.starts = 0
        """How many processes were started so far."""

    @property
    def pid(self) -> int | None:
        """Of the running process; None when there is none."""
        return None if self._process is None else self._process.pid

    def start(self, within_s: float = math.inf) -> Failure | None:
        """Starts the process unless it runs already; the failure if the factory did not come up."""
        if self._process is not None:
            return None
        try:
            self._spawn()
        except OSError as error:
            self.close()
            return Failure(Status.CRASH, f"the process cannot be started: {error}", blameless=True)
        answer = self._exchange((self._entry, self._options), min(self._start_timeout_s, within_s))
        return replace(answer, blameless=True) if isinstance(answer, Failure) else None

    def _spawn(self) -> None:
        ours, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        paths = [path for path in sys.path if path]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flashgen.measure.child", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a group of its own: killed whole, and Ctrl-C in the terminal passes by
            env={**os.environ, **self._environment, "PYTHONPATH": os.pathsep.join(paths)},
        )
        theirs.close()
        self._pipe = ours
        self.starts += 1

    def call(self, job: Any, timeout_s: float) -> Any:
        """The answer to a job, or a `Failure`, after which the process is gone.

        `TIMEOUT`: no answer within `timeout_s`; `OUT_OF_MEMORY`: the job raised so, or the process was
        killed, as the system does when memory runs out; `CRASH`: it raised anything else (its CUDA context
        may be unusable) or the process died, with signal and last words.
        """
        failed = self.start()
        return failed if failed is not None else self._exchange(job, timeout_s)

    def close(self) -> None:
        """Ends the process and everything it started."""
        process, pipe, log = self._process, self._pipe, self._log
        self._process = self._pipe = self._log = None
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            # The driver can hold on to a process with a hung kernel for a while.
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        for resource in (pipe, log):
            if resource is not None:
                with suppress(OSError):
                    resource.close()

    def _exchange(self, message: Any, timeout_s: float) -> Any:
        pipe, timeout_s = self._pipe, max(timeout_s, 0.0)
        if pipe is None:
            return Failure(Status.CRASH, "closed")
        try:
            pipe.send(message)
            if not pipe.poll(timeout_s):
                self.close()
                return Failure(Status.TIMEOUT, f"no answer within {timeout_s:.3g} s; the process was killed")
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            words, code = self._last_words()
            self.close()
            status = Status.OUT_OF_MEMORY if code == -signal.SIGKILL else Status.CRASH
            return Failure(status, words or f"the process is gone ({error})")
        if isinstance(answer, Failure):
            self.close()
        return answer

    def _last_words(self) -> tuple[str, int | None]:
        """How the process ended and the last line it wrote; and its exit code."""
        process, log = self._process, self._log
        if process is None or log is None:
            return "closed", None
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        code = process.returncode
        if code is None:
            ended = "stopped answering"
        elif code < 0:
            ended = f"died of {signal.Signals(-code).name}"
        else:
            ended = f"exited with code {code}"
        log.seek(max(log.seek(0, os.SEEK_END) - 4096, 0))
        lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"the process {ended}" + (f": {lines[-1].strip()[:300]}" if lines else ""), code


def resolve(entry: str) -> Any:
    """The object that `module:name` names."""
    module, _, name = entry.partition(":")
    return getattr(import_module(module), name)


def failure_of(error: BaseException) -> Failure:
    """An exception that ended a job, as a value."""
    kind, text = type(error).__name__, str(error)
    said = next((status for saying, status in _SAYINGS.items() if saying in text), Status.CRASH)
    status = _KINDS.get(kind, said)
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        status = Status.OUT_OF_MEMORY
    blameless = isinstance(error, OSError) and status is Status.CRASH
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return Failure(status, f"{kind}: {lines[0][:300]}" if lines else kind, blameless)


def _die_with_parent(descriptor: int) -> None:
    """Has Linux kill this process when its parent is gone; elsewhere it ends at the closed pipe.

    What it started (ptxas) is not told of that, so a guard, forked while there is nothing to inherit, waits
    for this process to die, however it does, and then kills the whole group.
    """
    if sys.platform != "linux":
        return
    prctl, set_parent_death_signal = ctypes.CDLL(None).prctl, 1
    prctl(set_parent_death_signal, signal.SIGKILL)
    guarded = os.getpid()
    if os.fork():
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    prctl(set_parent_death_signal, signal.SIGTERM)
    os.close(descriptor)  # or the parent would not see the other end close
    if os.getppid() == guarded:
        signal.sigwait({signal.SIGTERM})
    os.killpg(0, signal.SIGKILL)  # itself too


def main(descriptor: int) -> int:
    """The child: answers jobs until the pipe closes (0) or a job raises (1)."""
    _die_with_parent(descriptor)
    pipe = Connection(descriptor)
    execute = None
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return 0
        try:
            if execute is None:
                entry, options = message
                execute = resolve(entry)(**options)
                answer = True
            else:
                answer = execute(message)
        except Exception as error:
            pipe.send(failure_of(error))
            return 1
        pipe.send(answer)


if __name__ == "__main__":
    from flashgen.measure import child  # under its own name, so that its classes pickle

    # os._exit: a context that saw an illegal access can hang in its own clean-up.
    os._exit(child.main(int(sys.argv[1])))
