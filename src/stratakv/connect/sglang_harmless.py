"""Settings and variables of SGLang that decide no byte of a page.

Owns the lists, and the reason of each. What is not in them is in every name: a setting that SGLang
adds costs hits until somebody has judged it. Where in doubt, it is not here.
"""

from typing import Final

_IDENTIFIED: Final = """
    model_path speculative_draft_model_path
    hicache_mem_layout
    load_format
"""
"""In names in a better way: by every byte of the weights, by each pool, or refused."""

_PLACES: Final = """
    host port nccl_port dist_init_addr dist_timeout gated_launch_port node_rank base_gpu_id
    gpu_id_step numa_node use_ray watchdog_timeout soft_watchdog_timeout sleep_on_idle gc_threshold
    custom_sigquit_handler fastapi_root_path enable_http_worker_reuseport smg_grpc_mode grpc_mode
    grpc_port grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args
    skip_server_warmup warmups enable_http2 http2_max_concurrent_streams
    http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs
    ssl_keyfile_password enable_ssl_refresh api_key admin_api_key tokenizer_worker_num
    detokenizer_worker_num file_storage_path enable_response_store engine_info_bootstrap_port
    load_balance_method crash_dump_folder download_dir weight_loader_disable_mmap
    weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
    weight_loader_drop_cache_after_load
"""
"""Where servers are and listen, who may ask, how the same weights are read, and on which cores
ranks run: the back end is in the process that computes, whose cores are in the name where they
do."""

_SEEN: Final = """
    log_level log_level_http log_requests log_requests_level log_requests_format
    log_requests_target uvicorn_access_log_exclude_prefixes show_time_cost enable_metrics
    smg_http_sidecar_port enable_mfu_metrics enable_metrics_for_all_schedulers
    load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
    tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
    bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
    generation_tokens_buckets gc_warning_threshold_secs decode_log_interval
    enable_request_time_stats_logging kv_events_config load_publish_endpoint
    enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name
    enable_trace trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file
    export_metrics_to_file_dir stat_loggers spec_trace_dir
"""
"""Logs, metrics and traces."""

_TEXT: Final = """
    served_model_name tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init
    chat_template trust_request_chat_template hf_chat_template_name completion_template
    enable_cache_report return_input_ids return_output_ids reasoning_parser
    default_chat_template_kwargs enable_strict_thinking tool_call_parser tool_server
    sampling_defaults preferred_sampling_params allow_auto_truncate stream_interval
    batch_notify_size stream_response_default_include_usage incremental_streaming_output
    constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
    constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer
    dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
    enable_tokenizer_batch_encode disable_tokenizer_batch_decode grammar_backend
    disable_outlines_disk_cache sampling_backend random_seed enable_custom_logit_processor
    enable_watermark watermark_config watermark_key watermark_key_b watermark_context_window
    watermark_mixing_probability watermark_max_probability watermark_default_enabled
    watermark_enforce_all sampling_mask_max_tokens
"""
"""What makes tokens of a text, and which token is taken from logits: tokens are in a name."""

_ROOM: Final = """
    mem_fraction_static max_running_requests max_queued_requests max_total_tokens
    chunked_prefill_size prefill_decode_interval prefill_decode_interval_min_bs
    enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy
    enable_priority_scheduling disable_priority_preemption default_priority_value
    abort_on_priority_when_disabled schedule_low_priority_values_first
    priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness
    swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set max_mamba_cache_size
    mamba_full_memory_ratio enable_prefill_delayer prefill_delayer_max_delay_passes
    prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
    prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
    prefill_delayer_max_delay_ms min_free_slots_delay num_continuous_decode_steps
    scheduler_recv_interval pp_max_micro_batch_size pp_async_batch_depth radix_eviction_policy
    _radix_eviction_policy_explicitly_set radix_eviction_policy_config disable_overlap_schedule
    torch_compile_max_bs cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
    cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
    cuda_graph_prefill_max_context
"""
"""How much there is room for, who is next, and for which sizes the same kernels are prepared."""

_TIERS: Final = """
    enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size
    hicache_host_memory_fraction hicache_write_policy hicache_io_backend hicache_storage_backend
    hicache_storage_prefetch_policy hicache_storage_backend_extra_config
    hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
    disaggregation_mode disaggregation_decode_allocation_policy disaggregation_transfer_backend
    disaggregation_enable_kv_checksum disaggregation_bootstrap_port disaggregation_ib_device
    disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
    disaggregation_decode_retraction_backup num_reserved_decode_tokens
    disaggregation_decode_extra_slots disaggregation_decode_polling_interval
    enable_pd_role_switch optimistic_prefill_attempts disaggregation_decode_host_receive_threshold
"""
"""Where pages are copied to and from, bytes as they are."""

