"""Settings and variables of vLLM that decide no byte of a page.

Owns the lists, by vLLM's classes, and the reason of each. What is not in them is in every name: a
setting that vLLM adds costs hits until somebody has judged it. Where in doubt, it is not here.
vLLM's own hashes of its configuration are no help: they name compiled graphs, and leave out what
changes a page without changing a graph.
"""

from collections.abc import Mapping
from typing import Final

SETTINGS: Final[Mapping[str, frozenset[str]]] = {
    name: frozenset(fields.split())
    for name, fields in {
        # Logs, traces, grammars, tools and other connectors: copies of pages at most. The
        # quantisation's object is made of the model's configuration, which is there.
        "VllmConfig": """
            observability_config logging_config profiler_config structured_outputs_config
            reasoning_config kv_transfer_config kv_events_config ec_transfer_config
            ec_manager_config watermark_config instance_id shutdown_timeout quant_config
        """,
        # Which weights (every byte of them is in a name), what makes tokens of a text, which token
        # is taken from logits, and who is asked for what.
        "ModelConfig": """
            model tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init
            served_model_name hf_token generation_config override_generation_config
            logits_processors max_logprobs logprobs_mode return_sampling_mask use_fp64_gumbel
            allowed_local_media_path allowed_media_domains renderer_num_workers
        """,
        # How much memory there is, and what that comes to.
        "CacheConfig": """
            gpu_memory_utilization num_gpu_blocks num_gpu_blocks_override num_cpu_blocks
            kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes
            kv_offloading_size kv_offloading_backend enable_prefix_caching
            user_specified_block_size
        """,
        # Addresses, ports, processes, and which replica this is.
        "ParallelConfig": """
            data_parallel_rank data_parallel_rank_local data_parallel_index
            data_parallel_size_local data_parallel_master_ip data_parallel_rpc_port
            data_parallel_master_port data_parallel_backend data_parallel_external_lb
            data_parallel_hybrid_lb _data_parallel_master_port_list _coord_store_port
            _api_process_count _api_process_rank dp_sync_interval
            max_parallel_loading_workers ray_workers_use_nsight ray_runtime_env
            placement_group distributed_executor_backend master_addr master_port node_rank rank
            numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids
            distributed_timeout_seconds cpu_distributed_timeout_seconds
            enable_fault_tolerance fault_tolerance_config
        """,
        # Who is next, and how many at once.
        "SchedulerConfig": """
            max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs
            long_prefill_token_threshold long_prefill_token_threshold_adaptive
            max_num_queued_reqs max_num_queued_tokens max_num_encoder_input_tokens
            encoder_cache_size policy scheduler_reserve_full_isl watermark
            prefill_schedule_interval async_scheduling stream_interval
        """,
        # How the same weights are read.
        "LoadConfig": """
            download_dir safetensors_load_strategy safetensors_prefetch_num_threads
            safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location
        """,
        # For which sizes the same kernels are prepared, where they are kept, and what vLLM notes
        # down while it makes them.
        "CompilationConfig": """
            debug_dump_path cache_dir local_cache_dir compile_cache_save_format
            compile_ranges_endpoints cudagraph_capture_sizes max_cudagraph_capture_size
            cudagraph_num_of_warmups enabled_custom_ops disabled_custom_ops traced_files
            compilation_time encoder_compilation_time static_forward_context
            static_all_moe_layers
        """,
        # Copies of the whole engine's configuration, which is there.
        "SpeculativeConfig": "target_model_config target_parallel_config model",
    }.items()
}
BINDING: Final = frozenset({"numa_bind", "numa_bind_nodes", "numa_bind_cpus"})
"""Of ``ParallelConfig``, on which cores a worker runs. Where a GPU computes, they change no bit of
a page. Where these cores compute, sums are divided among them, and the tier, in another process,
which vLLM binds to other cores, cannot see how many: there they count."""
CHECKPOINTS: Final = frozenset({"hf_config", "hf_text_config"})
"""Configurations of Hugging Face, which say where they lie and which release reads them."""
_PLACES: Final = """
    VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_XLA_CACHE_PATH VLLM_ASSETS_CACHE VLLM_MEDIA_CACHE
    VLLM_LORA_RESOLVER_CACHE_DIR VLLM_DEBUG_DUMP_PATH VLLM_CUDART_SO_PATH
    VLLM_NCCL_INCLUDE_PATH CUDA_VISIBLE_DEVICES LOCAL_RANK MAX_JOBS NVCC_THREADS
    CMAKE_BUILD_TYPE VERBOSE
    VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG
"""
"""Directories, which devices (their names are in a name) and what a build was made with. Not which
libraries and compilers are found: ``LD_LIBRARY_PATH``, ``CUDA_HOME``, ``VLLM_NCCL_SO_PATH``."""

_ADDRESSES: Final = """
    VLLM_HOST_IP VLLM_LOOPBACK_IP VLLM_PORT VLLM_RPC_BASE_PATH VLLM_DP_RANK VLLM_DP_RANK_LOCAL
    VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT
    VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_EC_SIDE_CHANNEL_HOST
    VLLM_EC_SIDE_CHANNEL_PORT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME
    VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_ENGINE_READY_TIMEOUT_S
    VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
    VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_API_KEY S3_ACCESS_KEY_ID
    S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL MOONCAKE_PREFERRED_SEGMENT
    MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_PROCESS_NAME_PREFIX VLLM_DIST_IDENT
"""
"""Addresses, ranks, deadlines and secrets."""

_SEEN: Final = """
    VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM
    VLLM_LOGGING_PREFIX VLLM_LOGGING_COLOR NO_COLOR FORCE_COLOR VLLM_LOG_STATS_INTERVAL
    VLLM_LOG_BATCHSIZE_INTERVAL VLLM_DISABLE_LOG_LOGO VLLM_DEBUG_LOG_API_SERVER_RESPONSE
    VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE
    VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_DEBUG_MFU_METRICS
"""
"""Logs, and what is reported to whom."""

_PROCESSES: Final = """
    VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING VLLM_CPU_KVCACHE_SPACE
"""
"""How processes and their memory are made. Not how many threads divide a sum on a CPU."""

VARIABLES: Final = frozenset(f"{_PLACES} {_ADDRESSES} {_SEEN} {_PROCESSES}".split())
PLUGINS: Final = ("vllm.general_plugins", "vllm.platform_plugins")
