"""What vLLM lacks to run its tiers without a GPU: a worker that copies between two kinds of host
memory. Owns those copies; everything else is vLLM's own. Runs in vLLM's environment, in tests only.
"""

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """In place of ``CPUOffloadingWorker``, which copies by CUDA. Copies at once."""

    def __init__(self, kv_caches, blocks_per_chunk, region):
        self.device = [one.tensor for one in kv_caches.tensors]
        pages = [one.page_size_bytes for one in kv_caches.tensors]
        self.pages = pages
        self.host = [region.create_next_worker_view(page * blocks_per_chunk) for page in pages]
        self.region = region
        self.refs = kv_caches.group_data_refs
        self.blocks_per_chunk = blocks_per_chunk
        self.ended = []

    def copy(self, job_id, gpu, cpu, *, storing):
        moved, blocks_at, chunks_at = 0, 0, 0
        for group, (count, first) in enumerate(
            zip(gpu.group_sizes, gpu.block_indices, strict=True)
        ):
            if not count:
                continue
            skipped = first % self.blocks_per_chunk
            chunk_count = -(-(count + skipped) // self.blocks_per_chunk)
            blocks = gpu.block_ids[blocks_at : blocks_at + count]
            chunks = cpu.block_ids[chunks_at : chunks_at + chunk_count]
            blocks_at, chunks_at = blocks_at + count, chunks_at + chunk_count
            for ref in self.refs[group]:
                page = self.pages[ref.tensor_idx]
                for at, block in enumerate(blocks):
                    chunk, part = divmod(at + skipped, self.blocks_per_chunk)
                    start = part * page
                    row = self.host[ref.tensor_idx][int(chunks[chunk])]
                    there = row[start : start + ref.page_size_bytes]
                    here = self.device[ref.tensor_idx][int(block), : ref.page_size_bytes]
                    if storing:
                        there.copy_(here)
                    else:
                        here.copy_(there)
                    moved += ref.page_size_bytes
        self.ended.append(TransferResult(job_id, True, moved))
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        return self.copy(job_id, src_spec, dst_spec, storing=True)

    def submit_load(self, job_id, src_spec, dst_spec, **hints):
        """``hints``: of 0.33, how soon it is wanted."""
        return self.copy(job_id, dst_spec, src_spec, storing=False)

    def get_finished(self):
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids):
        """All has ended when it is submitted."""

    def shutdown(self):
        """The region is a file in memory, which would stay."""
        self.host.clear()
        self.region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's own, whose worker refuses a machine without a GPU."""

    worker_class = CopyingWorker

    def get_worker(self, kv_caches):
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = self.worker_class(kv_caches, self.blocks_per_chunk, region)
        return self._worker
