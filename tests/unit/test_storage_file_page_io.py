"""Pages of neighbouring slots, read, written and hashed: in C and in Python, alike."""

import ctypes
import os
import resource
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from stratakv.storage.file import page_io, segment
from stratakv.storage.file.page_io import SHORT, PageIo, PayloadPlaces, PythonPageIo
from stratakv.storage.header import PIECE_BYTES

compiled = pytest.importorskip("stratakv.storage.file.compiled_page_io", exc_type=ImportError)
SIZES = (1, 100, 4095, 4096, 5000, PIECE_BYTES, PIECE_BYTES + 3, 2 * PIECE_BYTES + 5000)
AT = 3 * 4096
"""Where the first slot begins: what stands before is another's."""
PLAIN = (
    "XXH3_64bits", "XXH3_createState", "XXH3_freeState", "XXH3_64bits_reset", "XXH3_64bits_update",
    "XXH3_64bits_digest",
)  # fmt: skip
"""What every build of xxhash shows."""
POISON = b"\xa5"


@pytest.fixture(params=["CompiledPageIo", "PythonPageIo"])
def io(request: pytest.FixtureRequest) -> PageIo:
    return PythonPageIo() if request.param == "PythonPageIo" else compiled.CompiledPageIo()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "slots", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def stride_of(page_bytes: int) -> int:
    return -(-page_bytes // 4096) * 4096


def slots_at(fd: int, page_bytes: int, places: Iterable[int]) -> PayloadPlaces:
    """``places``: by their number."""
    stride = stride_of(page_bytes)
    return PayloadPlaces(fd, stride, [AT + at * stride for at in places])


def pages(count: int, page_bytes: int) -> list[memoryview]:
    random = np.random.default_rng(count)
    return [memoryview(bytearray(random.bytes(page_bytes))) for _ in range(count)]


def blank(count: int, page_bytes: int) -> list[memoryview]:
    return [memoryview(bytearray(POISON * page_bytes)) for _ in range(count)]


def hashes(of: Sequence[memoryview]) -> list[int]:
    return [xxh3_64_intdigest(page) for page in of]


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("page_bytes", SIZES)
def test_each_page_is_in_its_slot_and_nowhere_else(
    io: PageIo, fd: int, page_bytes: int, scattered: bool
) -> None:
    stride, count = stride_of(page_bytes), 4 if page_bytes > 100_000 else 700
    places = list(range(1, count + 1))
    if scattered:
        places = [*places[count // 2 :: 2], *places[: count // 2], *places[count // 2 + 1 :: 2]]
    given = pages(count, page_bytes)
    os.pwrite(fd, POISON * (AT + (count + 2) * stride), 0)
    slots = slots_at(fd, page_bytes, places)
    assert io.write(slots, given) == (hashes(given), None)
    there = os.pread(fd, AT + (count + 2) * stride, 0)
    assert set(there[: AT + stride]) == set(there[-stride:]) == {POISON[0]}
    found = [there[AT + at * stride :][:stride] for at in places]
    assert found == [bytes(page).ljust(stride, b"\0") for page in given], "padded with zeros"
    into = blank(count, page_bytes)
    assert (io.read(slots, into), into) == (hashes(given), given)
    assert io.read(slots_at(fd, page_bytes, []), []) == []
    assert io.write(slots_at(fd, page_bytes, []), []) == ([], None)


@pytest.mark.parametrize("page_bytes", [5000, PIECE_BYTES, PIECE_BYTES + 3])
def test_a_page_that_the_file_ends_in_has_no_hash(io: PageIo, fd: int, page_bytes: int) -> None:
    stride, given = stride_of(page_bytes), pages(3, page_bytes)
    slots = slots_at(fd, page_bytes, range(3))
    io.write(slots, given)
    into = [memoryview(bytearray(page)) for page in given]  # what is missing is there by chance
    os.truncate(fd, AT + stride + page_bytes)
    assert io.read(slots, into) == [*hashes(given)[:2], SHORT], "nobody needs the padding"
    os.truncate(fd, AT + stride + page_bytes - 1)
    assert io.read(slots, into) == [hashes(given)[0], SHORT, SHORT]
    os.truncate(fd, AT)
    assert io.read(slots, into) == [SHORT] * 3


def test_what_the_system_refuses_is_an_error(io: PageIo, fd: int, tmp_path: Path) -> None:
    given = pages(2, 5000)
    reading, writing = (os.open(tmp_path / "slots", how) for how in (os.O_RDONLY, os.O_WRONLY))
    done, error = io.write(slots_at(reading, 5000, range(2)), given)
    assert (done, type(error)) == ([], OSError)
    assert error is not None
    assert "Bad file descriptor" in str(error)
    os.pwrite(fd, bytes(AT + 3 * 8192), 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        io.read(slots_at(writing, 5000, range(2)), given)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("page_bytes", "whole"), [(5000, 256), (PIECE_BYTES, 2), (PIECE_BYTES + 3, 1)]
)
def test_a_disk_that_is_full_says_what_is_there(
    io: PageIo, fd: int, page_bytes: int, whole: int
) -> None:
    """A limit cuts a write in the middle, and takes nothing after that."""
    stride = stride_of(page_bytes)
    given = pages(2 * whole + 3, page_bytes)
    limit = AT + (2 * whole + 1) * stride + page_bytes // 2
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        done, error = io.write(slots_at(fd, page_bytes, range(len(given))), given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(error, OSError)
    assert "File too large" in str(error)
    assert whole <= len(done) <= 2 * whole + 1
    assert done == hashes(given)[: len(done)]
    assert os.fstat(fd).st_size == limit, "cut in the middle"
    assert io.read(slots_at(fd, page_bytes, range(len(done))), blank(len(done), page_bytes)) == done


# -- in Python -----------------------------------------------------------------------------------


def halved(call: Callable[..., int]) -> Callable[..., int]:
    """A call on vectors that does only 1,000 bytes of each."""

    def some(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        return call(fd, [memoryview(buffers[0])[:1000]], at)

    return some


@pytest.mark.parametrize("page_bytes", [5000, 4096, PIECE_BYTES + 3])
def test_what_the_kernel_cuts_short_goes_on_where_it_was(
    fd: int, monkeypatch: pytest.MonkeyPatch, page_bytes: int
) -> None:
    io, given = PythonPageIo(), pages(3, page_bytes)
    slots = slots_at(fd, page_bytes, range(3))
    monkeypatch.setattr(os, "pwritev", halved(os.pwritev))
    put = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: put(fd, data[:300_000], at))
    assert io.write(slots, given) == (hashes(given), None)
    monkeypatch.undo()
    into = blank(3, page_bytes)
    assert (io.read(slots, into), into) == (hashes(given), given)
    monkeypatch.setattr(os, "preadv", halved(os.preadv))
    into = blank(3, page_bytes)
    assert (io.read(slots, into), into) == (hashes(given), given)


def test_a_disk_that_takes_nothing_is_an_error(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    done, error = PythonPageIo().write(slots_at(fd, 5000, [0]), pages(1, 5000))
    assert (done, str(error)) == ([], "[Errno 5] nothing was written")


def test_small_pages_go_together(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    write = os.pwritev

    def counted(fd: int, parts: Sequence[memoryview], at: int) -> int:
        calls.append(sum(map(len, parts)))
        return write(fd, parts, at)

    monkeypatch.setattr(os, "pwritev", counted)
    PythonPageIo().write(slots_at(fd, 5000, range(300)), pages(300, 5000))
    together = page_io.PIECE_BYTES // 8192
    assert calls == [n * 8192 for n in (together, together, 300 - 2 * together)]


# -- in C ----------------------------------------------------------------------------------------


class Shown(dict[str, Any]):
    """A library's names, as ctypes has them."""

    def __missing__(self, name: str) -> None:
        raise AttributeError(name)


def raw(name: str) -> Callable[..., Any]:
    from stratakv.storage.file import _page_io  # noqa: PLC0415 - not everywhere

    verbs = {
        "read": _page_io.read_pages,
        "write": _page_io.write_pages,
        "hash": _page_io.hash_pages,
    }
    return verbs[name]


@pytest.mark.parametrize("verb", ["read", "write"])
def test_the_interpreter_is_let_go_of(fd: int, verb: str) -> None:
    """In place of a hash: whether its thread has the interpreter."""
    os.pwrite(fd, bytes(AT), 0)
    holds = ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p).value
    _, *states = compiled.LIBRARY
    found, error = raw(verb)((holds, *states), fd, 4096, PIECE_BYTES, [0, 8192], blank(2, 4000))
    assert (found, error) == ([0, 0], 0)


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"stride": 4096}, ValueError),
        ({"stride": 3 * 4096}, ValueError),
        ({"stride": 0}, ValueError),
        ({"piece": 0}, ValueError),
        ({"pages": 7}, TypeError),
        ({"places": 7}, TypeError),
        ({"places": ["first"]}, TypeError),
        ({"places": [1 << 64]}, OverflowError),
        ({"places": [0, 8192]}, ValueError),
        ({"places": [0, 8192], "pages": [bytearray(5000), "text"]}, TypeError),
    ],
)
def test_what_makes_no_sense_is_refused_and_every_buffer_given_back(
    fd: int, verb: str, wrong: dict[str, Any], error: type[Exception]
) -> None:
    mine = bytearray(5000)
    call = {"stride": 8192, "piece": PIECE_BYTES, "places": [AT], "pages": [mine], **wrong}
    with pytest.raises(error):
        raw(verb)(compiled.LIBRARY, fd, *call.values())
    mine.append(0)  # a BufferError where somebody still has it
    os.truncate(fd, 0)
    raw(verb)(compiled.LIBRARY, fd, 8192, PIECE_BYTES, [0], [mine[:5000]])
    mine.append(0)


@pytest.mark.parametrize("verb", ["read", "write", "hash"])
def test_a_list_that_changes_meanwhile_is_used_as_it_was(fd: int, verb: str) -> None:
    places: list[Any] = []

    class Emptied:
        def __index__(self) -> int:
            places.clear()
            return 0

    places += [Emptied(), 4096]
    os.pwrite(fd, bytes(2 * 4096), 0)
    found, error = raw(verb)(compiled.LIBRARY, fd, 4096, PIECE_BYTES, places, blank(2, 4096))
    assert (len(found), error, places) == (2, 0, [])


def test_what_may_only_be_read_is_not_read_into(fd: int) -> None:
    with pytest.raises(BufferError, match="not writable"):
        compiled.CompiledPageIo().read(slots_at(fd, 8, [0]), [memoryview(b"constant")])


def test_without_the_helper_it_is_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(segment.PAGE_IO, compiled.CompiledPageIo)
    monkeypatch.setitem(sys.modules, "stratakv.storage.file.compiled_page_io", None)
    fresh = runpy.run_path(str(segment.__file__))
    assert isinstance(fresh["PAGE_IO"], PythonPageIo)
    assert "in Python" in caplog.text


def refuses(_: str) -> None:
    raise OSError("not a file")


def test_xxhash_s_code_is_used_where_it_is_found_and_hashes_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = ctypes.CDLL(str(import_module("xxhash._xxhash").__file__))
    plain = Shown({name: library[name] for name in PLAIN})
    monkeypatch.setattr(ctypes, "CDLL", lambda _: plain)
    fresh = runpy.run_path(compiled.__file__)
    page = memoryview(b"page")
    assert fresh["CompiledPageIo"] is not compiled.CompiledPageIo
    assert raw("hash")(fresh["LIBRARY"], -1, 4, 4, [0], [page]) == ([xxh3_64_intdigest(page)], 0)
    plain["XXH3_64bits"] = library["XXH64"]  # of the same shape, but for a seed
    with pytest.raises(ImportError, match="does not hash as xxhash does"):
        runpy.run_path(compiled.__file__)
    monkeypatch.setattr(ctypes, "CDLL", refuses)
    with pytest.raises(ImportError, match="no library that can be opened"):
        runpy.run_path(compiled.__file__)
    for name in PLAIN:
        without = Shown({other: found for other, found in plain.items() if other != name})
        monkeypatch.setattr(ctypes, "CDLL", lambda _, there=without: there)
        with pytest.raises(ImportError, match=f"xxhash shows no {name}"):
            runpy.run_path(compiled.__file__)
