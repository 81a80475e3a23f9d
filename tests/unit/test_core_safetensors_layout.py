"""The layout of a safetensors file: what safetensors itself says, or a refusal, never a crash."""

import json
import os
import sys

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from stratakv.core.identity.file_stat import open_file
from stratakv.core.identity.safetensors_layout import read_layout


def layout(path):
    fd = open_file(path)
    try:
        return read_layout(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def stored(path, header, data=bytes(16)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin, end, dtype="F32", shape=None):
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_tensor_lies_where_safetensors_finds_it(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = {
        "b.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "a": np.arange(5, dtype=np.int16),
        "none": np.zeros((0, 3), np.float32),
        "one": np.array(7, np.uint8),
    }
    save_file(tensors, path, {"format": "pt"})
    found = layout(path)
    assert found.metadata == {"format": "pt"}
    data = path.read_bytes()
    with safe_open(path, "np") as oracle:
        assert {tensor.name for tensor in found.tensors} == set(oracle.keys())
        for tensor in found.tensors:
            wanted = oracle.get_tensor(tensor.name)
            assert tensor.shape == wanted.shape
            assert data[tensor.begin : tensor.end] == wanted.tobytes()
    ends = [(tensor.begin, tensor.end) for tensor in found.tensors]
    assert [begin for begin, _ in ends[1:]] == [end for _, end in ends[:-1]]
    assert ends[-1][1] == len(data)


WHOLE = {"a": entry(0, 8), "b": entry(8, 16)}


@pytest.mark.parametrize("dtype", ["I4", "F4x2", "", None, 7])
def test_what_has_no_size_is_refused(tmp_path, dtype):
    path = stored(tmp_path / "x", WHOLE | {"b": entry(8, 16, dtype)})
    with pytest.raises(ValueError, match="b "):
        layout(path)


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(0, 8), "b": entry(4, 12)},  # overlapping
        {"a": entry(0, 8), "b": entry(12, 16)},  # a hole
        {"a": entry(4, 8), "b": entry(8, 16)},  # bytes before the first
        {"a": entry(0, 8)},  # bytes after the last
        {"a": entry(0, 8), "b": entry(8, 20)},  # past the end
        {"a": entry(0, 8), "b": entry(8, 16), "c": entry(16, 1 << 62)},
        {"a": entry(0, 16), "b": entry(16, 8)},  # backwards
        {"a": entry(0, 8, shape=[3]), "b": entry(8, 16)},
        {"a": entry(0, 8, shape=[2**40, 2**40]), "b": entry(8, 16)},
        {"a": entry(0, 8, shape=[-1, -2]), "b": entry(8, 16)},
        {"a": entry(0, 8, shape=[2.0]), "b": entry(8, 16)},
        {"a": entry(0, 8, shape=[True, 2]), "b": entry(8, 16)},
        {"a": {"dtype": "F32", "shape": [2]}, "b": entry(8, 16)},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, "16"]}},
        {"a": None},
        {"__metadata__": {"format": 1}, **WHOLE},
        {"__metadata__": [], **WHOLE},
        [],
        7,
        b"",
        b"no JSON.",
        b'{"a": ' * 100_000,
        b"[" * 100_000,
        b'{"a": 1' + b"1" * 5000 + b"}",
        b"\xff\xfe{}",
        json.dumps(WHOLE).replace('"b"', '"a"').encode(),
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_is_refused_as_safetensors_does(tmp_path, header):
    path = stored(tmp_path / "bad.safetensors", header)
    with pytest.raises(ValueError, match=r"."):
        layout(path)
    # No oracle: true counts as 1 there, and the last of two names.
    if isinstance(header, dict) and header.get("a") == entry(0, 8, shape=[True, 2]):
        return
    with pytest.raises((SafetensorError, ValueError)):
        safe_open(path, "np").__enter__()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        b"\x00" * 8,
        b"\xff" * 8,
        b"\xff" * 100,
        (1 << 40).to_bytes(8, "little") + bytes(100),
        (101).to_bytes(8, "little") + bytes(100),
    ],
)
def test_a_length_that_is_none_is_refused_without_reading_so_much(tmp_path, data):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"."):
        layout(path)


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": np.arange(4, dtype=np.float32), "b": np.zeros(3, np.int8)}, path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"."):
            layout(path)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_a_pipe_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "model.safetensors"
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(ValueError, match="no regular file"):
        open_file(path)