SETTINGS: Final = frozenset(f"{_IDENTIFIED} {_PLACES} {_SEEN} {_TEXT} {_ROOM} {_TIERS}".split())
GRAPH_SIZES: Final = frozenset({
    "bs", "full_prefill_max_req", "full_prefill_prefix_chunk_tokens", "max_bs", "max_context_size",
    "max_seq_len",
})  # fmt: skip
"""Of ``cuda_graph_config``, by phase: for which sizes the same kernels are prepared."""

_SETS_ITSELF: Final = """
    SGLANG_RUN_ID SGLANG_DP_RANK SGLANG_BLOCK_NONZERO_RANK_CHILDREN SGLANG_IS_FIRST_RANK_ON_NODE
    SGLANG_DISABLE_OUTLINES_DISK_CACHE SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS
    SGLANG_RAY_BUNDLE_INDICES
"""
"""Another in each run or rank, or what a harmless setting says."""

_SEEN_VARIABLES: Final = """
    SGLANG_LOG_GC SGLANG_LOG_FORWARD_ITERS SGLANG_LOG_DECODE_GRAPH_KEY SGLANG_LOG_MS
    SGLANG_LOG_REQUEST_EXCEEDED_MS SGLANG_LOG_REQUEST_HEADERS SGLANG_LOG_SCHEDULER_STATUS_TARGET
    SGLANG_LOG_SCHEDULER_STATUS_INTERVAL SGLANG_JIT_LOG_LEVEL SGLANG_LOG_PICKLE_IPC_OBJECTS
    SGLANG_LOGGING_CONFIG_PATH SGLANG_TRACE_LEVEL SGLANG_TRACE_ASYNC
    SGLANG_TRACE_ASYNC_FLUSH_THRESHOLD SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS
    SGLANG_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE SGLANG_TORCH_PROFILER_DIR
    SGLANG_PROFILE_WITH_STACK SGLANG_PROFILE_RECORD_SHAPES SGLANG_CUDA_COREDUMP
    SGLANG_CUDA_COREDUMP_DIR SGLANG_PYSPY_DUMP_BEFORE_CRASH SGLANG_CUDA_COREDUMP_BEFORE_CRASH
    SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS
"""
"""Logs, traces and what is written when it crashes."""

_PLACE_VARIABLES: Final = """
    SGLANG_PORT SGLANG_TCP_STORE_PORT SGLANG_BACKUP_PORT_BASE SGLANG_GRPC_PORT
    SGLANG_GRPC_WORKER_THREADS SGLANG_HOST_IP SGLANG_LOCAL_IP_NIC SGLANG_ZMQ_ALLOWED_PEERS
    SGLANG_ZMQ_SOURCE_IP SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE SGLANG_CACHE_DIR
    SGLANG_JIT_CACHE_DIR SGLANG_CUTE_AOT_CACHE_DIR SGLANG_DG_CACHE_DIR SGLANG_TIMEOUT_KEEP_ALIVE
    SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT SGLANG_HEALTH_CHECK_TIMEOUT
    SGLANG_WAIT_PORT_TIMEOUT SGLANG_WAIT_WEIGHTS_READY_TIMEOUT SGLANG_WARMUP_TIMEOUT
    SGLANG_REQ_WAITING_TIMEOUT SGLANG_REQ_RUNNING_TIMEOUT SGLANG_SET_CPU_AFFINITY
    SGLANG_NUMA_BIND_V2 SGLANG_AUTO_NUMA_BIND SGLANG_CRASH_ON_NUMA_BIND_FAILURE
    HF_HUB_DISABLE_XET DISABLE_OPENAPI_DOC EXA_API_KEY
"""
"""Addresses, deadlines, directories of compiled code, and of whom to ask for other things."""

_TIER_VARIABLES: Final = """
    SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR
    SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO
    SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS
    SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE
    SGLANG_TEST_RETRACT SGLANG_TEST_RETRACT_INTERVAL SGLANG_FLASHINFER_WORKSPACE_SIZE
    ASCEND_NPU_PHY_ID ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE MOONCAKE_MASTER MOONCAKE_CLIENT
    MOONCAKE_LOCAL_HOSTNAME MOONCAKE_TE_META_DATA_SERVER MOONCAKE_GLOBAL_SEGMENT_SIZE
    MOONCAKE_PROTOCOL MOONCAKE_DEVICE MOONCAKE_MASTER_METRICS_PORT MOONCAKE_CHECK_SERVER
    MOONCAKE_STANDALONE_STORAGE MOONCAKE_ENABLE_SSD_OFFLOAD MOONCAKE_OFFLOAD_FILE_STORAGE_PATH
    MOONCAKE_TENANT_ID
"""
"""Of other back ends, host memory and transports; when requests are retracted."""

VARIABLES: Final = frozenset(
    f"{_SETS_ITSELF} {_SEEN_VARIABLES} {_PLACE_VARIABLES} {_TIER_VARIABLES}".split()
)
EXTERNAL_CODE: Final = ("SGLANG_EXTERNAL_MODEL_PACKAGE", "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE")
"""Variables that name packages with models of the operator's."""
PLUGINS: Final = ("sglang.srt.plugins", "sglang.srt.platforms")
