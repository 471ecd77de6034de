"""Compiled kernels on disk: compiled once per machine, by one process, and never the cause of a failure."""

from __future__ import annotations

import ast
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import uuid
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING

import numba
import numpy as np
import pytest

from flexcomm.kernels.cpu import cache, compiler
from flexcomm.kernels.cpu.cache import CACHE_VARIABLE, Entry, cache_folders

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

KERNEL = """
import numba
from flexcomm.kernels.cpu.cache import share

@numba.njit
def add_up(x, factor):
    total = 0.0
    for i in range(x.size):
        total += factor * x[i]
    return total

share(add_up, "digest of the sources")
"""
COMPILING = "compiling kernel add_up"
CONTEXT = multiprocessing.get_context("forkserver")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of our own; nothing was said yet, and nothing is in the folder for temporary files."""
    cache.warn_once.cache_clear()
    # What takes seconds to import is imported once for all processes, by a server that is started before the folder for
    # temporary files changes: the name of the new one is too long for its socket.
    CONTEXT.set_forkserver_preload(["flexcomm.kernels.cpu.compiler", __name__])
    ensure_running()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@dataclass(frozen=True)
class Use:
    """A process that calls the toy kernel, whose source is in a folder of its own."""

    sources: Path
    output: Path
    process: ForkServerProcess

    def finish(self) -> str:
        self.process.join(60)
        output = self.output.read_text()
        assert self.process.exitcode == 0, output
        assert "answer 8.0" in output
        return output


def start(sources: Path, kernel: str = KERNEL, before: str = "", **environment: str) -> Use:
    sources.mkdir(exist_ok=True)
    written = sources / f"{uuid.uuid4().hex}.tmp"
    written.write_text(kernel)
    written.replace(sources / "toy.py")  # At once: a process that was started before may be importing it.
    output = sources / f"{uuid.uuid4().hex}.txt"
    environment = {CACHE_VARIABLE: os.environ[CACHE_VARIABLE], "TMPDIR": tempfile.gettempdir(), **environment}
    process = CONTEXT.Process(target=use_toy, args=(sources, output, before, environment))
    process.start()
    return Use(sources, output, process)


def use_toy(sources: Path, output: Path, before: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    tempfile.tempdir = environment["TMPDIR"]
    numba.config.reload_config()
    sys.path.insert(0, str(sources))
    with output.open("w") as stream:
        logging.basicConfig(level=logging.INFO, stream=stream, format="%(message)s")
        exec(before)  # noqa: S102
        toy = import_module("toy")
        print("answer", toy.add_up(np.ones(4), 2.0), file=stream)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_a_second_checkout_finds_what_the_first_compiled(folder: Path, tmp_path: Path) -> None:
    assert COMPILING in start(tmp_path / "one").finish()
    assert len(files_of(folder)) == 1
    assert COMPILING not in start(tmp_path / "two").finish()
    assert len(files_of(folder)) == 1


def test_of_two_processes_at_once_one_compiles(folder: Path, tmp_path: Path) -> None:
    outputs = [use.finish() for use in [start(tmp_path / "one") for _ in range(3)]]
    assert sum(output.count(COMPILING) for output in outputs) == 1
    assert len(files_of(folder)) == 1


@pytest.mark.usefixtures("folder")
def test_what_another_process_compiles_is_waited_for_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(row: object, job: object) -> int:  # noqa: ARG001  (a loop takes two pointers)
        return 0

    called: list[object] = []
    monkeypatch.setattr(compiler, "address_of", called.append)
    kernels = [compiler.cached_kernel(FunctionType(work.__code__, {}, name)) for name in ("first", "second")]
    first, second = kernels
    with first._cache.entry_of(compiler.LOOP).compiling():
        compiler.compile_loops(kernels)
    assert called == [second, first, second]


def test_a_damaged_file_is_compiled_again(folder: Path, tmp_path: Path) -> None:
    start(tmp_path / "one").finish()
    (file,) = files_of(folder)
    whole = file.read_bytes()
    for damaged in (b"", b"garbage", whole[: len(whole) // 2]):
        file.write_bytes(damaged)
        assert COMPILING in start(tmp_path / "one").finish()
        assert len(file.read_bytes()) == len(whole)
    assert COMPILING not in start(tmp_path / "one").finish()


def test_other_sources_and_other_flags_are_other_entries(folder: Path, tmp_path: Path) -> None:
    start(tmp_path / "one").finish()
    assert COMPILING in start(tmp_path / "one", kernel=KERNEL.replace("digest", "another digest")).finish()
    assert COMPILING in start(tmp_path / "one", NUMBA_BOUNDSCHECK="1").finish()
    assert COMPILING in start(tmp_path / "one", NUMBA_OPT="1").finish()
    assert len(files_of(folder)) == 4


def test_a_killed_compiler_leaves_nothing_broken(folder: Path, tmp_path: Path) -> None:
    die = """
from flexcomm.kernels.cpu import cache
def die(path, content):
    path.with_name(path.name + ".half.tmp").write_bytes(content[:100])
    os.kill(os.getpid(), signal.SIGKILL)
