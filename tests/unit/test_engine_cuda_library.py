"""Calls of the driver's library, over one of our own that has their forms and copies at once."""

import shutil
import subprocess

import numpy as np
import pytest

from stratakv.core.ids import GroupId
from stratakv.engine.cuda.library import CudaLibrary
from stratakv.transfer.streams import Moves

BODY = r"""
#include <stddef.h>
#include <stdint.h>
#include <string.h>
static void *context;
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *out, int index) { *out = 40 + index; return 0; }
int cuDevicePrimaryCtxRetain(void **out, int device) {
  *out = (void *)(intptr_t)(60 + device);
  return 0;
}
int cuCtxSetCurrent(void *given) { context = given; return 0; }
int cuDeviceGetPCIBusId(char *out, int size, int device) {
  if (size < 13 || device != 43) return 1;
  strcpy(out, "0000:3B:00.0");
  return 0;
}
static int copied(uint64_t *to, uint64_t *from, size_t *sizes, size_t n, int *order, size_t *at,
                  size_t count, void *stream) {
  if (context != (void *)103 || stream != (void *)7) return 2;
  if (order[0] != 1 || at[0] || count != 1) return 2;
  for (int i = 1; i < 6; i++) if (order[i]) return 3;
  for (size_t i = 0; i < n; i++) memcpy((void *)to[i], (void *)from[i], sizes[i]);
  return 0;
}
"""
FORMS = {
    "CUDA 13": """int cuMemcpyBatchAsync_v2(uint64_t *t, uint64_t *f, size_t *s, size_t n, int *o,
      size_t *a, size_t c, void *stream) { return copied(t, f, s, n, o, a, c, stream); }""",
    "CUDA 12.8": """int cuMemcpyBatchAsync(uint64_t *t, uint64_t *f, size_t *s, size_t n, int *o,
      size_t *a, size_t c, size_t *failed, void *stream) {
      *failed = 0; return copied(t, f, s, n, o, a, c, stream); }""",
    "older": """int cuMemcpyAsync(uint64_t t, uint64_t f, size_t s, void *stream) {
      int order[6] = {1}; size_t at = 0;
      return copied(&t, &f, &s, 1, order, &at, 1, stream); }""",
}
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(params=FORMS)
def library(request, tmp_path):
    source, built = tmp_path / "cuda.c", tmp_path / "libcuda.so"
    source.write_text(BODY + FORMS[request.param])
    command = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unused-function"]
    subprocess.run([*command, "-o", built, source], check=True)
    return CudaLibrary(3, str(built))


def moves(sizes):
    source, target = np.arange(4096, dtype=np.uint8), np.zeros(4096, np.uint8)
    at = np.arange(len(sizes)) * 64
    ends = target.ctypes.data + at[::-1], source.ctypes.data + at
    wanted = np.zeros(4096, np.uint8)
    for to, begin, size in zip(at[::-1], at, sizes, strict=True):
        wanted[to : to + size] = source[begin : begin + size]
    return Moves(GroupId(0), frozenset(), *ends, np.array(sizes)), target, wanted, source


def test_a_batch_of_copies_by_each_form_of_the_call(library):
    batch, target, wanted, source = moves([16, 64, 3, 0, 50])
    library.copy(batch, 7)
    assert np.array_equal(target, wanted)
    assert len(source) == len(target)


def test_what_the_driver_refuses_raises(library):
    batch, target, _, _ = moves([16])
    with pytest.raises(RuntimeError, match=r"^cuMemcpy\w*Async\w*: CUDA driver error 2$"):
        library.copy(batch, 8)
    assert not target.any()


def test_a_gpu_has_a_place(library):
    assert library.pci() == "0000:3b:00.0"


def test_no_driver_no_library():
    with pytest.raises(OSError, match="nowhere"):
        CudaLibrary(0, "nowhere.so")
