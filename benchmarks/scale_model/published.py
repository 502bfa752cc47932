"""What others measured and published, beside what the model says of the same machines.

Nothing of the model was fitted to them but the constants of `kinds`, which name their sources.
What no source below states is a value that is common for such a machine: the bandwidth inside a
node, and what one P100 does of ResNet-101 and VGG-16.

- Goyal et al., "Accurate, Large Minibatch SGD" (2017): ResNet-50, 8 P100 a node with NVLink,
  one 50 Gb/s Ethernet card, 32 images a GPU, a backward pass of 120 ms: 90 % from 8 to 256 GPUs.
- Horovod, docs/benchmarks: 4 P100 a node, one 25 Gb/s RoCE card, 64 images a GPU: ResNet-101 90 %
  and VGG-16 68 % on 128 nodes, 79 % on 32; 103.6 images/s a GPU of ResNet-101 on 4 nodes.
- NVIDIA/DeepLearningExamples, ResNet-50 v1.5 for PyTorch: 8 GPUs against one, V100-16G AMP 6.93,
  A100-80G AMP 6.72 and TF32 7.72. Their single GPU is fed by all cores of the node.
- Daly (2006), figures 3 to 5: the best interval for a dump of 5 minutes.

Links reach the share of their rate that `kinds.LINE` states. Not every transport does: Zhang et
al., "Is Network the Bottleneck of Distributed Training?" (2020), saw 60 to 76 % on 64 V100 over
100 Gb/s of Ethernet, which this model calls 97 %. There a measured bandwidth belongs in its place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.scale_model.collective import Gradient, Network, all_reduce_seconds, buckets_of
from benchmarks.scale_model.expected import BACKWARD, FORWARD, JITTER, OPTIMIZER
from benchmarks.scale_model.failures import best_interval
from benchmarks.scale_model.kinds import LINE, NETWORK_US, NVLINK_US
from benchmarks.scale_model.step import Compute, Transfer, play, slowest_of

# GB/s in a node: NVLink of P100 and V100 in a hybrid cube mesh, PCIe 3.0 x 16, NVSwitch of A100.
NVLINK_1, NVLINK_2, PCIE, NVSWITCH = 40.0, 130.0, 10.0, 200.0


@dataclass(frozen=True)
class Case:
    """A published scaling efficiency of `nodes` against `base` nodes, or one device where 0."""

    title: str
    network: str
    batch: int
    images_per_s: float
    nodes: int
    per_node: int
    base: int
    inside: float
    outside: float
    published: float


# What the GPUs of a case do alone: Goyal's by the backward pass, VGG-16's by
# tensorflow.org/performance/benchmarks.
P100_RN50, P100_RN101, P100_VGG16 = 32 / 0.120 * BACKWARD, 118.0, 154.0
CARD_25, CARD_50 = 25 / 8, 50 / 8
RN50, RN101, VGG16 = "resnet50", "resnet101", "vgg16"
CASES = (
    Case("Goyal 2017, 256 P100", RN50, 32, P100_RN50, 32, 8, 1, NVLINK_1, CARD_50, 0.90),
    Case("Horovod, 512 P100, ResNet-101", RN101, 64, P100_RN101, 128, 4, 0, PCIE, CARD_25, 0.90),
    Case("Horovod, 128 P100, VGG-16", VGG16, 64, P100_VGG16, 32, 4, 0, PCIE, CARD_25, 0.79),
    Case("Horovod, 512 P100, VGG-16", VGG16, 64, P100_VGG16, 128, 4, 0, PCIE, CARD_25, 0.68),
    Case("NVIDIA, 8 V100, AMP", RN50, 256, 1200.0, 1, 8, 0, NVLINK_2, 0.0, 6.93 / 8),
    Case("NVIDIA, 8 A100, AMP", RN50, 256, 2470.0, 1, 8, 0, NVSWITCH, 0.0, 6.72 / 8),
    Case("NVIDIA, 8 A100, TF32", RN50, 256, 938.0, 1, 8, 0, NVSWITCH, 0.0, 7.72 / 8),
)
NETWORKS = tuple(sorted({case.network for case in CASES}))
DALY = ((24 * 60, 117.0), (6 * 60, 57.0), (15, 9.1))
"""Minutes between failures, and the best between saves, with a save of 5 minutes."""


@dataclass(frozen=True)
class Beside:
    """A published figure and the model's."""

    title: str
    published: float
    modelled: float

    @property
    def error(self) -> float:
        """Of the model, relative."""
        return self.modelled / self.published - 1


def compare(gradients: Mapping[str, Sequence[Gradient]]) -> list[Beside]:
    """Each case; `gradients` by the name of the network."""
    beside = [
        Beside(case.title, case.published, _efficiency(case, gradients[case.network]))
        for case in CASES
    ]
    return beside + [
        Beside(f"Daly 2006, best interval, MTBF {mtbf} min", minutes, best_interval(5, mtbf))
        for mtbf, minutes in DALY
    ]


def _efficiency(case: Case, gradients: Sequence[Gradient]) -> float:
    base = _step(case, gradients, case.base, case.per_node) if case.base else _alone(case).seconds
    return base / _step(case, gradients, case.nodes, case.per_node)


def _alone(case: Case) -> Compute:
    seconds = case.batch / case.images_per_s
    return Compute(FORWARD * seconds, BACKWARD * seconds, OPTIMIZER * seconds)


def _step(case: Case, gradients: Sequence[Gradient], nodes: int, per_node: int) -> float:
    network = Network(case.inside, case.outside * LINE, NVLINK_US, NETWORK_US)
    transfers = [
        Transfer(each.ready, all_reduce_seconds(each.size, nodes, per_node, network))
        for each in buckets_of(gradients)
    ]
    return play(_alone(case), transfers).seconds * slowest_of(nodes * per_node, JITTER)
