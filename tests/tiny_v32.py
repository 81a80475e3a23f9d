"""The smallest model of V3.2's that benches run in tests."""

from stratakv.bench.shapes import DEEPSEEK_V32_3X512

TINY_V32 = {
    **DEEPSEEK_V32_3X512, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "q_lora_rank": 16, "index_topk": 16,
}  # fmt: skip
