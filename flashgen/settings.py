"""Every environment variable FlashGen reads, typed, in one place; read once, at import.

Importing judges none of them, so that `flashgen doctor` can: `SETTINGS.check()` does, before any use.
The hot path never looks at the environment: what it needs was copied out of `SETTINGS` before.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from flashgen.errors import InvalidArgument

VERSION = "0.1.0"
"""Of FlashGen; pyproject.toml says the same, and a test compares."""

MISS_POLICIES = ("default", "tune", "record", "error")


def _user_dir(kind: str) -> Path:
    import platformdirs

    return Path(getattr(platformdirs, f"user_{kind}_dir")("flashgen", appauthor=False))


@dataclass(frozen=True)
class Settings:
    """The values in force; `variables()` lists the environment variable and the help of each."""

    db: str = field(
        default="", metadata={"env": "FLASHGEN_DB", "help": "record database: a path or an SQLAlchemy URL"}
    )
    cache: str = field(
        default="", metadata={"env": "FLASHGEN_CACHE", "help": "folder of rendered and compiled kernels"}
    )
    on_miss: str = field(
        default="default",
        metadata={
            "env": "FLASHGEN_ON_MISS",
            "help": "a call without a tuned record: " + " | ".join(MISS_POLICIES),
        },
    )
    check_values: str = field(
        default="0",
        metadata={
            "env": "FLASHGEN_CHECK",
            "help": "1: look at cu_seqlens on the GPU at every call, which waits for it",
        },
    )
    target: str = field(
        default="",
        metadata={
            "env": "FLASHGEN_TARGET",
            "help": "pretend to be this GPU (offline work): a name that --target lists",
        },
    )

    @classmethod
    def from_environment(cls) -> Settings:
        """Reads each field's variable; unset or empty means the default."""
        given = {f.name: os.environ.get(f.metadata["env"], "") for f in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value})

    def problems(self) -> dict[str, str]:
        """What is wrong, by environment variable; names of targets are judged where one is looked up."""
        found = {}
        if self.on_miss not in MISS_POLICIES:
            allowed = ", ".join(MISS_POLICIES)
            found["FLASHGEN_ON_MISS"] = f"{self.on_miss!r} is not a miss policy; allowed: {allowed}"
        if self.check_values not in ("0", "1"):
            found["FLASHGEN_CHECK"] = f"{self.check_values!r} must be 0 or 1"
        return found

    def check(self) -> None:
        """Asked by `flashgen.api` when it is imported, and by the command line before any command.

        Raises:
            InvalidArgument: a variable has a value that is not allowed.
        """
        for variable, problem in self.problems().items():
            raise InvalidArgument(f"{variable}={problem}. Correct it or unset it; flashgen doctor shows all")

    @staticmethod
    def variables() -> list[tuple[str, str]]:
        """(environment variable, one line of help) for every setting."""
        return [(f.metadata["env"], f.metadata["help"]) for f in fields(Settings)]

    def db_url(self, given: str | None = None) -> str:
        """Path or URL of the record database: the one given, else the setting, else the user's own.

        A path stays a path: in a URL a question mark or a percent sign would mean something else.

        Raises:
            InvalidArgument: the one given is empty, which would be a database in memory.
        """
        if given is not None and not given.strip():
            raise InvalidArgument(
                f"db={given!r} names no database; give a path or a URL, or leave it out for {self.db_url()}"
            )
        return given or self.db or str(_user_dir("data") / "tuning.db")

    def cache_dir(self) -> Path:
        """Where rendered sources and compiled kernels are kept; it may not exist or be writable."""
        return Path(self.cache).expanduser() if self.cache else _user_dir("cache")


def unwritable(folder: Path) -> str:
    """Why nothing can be made in a folder, which need not exist yet; empty where it can."""
    at = next(each for each in (folder, *folder.absolute().parents) if each.exists() or each.is_symlink())
    if not at.is_dir():
        return f"{at} is no folder"
    return "" if os.access(at, os.W_OK | os.X_OK) else f"{at} cannot be written"


def data_folder(name: str) -> Path:
    """The folder `templates` or `tuning_db`: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    shipped = package / f"_{name}"
    return shipped if shipped.is_dir() else package.parent / name


SETTINGS = Settings.from_environment()
