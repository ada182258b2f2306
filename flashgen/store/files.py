"""Writing a file that the user named: what lies there may be anything."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from flashgen.codegen.source import write_whole


def replaceable(path: Path) -> bool:
    """Whether `write_file` replaces what is at a path: a regular file, or nothing yet.

    Into a device or a pipe it writes, so that doing it twice gives both contents.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return True
    # /dev/stdout may lead to a file that has no name any more.
    real = Path(os.path.realpath(path))
    return stat.S_ISREG(found.st_mode) and real.exists() and os.path.samestat(found, real.stat())


def write_file(path: Path, text: str) -> None:
    """Writes a text: a regular file is afterwards the old one or complete, and keeps its permissions.

    Links are followed. A device or a pipe is written into, for replacing it would destroy it.

    Raises:
        OSError: it cannot be written, or no file can have such a name.
    """
    try:
        if not replaceable(path):
            with path.open("wb") as out:
                out.write(text.encode())
            return
        real = Path(os.path.realpath(path))
        mode = stat.S_IMODE(real.stat().st_mode) if real.exists() else None
        write_whole(real, text.encode(), mode)
    except ValueError as error:  # a name with NUL
        raise OSError(f"{str(path)!r} is no path ({error})") from error
