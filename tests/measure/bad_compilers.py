"""Compilers for tests: real processes that really hang and crash. What they do is chosen by config name.

Imports no torch, so that a child is up in half a second.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flashgen.errors import CompileFailed, CompilerUnavailable
from flashgen.measure.compile_pool import Compiled, CompileJob
from flashgen.spec.record import Measurement, Status


def compiler(behaviours: dict[str, str]) -> Callable[[CompileJob], Compiled]:
    """Factory: a behaviour below by config name; others give no artifact, at once."""

    def run(job: CompileJob) -> Compiled:
        behaviour = behaviours.get(job.source.config.name, "")
        if behaviour == "ptxas":  # which waits for ever, and is waited for
            ptxas = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(os.environ["FLASHGEN_TEST_FOLDER"], "ptxas").write_text(str(ptxas.pid))
            ptxas.wait()
        if behaviour == "hangs":
            time.sleep(600)
        if behaviour == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if behaviour == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "disk":
            raise OSError(errno.ENOSPC, "No space left on device")
        if behaviour == "memory":
            raise CompilerUnavailable(errno.ENOMEM, "ptxas was killed")
        if behaviour == "raises":
            raise CompileFailed("an error nobody expected")
        if behaviour == "refuses":
            return Compiled(None, Measurement(Status.NO_COMPILE, reason="ptxas: too complex"))
        if behaviour == "grows":
            return Compiled(None, Measurement(Status.TOO_LARGE, reason="needs 300 KB of shared memory"))
        return Compiled(None)

    return run
