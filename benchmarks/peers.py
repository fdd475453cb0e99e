"""What other engines reach on NVIDIA H200s, measured by us: the best of each row, to stand beside ours.

vLLM 0.22.1 and Mini-SGLang (commit 20fcd7f, with flashinfer 0.6.6), torch 2.11.0, random weights in bfloat16, the workload of
`benchmarks/workload.py`, at most 256 running requests, 16,384 tokens a step. docs/benchmarks.md tells how, and what differs.
"""

from dataclasses import dataclass

GPU = "H200"


@dataclass(frozen=True)
class Peers:
    """Best of the peers, row by row; `decode_ms` by the number of rows."""

    offline_tokens_per_s: float
    decode_ms: dict[int, float]
    prefill_ms: float  # 16 prompts of 1,024 tokens


PEERS = {  # on one GPU
    "Qwen3-0.6B": Peers(23_200, {1: 1.73, 8: 1.75, 32: 2.60, 128: 5.76, 256: 9.99}, 41.1),
    "Llama-3.1-8B": Peers(9_573, {1: 4.93, 8: 5.28, 32: 6.27, 128: 10.54, 256: 17.51}, 381),
    "Qwen3-14B": Peers(5_902, {1: 8.57, 8: 9.15, 32: 10.11, 128: 16.05, 256: 25.70}, 711),
    "Qwen3-30B-A3B": Peers(5_714, {1: 4.31, 8: 9.43, 32: 16.46, 128: 21.31, 256: 26.31}, 257),
}
# vLLM alone, with its own all-reduce over peer memory, on two GPUs with NVLink.
PEERS_OF_TWO = {"Qwen3-14B": Peers(9_613, {1: 5.63, 8: 6.0, 32: 6.45, 128: 9.8, 256: 15.2}, 420)}
