"""Variables that another engine computes with, as fields of a name.

Owns which count: all of the engine's, and those of the libraries below it that choose how to
compute. Must not know an engine's names; how one becomes text is ``whole_settings``, and what
libraries and compilers are found by it, ``native_code``.
"""

from collections.abc import Collection, Mapping
from typing import Final

from stratakv.connect.native_code import CHOSEN, LIBRARY_PATHS, PRELOADED, TOOLKITS, native_field
from stratakv.connect.whole_settings import setting_fields

ARITHMETIC: Final = (
    "AITER_", "AMDGCN_", "ASCEND_USE_", "ATEN_", "BIAS_PREP_ONLY", "BLIS_", "CK_MOE",
    "COMPILER_PATH", "CPATH", "CPLUS_INCLUDE_PATH", "CUBLAS", "CUDACXX", "CUDNN_", "CUTE",
    "CUTLASS_", "CU_NUM", "C_INCLUDE_PATH", "DG_", "DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT",
    "DNNL_", "ENABLE_PERSISTENT_TMA_", "ENABLE_TEMPLATE_", "ENABLE_TMA_", "FA_", "FLASHINFER_",
    "FLASH_ATTENTION_", "FLA_", "FORCE_NUM_KV_SPLITS", "GCC_EXEC_PREFIX", "GDN_",
    "GLIBC_TUNABLES", "GPU_ARCHS", "HCCL_DETERMINISTIC", "HIPBLASLT_", "HIP_ONLINE_TUNING",
    "HSA_OVERRIDE_GFX_VERSION", "INKLING_", "KMP_DETERMINISTIC_REDUCTION",
    "KMP_FORCE_REDUCTION", "LAMPORT_", "MINIMAX_", "MIOPEN_", "MKL_", "NCCL_", "NPU_FA2_",
    "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "NVIDIA_TF32_OVERRIDE", "OMP_", "ONEDNN_",
    "OPENBLAS_", "PYTORCH_", "QUACK_ARCH", "RCCL_", "ROCBLAS_", "ROCM_QUICK_REDUCE_",
    "TENSORIFY_", "TILELANG_", "TIMM_FUSED_ATTN", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_",
    "TRANSFORMERS_DISABLE_", "TRITON_", "TRTLLM_", "TVM_", "USE_DEFAULT_FLA_NORM", "USE_FLAGOS",
    "USE_HUB_KERNELS", "USE_TRITON_", "VIDEO_MAX_PIXELS", "XHS_VIDEO_", "XLA_",
    "XPU_USE_TRITON_KERNEL",
)  # fmt: skip
"""Beginnings of variables by which libraries below the engines choose how to compute, and models of
theirs what they see of a video. All of torch's, which has hundreds, and other ones next year."""
CACHES: Final = frozenset({
    "AITER_JIT_DIR", "CUTE_DSL_CACHE_DIR", "TORCHDYNAMO_VERBOSE", "TORCH_COMPILE_DEBUG",
    "TORCH_COMPILE_DEBUG_DIR", "CUBLASLT_LOG_FILE", "CUBLASLT_LOG_LEVEL", "CUBLAS_LOGDEST_DBG",
    "CUBLAS_LOGINFO_DBG", "DG_JIT_CACHE_DIR", "DG_JIT_DEBUG", "DNNL_VERBOSE",
    "FLASHINFER_CACHE_DIR", "FLASHINFER_DISABLE_VERSION_CHECK",
    "FLASHINFER_JIT_DIR", "FLASHINFER_LOGDEST", "FLASHINFER_LOGLEVEL",
    "FLASHINFER_WORKSPACE_BASE", "FLASHINFER_WORKSPACE_DIR", "HIPBLASLT_LOG_FILE",
    "HIPBLASLT_LOG_LEVEL", "MIOPEN_CACHE_DIR", "MIOPEN_CUSTOM_CACHE_DIR", "MIOPEN_LOG_LEVEL",
    "MKL_VERBOSE", "MKL_VERBOSE_OUTPUT_FILE", "NCCL_DEBUG", "NCCL_DEBUG_FILE",
    "NCCL_COMM_ID", "NCCL_DEBUG_SUBSYS", "NCCL_GRAPH_DUMP_FILE", "NCCL_HOSTID",
    "NCCL_SOCKET_IFNAME", "NCCL_TOPO_DUMP_FILE", "ONEDNN_VERBOSE", "RCCL_COMM_ID",
    "RCCL_GRAPH_DUMP_FILE", "RCCL_HOSTID", "RCCL_SOCKET_IFNAME", "RCCL_TOPO_DUMP_FILE",
    "ROCBLAS_LOG_BENCH_PATH", "ROCBLAS_LOG_PATH", "ROCBLAS_LOG_PROFILE_PATH",
    "ROCBLAS_LOG_TRACE_PATH", "PYTORCH_KERNEL_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_HOME", "TORCH_LOGS", "TORCH_LOGS_OUT",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_TRACE", "TRITON_CACHE_DIR", "TRITON_DUMP_DIR",
    "TRTLLM_LOG_LEVEL", "TVM_FFI_CACHE_DIR", "TVM_LOG_DEBUG",
})  # fmt: skip
"""Of those: where compiled code is kept, which grows while an engine runs, what is logged or
dumped, and by which address ranks find each other, which is another on each host or at each start.
A library keeps code under names of what it was made from. Databases of tuned choices are not here,
nor compilers and what they compile for."""


def variable_fields(
    environment: Mapping[str, str],
    registered: Collection[str],
    prefix: str,
    harmless: Collection[str],
) -> dict[str, str]:
    """Variables that are set, of those that the engine or a library below it reads: ``registered``
    and all with the engine's ``prefix``."""
    known = {*registered, *LIBRARY_PATHS, *PRELOADED, *TOOLKITS, *CHOSEN}
    counted = {
        name: value
        for name, value in environment.items()
        if (name in known or name.startswith((prefix, *ARITHMETIC)))
        and name not in harmless
        and name not in CACHES
    }
    native = {name: native_field(name, value) for name, value in counted.items()}
    found = {name: text for name, text in native.items() if text is not None}
    return found | setting_fields(counted, found)
