"""Which variables are in a name, and what lies behind those of libraries and compilers."""

import errno
import os

import pytest

from stratakv.connect import whole_settings
from stratakv.connect.native_code import compiler_fields, host_compiler_fields
from stratakv.connect.whole_variables import variable_fields
from stratakv.core.errors import ConfigError


def variables(**environment):
    return variable_fields(environment, (), "VLLM_", ())


@pytest.mark.parametrize(
    "name",
    [
        "TRITON_DEFAULT_FP_FUSION", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
        "TORCH_BLAS_PREFER_CUBLASLT", "ROCBLAS_USE_HIPBLASLT", "HIPBLASLT_TENSILE_LIBPATH",
        "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG", "DG_JIT_USE_NVRTC", "FLASHINFER_CUDA_ARCH_LIST",
        "MIOPEN_USER_DB_PATH", "NCCL_ALGO", "OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY",
        "PYTORCH_TUNABLEOP_ENABLED", "TORCH_CUDA_ARCH_LIST", "FLA_TRIL_PRECISION",
        "FLA_USE_FAST_OPS", "USE_DEFAULT_FLA_NORM", "FORCE_NUM_KV_SPLITS", "FA_DISABLE_2CTA",
        "FLASH_ATTENTION_ARCH", "CUTE_DSL_ARCH", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE",
        "INKLING_SPLIT_KV", "HIP_ONLINE_TUNING", "HSA_OVERRIDE_GFX_VERSION", "ASCEND_USE_FA",
        "XPU_USE_TRITON_KERNEL", "CC", "CXX", "AMDGCN_USE_BUFFER_OPS", "DISABLE_PTXAS_OPT",
        "NVCC_APPEND_FLAGS", "CUDACXX", "COMPILER_PATH", "GCC_EXEC_PREFIX", "PYTORCH_NVCC",
        "TORCH_CUDNN_USE_HEURISTIC_MODE_B",
        "TORCH_LINALG_PREFER_CUSOLVER", "TORCH_MKLDNN_MATMUL_MIN_DIM", "USE_TRITON_W8A8_FP8_KERNEL",
        "LAMPORT_RS_SCONV", "XHS_VIDEO_JPEG_QUALITY", "VIDEO_MAX_PIXELS", "USE_HUB_KERNELS",
        "USE_FLAGOS", "OMP_THREAD_LIMIT", "OPENBLAS_CORETYPE", "GLIBC_TUNABLES",
        "CUTEDSL_ENABLE_AUTOTUNING", "ENABLE_PERSISTENT_TMA_MATMUL", "CUTLASS_EPILOGUE_FUSION",
    ],
)  # fmt: skip
def test_variables_that_choose_algorithms_are_in_a_name(name):
    assert variables(**{name: "x:1"}) == {name: "x:1"}


@pytest.mark.parametrize(
    "name",
    [
        "AITER_JIT_DIR", "MIOPEN_CUSTOM_CACHE_DIR", "MIOPEN_CACHE_DIR", "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR", "DG_JIT_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TORCH_HOME",
        "TORCH_EXTENSIONS_DIR", "TVM_FFI_CACHE_DIR",
    ],
)  # fmt: skip
def test_caches_of_compiled_code_are_in_no_name(tmp_path, monkeypatch, name):
    monkeypatch.setattr(whole_settings, "MOST_FILES", 0)
    (tmp_path / "kernel.so").touch()
    assert variables(**{name: str(tmp_path)}) == {}


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_COMM_ID", "NCCL_HOSTID", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE",
        "NCCL_SOCKET_IFNAME", "RCCL_COMM_ID", "RCCL_TOPO_DUMP_FILE",
    ],
)  # fmt: skip
def test_how_ranks_meet_and_what_they_dump_is_in_no_name(name):
    assert variables(**{name: "10.0.0.1:1234"}) == {}


def test_compilers_of_a_toolkit_are_in_a_name_and_not_the_rest_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_settings, "MOST_FILES", 0)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("one")
    first = variables(CUDA_HOME=str(tmp_path))
    assert first["CUDA_HOME"].startswith(str(tmp_path))
    (tmp_path / "bin" / "other").touch()
    assert variables(CUDA_HOME=str(tmp_path)) == first
    (tmp_path / "bin" / "nvcc").write_text("two")
    assert variables(CUDA_HOME=str(tmp_path)) != first