cache._replace = die
"""
    killed = start(tmp_path / "one", before=die).process
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    assert len(files_of(folder)) == 1, "the half-written file"
    assert COMPILING in start(tmp_path / "one").finish()
    assert len(files_of(folder)) == 1, "the whole one, and nothing else"


@pytest.mark.usefixtures("folder")
def test_who_waits_says_for_whom_and_how_long(caplog: pytest.LogCaptureFixture) -> None:
    entry, inside, go_on = Entry("k", "key/k"), threading.Event(), threading.Event()

    def compile_slowly() -> None:
        with entry.compiling():
            inside.set()
            go_on.wait(10)
            entry.write(b"code")

    caplog.set_level(logging.INFO, "flexcomm")
    thread = threading.Thread(target=compile_slowly)
    thread.start()
    inside.wait(10)
    releasing = threading.Timer(0.1, go_on.set)
    releasing.start()
    with entry.compiling():
        assert entry.read() == b"code"
    thread.join()
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "compiling kernel k"
    assert said[1].startswith(f"waiting for kernel k, which process {os.getpid()} on ")
    assert any(line.startswith("waited ") for line in said)
    assert said.count("compiling kernel k") == 1


@pytest.mark.usefixtures("folder")
def test_waiting_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cache, "_LONGEST_WAIT_S", 0.03)
    entry = Entry("k", "key/k")
    caplog.set_level(logging.INFO, "flexcomm")
    with entry.compiling(), entry.compiling():
        entry.write(b"code")
    assert " s for kernel k, which process" in caplog.text
    assert caplog.text.count("compiling kernel k") == 2
    assert entry.read() == b"code"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("errno", [95, 37])
def test_a_file_system_without_locks_works(
    errno: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_file: object, _how: int) -> None:
        raise OSError(errno, os.strerror(errno))

    monkeypatch.setattr(cache.fcntl, "flock", refuse)
    for name in ("key/a", "key/b"):
        entry = Entry("k", name)
        with entry.compiling():
            entry.write(b"code")
        assert entry.read() == b"code"
    assert caplog.text.count("cannot be locked") == 1


def test_a_folder_that_cannot_be_written_is_read_and_the_temporary_one_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, new = Entry("k", "key/there"), Entry("k", "key/new")
    there.write(b"code")
    replace = cache._replace

    def refuse(path: Path, content: bytes) -> None:
        if path.is_relative_to(folder):
            raise OSError(30, os.strerror(30))
        replace(path, content)

    monkeypatch.setattr(cache, "_replace", refuse)
    new.write(b"other code")
    assert (there.read(), new.read()) == (b"code", b"other code")
    assert [path.name for path in files_of(folder)] == ["there"]


@pytest.mark.usefixtures("folder")
def test_kernels_work_where_no_folder_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "cache")
    (Path(tempfile.gettempdir()) / f"flexcomm-{os.getuid()}").touch()
    output = start(tmp_path / "one", **{CACHE_VARIABLE: nowhere}).finish()
    assert output.count("compiled kernels cannot be kept") == 1


def test_a_full_disk_is_said_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fill(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:5])
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_bytes", fill)
    for name in ("key/a", "key/b"):
        with Entry("k", name).compiling():
            Entry("k", name).write(b"code")
    assert files_of(folder) == []
    assert caplog.text.count("No space left on device") == 2, "one line, with both folders"


def test_a_temporary_folder_of_somebody_else_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    temporary = Path(tempfile.gettempdir()) / f"flexcomm-{os.getuid()}"
    assert [*cache_folders()] == [folder]
    temporary.mkdir(mode=0o700)
    assert [*cache_folders()] == [folder, temporary]
    temporary.chmod(0o777)
    assert [*cache_folders()] == [folder]
    temporary.rmdir()
    temporary.symlink_to(folder.parent)
    assert [*cache_folders()] == [folder]
    temporary.unlink()
    temporary.mkdir(mode=0o700)
    other_user = os.getuid() + 1
    temporary.rename(temporary.with_name(f"flexcomm-{other_user}"))
    monkeypatch.setattr(os, "getuid", lambda: other_user)
    assert [*cache_folders()] == [folder]
    assert "others can write there" in caplog.text


def test_nothing_is_left_in_the_folder_for_temporary_files_if_it_is_not_needed(folder: Path) -> None:
    entry = Entry("k", "key/k")
    with entry.compiling():
        entry.write(b"code")
    assert entry.read() == b"code"
    assert [path.name for path in files_of(folder)] == ["k"]
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


def test_the_digest_covers_all_sources_that_are_compiled() -> None:
    """What modules with compiled functions import of the library is compiled, too: functions and constants."""
    kernels = Path(compiler.__file__).parents[1]
    covered = {path.relative_to(kernels) for path in compiler.list_sources()}
    compiling = [path for path in covered if imports_of(kernels / path) & {Path("cpu/compiler.py")}]
    assert len(compiling) == 10
    assert set().union(*(imports_of(kernels / path) for path in compiling)) <= covered


def imports_of(source: Path) -> set[Path]:
    """Which modules of flexcomm.kernels a module imports, seen from there."""
    prefix = "flexcomm.kernels."
    modules = []
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            is_package = node.module == "flexcomm.kernels.cpu"
            modules += [f"{node.module}.{name.name}" for name in node.names] if is_package else [node.module]
    return {Path(f"{name.removeprefix(prefix).replace('.', '/')}.py") for name in modules if name.startswith(prefix)}


@pytest.mark.usefixtures("folder")
def test_the_users_cache_folder_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert next(cache_folders()) == tmp_path / ".cache" / "flexcomm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert next(cache_folders()) == tmp_path / "xdg" / "flexcomm"


def test_a_numba_without_the_names_we_need_compiles_uncached(caplog: pytest.LogCaptureFixture) -> None:
    cache.warn_once.cache_clear()
    dispatcher = SimpleNamespace(compile=None)
    cache.share(dispatcher, "sources")
    assert "no _cache, overloads, py_func" in caplog.text
    assert dispatcher.compile is None
