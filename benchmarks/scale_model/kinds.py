"""Kinds of node: what is in one, and where each figure comes from. Nothing here was measured here.

ResNet-50 at 224 px in half precision; images a second of one device alone.
"""

from dataclasses import dataclass

from benchmarks.scale_model.collective import Network

LINE = 0.91
"""What an all-reduce gets of its links' rate: 365.8 of 400 GB/s on 4 nodes of 8 H100 with 400 Gb/s
each (NVIDIA/nccl-tests issue 309)."""
NODE_DAYS = 54 * 2048 / 419
"""Days from one failure of a node with 8 GPUs to its next: 419 unexpected interruptions in 54 days
on 16,384 H100 ("The Llama 3 Herd of Models", 2024, table 5)."""
# Microseconds a hop, NCCL's estimates for its protocol Simple: src/graph/tuning.cc.
NVLINK_US, NETWORK_US = 4.0, 14.0


@dataclass(frozen=True)
class Kind:
    """Nodes that are alike."""

    name: str
    devices: int
    images_per_s: float
    network: Network
    cores: int
    mtbf_days: float = NODE_DAYS
    source: str = ""


def _network(inside: float, outside: float) -> Network:
    return Network(inside, outside, NVLINK_US, NETWORK_US)


A100 = 2470.0
"""NVIDIA/DeepLearningExamples, ResNet-50 v1.5 for PyTorch: A100-80G, DALI, AMP."""
H100 = A100 * 28.7 / 13.466
"""By the minutes that 8 of each take in MLPerf (A100 28.7, H100 13.466, id 3.0-2053)."""

KINDS = {
    "8xH100-8x400Gb": Kind(
        "8 H100, 8 x 400 Gb/s InfiniBand",
        8,
        H100,
        _network(480, 400 * LINE),
        208,
        source="NVLink with NVLS 480 GB/s (NVIDIA/nccl issue 1374)",
    ),
    "8xA100-8x200Gb": Kind(
        "8 A100, 8 x 200 Gb/s InfiniBand",
        8,
        A100,
        _network(200, 200 * LINE),
        128,
        source="NVLink 200 GB/s (NVIDIA/nccl-tests issue 149)",
    ),
    "8xA100-100Gb": Kind(
        "8 A100, one 100 Gb/s Ethernet",
        8,
        A100,
        _network(200, 7.5),
        96,
        source="a ring reaches 60 of 100 Gb/s (NVIDIA/nccl-tests issue 22)",
    ),
    "8xA100-25Gb": Kind(
        "8 A100, one 25 Gb/s Ethernet",
        8,
        A100,
        _network(200, 25 / 8 * LINE),
        96,
        source="line rate x 0.91",
    ),
    "1xA100-25Gb": Kind(
        "1 A100, one 25 Gb/s Ethernet",
        1,
        A100,
        _network(200, 25 / 8 * LINE),
        12,
        mtbf_days=NODE_DAYS * 4,
        source="line rate x 0.91; fails four times less often than a node with 8, assumed",
    ),
}