def toolkit(path):
    """Compilers, and a directory of programs with a link to one of them."""
    for one in ("toolkit/bin/nvcc", "toolkit/bin/ptxas", "toolkit/nvvm/bin/cicc"):
        (path / one).parent.mkdir(parents=True, exist_ok=True)
        (path / one).write_text(one)
        (path / one).chmod(0o755)
    (path / "bin").mkdir()
    (path / "bin" / "nvcc").symlink_to(path / "toolkit" / "bin" / "nvcc")
    return path / "toolkit"


@pytest.mark.parametrize("compiler", ["bin/nvcc", "bin/ptxas", "nvvm/bin/cicc"])
@pytest.mark.parametrize("found_by", ["path", "usual"])
def test_without_a_variable_the_compilers_that_are_found_are_in_a_name(
    tmp_path, compiler, found_by
):
    place = toolkit(tmp_path)
    path, usual = {"path": (tmp_path / "bin", "/nowhere"), "usual": ("/nowhere", place)}[found_by]

    def found():
        return compiler_fields({"PATH": str(path), "CUDA_HOME": ""}, str(usual))

    first = found()
    assert found() == first != {}
    (place / compiler).write_text("another")
    assert found() != first


def test_a_script_in_the_path_does_not_hide_the_usual_compilers(tmp_path):
    place = toolkit(tmp_path)
    (tmp_path / "bin" / "nvcc").unlink()
    (tmp_path / "bin" / "nvcc").write_text("exec nvcc")
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    first = compiler_fields({"PATH": str(tmp_path / "bin")}, str(place))
    (place / "nvvm" / "bin" / "cicc").write_text("another")
    assert compiler_fields({"PATH": str(tmp_path / "bin")}, str(place)) != first


def test_a_variable_says_it_all_and_no_compilers_are_no_field(tmp_path):
    place = toolkit(tmp_path)
    assert compiler_fields({"PATH": str(tmp_path / "bin"), "CUDA_PATH": "/x"}, str(place)) == {}
    assert compiler_fields({"PATH": "/nowhere"}, "/nowhere") == {}


def gcc(place):
    """Programs in ``bin``, and what they call beside it."""
    for one in ("bin/g++-12", "lib/gcc/x86_64-linux-gnu/12/cc1plus", "libexec/gcc/x/12/cc1"):
        (place / one).parent.mkdir(parents=True, exist_ok=True)
        (place / one).write_text(one)
        (place / one).chmod(0o755)
    (place / "bin" / "g++").symlink_to("g++-12")
    return place


@pytest.mark.parametrize(
    "one", ["bin/g++-12", "lib/gcc/x86_64-linux-gnu/12/cc1plus", "libexec/gcc/x/12/cc1"]
)
@pytest.mark.parametrize("found_by", ["path", "behind another", "CXX", "CXX by name"])
def test_a_compiler_for_processors_is_in_a_name_by_every_byte(tmp_path, one, found_by):
    """Inductor makes kernels by the ``g++`` of the path where nobody names another."""
    place = gcc(tmp_path / "gcc")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "g++").write_text("exec ccache g++")
    (tmp_path / "first" / "g++").chmod(0o755)
    around = {
        "path": {"PATH": f"{place}/bin"},
        "behind another": {"PATH": f"{tmp_path}/first:{place}/bin"},
        "CXX": {"PATH": "/nowhere", "CXX": f"ccache {place}/bin/g++-12"},
        "CXX by name": {"PATH": f"{place}/bin", "CXX": "g++-12"},
    }[found_by]
    first = host_compiler_fields(around)
    assert host_compiler_fields(around) == first != {}
    (place / "bin" / "other").write_text("is no compiler")
    assert host_compiler_fields(around) == first
    (place / one).write_text("another")
    assert host_compiler_fields(around) != first


def test_compilers_are_the_same_in_another_place_and_none_are_no_field(tmp_path):
    first, second = (gcc(tmp_path / name) for name in ("a", "b"))
    found = [host_compiler_fields({"PATH": f"{place}/bin"}) for place in (first, second)]
    assert found[0] == found[1]
    assert host_compiler_fields({"PATH": "/nowhere", "CC": "gcc"}) == {}


