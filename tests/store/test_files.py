"""Writing where the user says: a regular file is replaced, and nothing else is destroyed."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import sample_records as make

from flashgen.cli import bench
from flashgen.errors import InvalidArgument
from flashgen.store import transfer
from flashgen.store.files import replaceable, write_file

WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: write_file(path, "{}\n"),
    "records": lambda path: transfer.export_file([make.record()], path),
    "benchmark": lambda path: bench._write(path, {"header": {}, "rows": []}),
}


@pytest.fixture(params=list(WRITERS))
def write(request: pytest.FixtureRequest) -> Callable[[Path], object]:
    return WRITERS[request.param]


def test_a_new_file_is_written_with_its_folder(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path / "deep" / "out")
    assert (tmp_path / "deep" / "out").read_text()
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["out"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "deep" / "out").stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(tmp_path: Path, write: Callable[[Path], object], there: bool) -> None:
    (tmp_path / "data").mkdir()
    real, link, second = tmp_path / "data" / "real", tmp_path / "link", tmp_path / "second"
    link.symlink_to(Path("data", "real"))
    second.symlink_to(link)
    if there:
        real.write_text("old")
        real.chmod(0o600)
    write(second)
    assert (second.readlink(), link.readlink()) == (link, Path("data", "real"))
    assert real.read_text() not in ("", "old")
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["data", "link", "real", "second"]
    assert not there or stat.S_IMODE(real.stat().st_mode) == 0o600


def test_a_pipe_is_written_into(tmp_path: Path, write: Callable[[Path], object]) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        got: list[str] = []
        reader = threading.Thread(target=lambda got=got: got.append(pipe.read_text()), daemon=True)
        reader.start()
        write(path)
        assert pipe.is_fifo() and link.is_symlink()
        reader.join(60)
        assert got and got[0]


def test_a_device_is_written_into(tmp_path: Path, write: Callable[[Path], object]) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        device.write_text("")
    except OSError:
        pytest.skip("devices cannot be made here")
    write(device)
    assert device.is_char_device()
    assert [each.name for each in tmp_path.iterdir()] == ["null"]


def test_what_cannot_be_written_stays(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (tmp_path, loop, tmp_path / "a\0b"):
        with pytest.raises(OSError):
            write_file(path, "text")
    assert list(tmp_path.iterdir()) == [loop] and loop.is_symlink()


def test_a_file_without_a_name_is_written_into(tmp_path: Path) -> None:
    """As /dev/stdout leads to one that was deleted."""
    with (tmp_path / "gone").open("w+") as file:
        (tmp_path / "gone").unlink()
        held = Path(f"/proc/self/fd/{file.fileno()}")
        if not held.exists():
            pytest.skip("no /proc")
        assert not replaceable(held)
        write_file(held, "text")
        assert file.read() == "text"
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_no_file_to_merge_with(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgument, match="is no regular file, which --merge could read"):
        bench._read(tmp_path / "pipe", {"gpu": "x"})