@pytest.fixture
def libraries(tmp_path):
    """Two directories; in the first a library of three names, one for better processors, and
    what is no library."""
    for at in ("first", "second", "first/below", "first/glibc-hwcaps/x86-64-v3"):
        (tmp_path / at).mkdir(parents=True)
        (tmp_path / at / "libm.so.6.1").write_text(at)
    (tmp_path / "first" / "libm.so.6").symlink_to("libm.so.6.1")
    (tmp_path / "first" / "libm.so").symlink_to("libm.so.6")
    (tmp_path / "first" / "gone.so").symlink_to("nowhere")
    (tmp_path / "first" / "a.so").mkdir()
    (tmp_path / "first" / "notes.txt").touch()
    return tmp_path


def exchange(path):
    """For other bytes of the same size, and the same times."""
    status = path.stat()
    path.write_text(path.read_text()[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


LISTED = ["{0}/first", "{0}/first:{0}/second", "{0}/second;{0}/first", "/nowhere::{0}/first:"]


@pytest.mark.parametrize("value", LISTED)
@pytest.mark.parametrize("name", ["LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"])
@pytest.mark.parametrize("which", ["libm.so.6.1", "glibc-hwcaps/x86-64-v3/libm.so.6.1"])
def test_a_library_that_is_exchanged_in_place_is_another_name(libraries, name, value, which):
    given = {name: value.format(libraries)}
    first = variables(**given)
    assert variables(**given) == first
    exchange(libraries / "first" / which)
    assert variables(**given) != first


def test_only_libraries_where_the_linker_looks_are_in_a_name(libraries, monkeypatch):
    monkeypatch.setattr(whole_settings, "MOST_FILES", 0)
    given = {"LD_LIBRARY_PATH": f"{libraries}/first:{libraries}/second"}
    first = variables(**given)
    (libraries / "first" / "notes.txt").write_text("longer")
    (libraries / "first" / "lib.sox").touch()
    exchange(libraries / "first" / "below" / "libm.so.6.1")
    os.utime(libraries / "first" / "libm.so.6.1", ns=(1, 1))
    assert variables(**given) == first
    (libraries / "second" / "libnew.so").touch()
    assert variables(**given) != first


def test_libraries_are_the_same_on_another_machine(libraries, tmp_path_factory):
    """Whose times and inodes are others."""
    value, other = libraries / "second", tmp_path_factory.mktemp("other")
    (first,) = variables(LD_LIBRARY_PATH=str(value)).values()
    (other / "libm.so.6.1").write_text("second")
    (second,) = variables(LD_LIBRARY_PATH=str(other)).values()
    assert first.removeprefix(str(value)) == second.removeprefix(str(other))


def test_an_empty_entry_is_the_working_directory_and_an_empty_list_is_none(libraries, monkeypatch):
    monkeypatch.chdir(libraries / "first")
    first, empty = variables(LD_LIBRARY_PATH=":/x"), variables(LD_LIBRARY_PATH="")
    exchange(libraries / "first" / "libm.so.6.1")
    assert variables(LD_LIBRARY_PATH=":/x") != first
    assert variables(LD_LIBRARY_PATH="") == empty == {"LD_LIBRARY_PATH": ""}


def test_the_order_of_directories_counts(libraries):
    one, two = f"{libraries}/first", f"{libraries}/second"
    assert variables(LD_LIBRARY_PATH=f"{one}:{two}") != variables(LD_LIBRARY_PATH=f"{two}:{one}")


def test_a_directory_of_libraries_that_cannot_be_read_is_refused(libraries, monkeypatch):
    def failing(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(os, "listdir", failing)
    with pytest.raises(ConfigError, match=r"LD_LIBRARY_PATH .*second: cannot be read.*allowed is"):
        variables(LD_LIBRARY_PATH=f"/nowhere:{libraries}/second")


@pytest.mark.parametrize("name", ["LD_PRELOAD", "DYLD_INSERT_LIBRARIES"])
@pytest.mark.parametrize("value", ["{0}", "libm.so {0}", "libm.so:{0}", " {0}:/nowhere"])
def test_a_library_that_is_loaded_before_all_others_is_in_a_name(libraries, name, value):
    given = {name: value.format(libraries / "second" / "libm.so.6.1")}
    first = variables(**given)
    assert variables(**given) == first
    exchange(libraries / "second" / "libm.so.6.1")
    assert variables(**given) != first
