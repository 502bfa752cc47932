"""What training comes to on N nodes, by a model whose constants are measured here.

Played through or in closed form, a file a part in `scale_model`: a step with its buckets, ring and
tree all-reduces beside the backward pass; ranks that share cores; loaders and the claim that feeds
them; the start of a job; saves, failures and the best interval between saves.

Held against real steps of 1, 2, 4 and 8 gloo ranks of our trainer on this machine, ResNet-18 at
64 px and 8 images a rank. Of ranks that talk the model knows only two ranks' all-reduce of an idle
machine: how long a hop and a byte take and how much of a core that needs. More ranks than cores
take turns, so their step is mostly the sum of what all must compute and copy, by the cores.

- `scale_error_1`, `_2`, `_4`, `_8`: of the predicted step, relative to the measured one; nearer to
  0 is better. Constants and steps are measured in turns, and the fastest round of each counts:
  what else a machine does only adds. A step is the median of a turn's, at the mean of the ranks.
- `goodput_formula_error`: of the closed form that the tables use against failures drawn at random.

- `published_largest_error`: of the published figures below, the one that the model misses most.

Then published figures beside the model's of the same machines (`scale_model.published`), and the
expected efficiency and goodput of kinds of nodes whose figures are stated in `scale_model.kinds`.

`python -m benchmarks.scale --help` is about other numbers of nodes, batches or failures.
"""

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.scale_model import failures
from benchmarks.scale_model.collective import Gradient
from benchmarks.scale_model.expected import Expected, Feed, Saved, expect, nodes_of_one_claim
from benchmarks.scale_model.kinds import KINDS, Kind
from benchmarks.scale_model.sharing import undisturbed
from benchmarks.scale_model.starting import Start
from benchmarks.scale_model.syncing import IMAGENET

RANKS = (1, 2, 4, 8)
NODES = (1, 2, 4, 8, 16, 32, 64, 128)


def run() -> dict[str, float]:
    """Measure the constants, hold the model against ranks here, and print what to expect."""
    from benchmarks.scale_model import measured, published

    with tempfile.TemporaryDirectory() as folder:
        figures = _check_here(Path(folder))
    print("\npublished, and the model of the same machines")
    beside = published.compare({name: measured.gradients_of(name) for name in published.NETWORKS})
    for each in beside:
        print(f"  {each.title:44} {each.published:8.3f} {each.modelled:8.3f} {each.error:+7.1%}")
    saved, start, feed = _constants()
    _sync(feed.claim)
    figures["published_largest_error"] = max((each.error for each in beside), key=abs)
    for kind in KINDS.values():
        _table(kind, NODES, 256, measured.gradients_of("resnet50"), feed, saved, start)
    return figures | {"goodput_formula_error": _formula_error(saved, start)}


def _check_here(folder: Path) -> dict[str, float]:
    from benchmarks.input import photographs
    from benchmarks.scale_model import measured
    from benchmarks.scale_model.ranks import Job

    job = Job(str(photographs(folder / "data", 128)))
    rounds = measured.rounds_here(job, RANKS)
    machine = undisturbed([each.machine for each in rounds])
    alone, travels = machine.alone, machine.loopback
    slower = max(machine.busy.values(), default=alone.seconds) / alone.seconds
    print(
        f"one rank: {1e3 * alone.before:.0f} ms to the backward pass, {1e3 * alone.backward:.0f} "
        f"in it, {1e3 * alone.after:.0f} after it; varies by {machine.jitter:.0%}\n"
        f"all cores busy: {slower:.2f} times as long\n"
        f"all-reduce: {1e6 * travels.hop:.0f} us a hop, {1e-9 / travels.byte:.2f} GB/s, "
        f"{travels.cores:.2f} cores a rank"
    )
    print(f"\n{'ranks':>7} {'measured':>10} {'predicted':>10} {'error':>7}")
    figures = {}
    for count in RANKS:
        real = [each.steps[count] for each in rounds]
        predicted = machine.step_seconds(count)
        figures[f"scale_error_{count}"] = error = predicted / min(real) - 1
        print(
            f"{count:7d} {1e3 * min(real):7.0f} ms {1e3 * predicted:7.0f} ms {error:+7.1%}   "
            f"median {1e3 * statistics.median(real):.0f} ms of {len(real)} rounds"
        )
    return figures


def _constants() -> tuple[Saved, Start, Feed]:
    from benchmarks.input import photographs
    from benchmarks.scale_model import measured

    saved, start = measured.checkpoint_and_start()
    with tempfile.TemporaryDirectory() as folder:
        feeds = measured.feed_here(photographs(Path(folder) / "data", 160))
    rates = ", ".join(f"{feed.per_core:.0f} from {name}" for name, feed in feeds.items())
    print(
        f"\nmeasured here: a save stops the loop for {1e3 * saved.stall:.0f} ms and is written "
        f"after {saved.written:.1f} s; {start.read / 1e9:.1f} GB/s to verify and load it; "
        f"imports {start.imports:.1f} s; {1e3 * start.meeting:.1f} ms to meet a rank; images a "
        f"second and core at 224 px: {rates}"
    )
    return saved, start, feeds["JPEG"]


def _sync(claim: float) -> None:
    from benchmarks.scale_model import measured

    sync = measured.sync_here()
    if sync is None:
        return
    print(
        f"sync: {1e6 * sync.file:.0f} us a file and {1e9 * sync.byte:.2f} ns a byte, "
        f"{1e6 * sync.unchanged:.0f} us a file that is there already: {IMAGENET.name} "
        f"takes {sync.first(IMAGENET, claim) / 60:.0f} min into a claim of {claim / 1e9:.1f} GB/s, "
        f"and {sync.again(IMAGENET):.0f} s when nothing has changed"
    )


def _table(
    kind: Kind,
    nodes: Sequence[int],
    batch: int,
    gradients: Sequence[Gradient],
    feed: Feed,
    saved: Saved,
    start: Start,
) -> None:
    print(
        f"\n{kind.name}: ResNet-50 at 224 px, {batch} images a device, {kind.images_per_s:.0f} "
        f"images/s a device, a failure of a node each {kind.mtbf_days:.0f} days; {kind.source}\n"
        f"  one claim of {feed.claim / 1e9:.1f} GB/s feeds {nodes_of_one_claim(kind, feed):.1f} "
        "nodes: beyond that each needs a copy or a decoded cache of its own"
        f"\n{'nodes':>7} {'devices':>7} {'step':>8} {'exposed':>8} {'efficiency':>10} "
        f"{'images/s':>10} {'start':>7} {'save every':>10} {'goodput':>8}  limit"
    )
    for count in nodes:
        _print(expect(kind, count, batch, gradients, feed, saved, start))


def _print(row: Expected) -> None:
    print(
        f"{row.nodes:7d} {row.devices:7d} {1e3 * row.step:5.0f} ms {1e3 * row.exposed:5.1f} ms "
        f"{row.efficiency:10.1%} {row.images_per_s:10,.0f} {row.start:5.0f} s "
        f"{row.interval / 60:6.1f} min {row.goodput:8.1%}  {row.limit}"
    )


def _formula_error(saved: Saved, start: Start) -> float:
    """Of the largest job of the tables, failing once an hour."""
    restart, mtbf = start.seconds(max(NODES), 8), 3600.0
    interval = max(failures.best_interval(saved.stall, mtbf), saved.written)
    given = (interval, saved.stall, saved.written, restart, mtbf)
    return failures.kept(*given) / failures.played(*given) - 1


def main() -> None:
    """Print what to expect of nodes of one kind, without the check on ranks here."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kind", choices=sorted(KINDS), default="8xA100-100Gb")
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES))
    parser.add_argument("--network", default="resnet50", help="whose gradients travel")
    parser.add_argument("--batch", type=int, default=256, help="images a device and step")
    parser.add_argument("--images-per-s", type=float, help="of one device alone")
    parser.add_argument(
        "--between-gb-per-s", type=float, help="bus bandwidth between nodes, as a netcheck tells it"
    )
    parser.add_argument("--mtbf-days", type=float, help="from a node's failure to its next")
    parser.add_argument("--claim-gb-per-s", type=float, default=1.0, help="of one claim")
    parser.add_argument(
        "--from-claim", action="store_true", help="each epoch reads its images from one claim"
    )
    given = parser.parse_args()
    from benchmarks.scale_model.measured import gradients_of

    own = {"images_per_s": given.images_per_s, "mtbf_days": given.mtbf_days}
    own = {name: value for name, value in own.items() if value}
    kind = dataclasses.replace(KINDS[given.kind], **own)
    if given.between_gb_per_s:
        network = dataclasses.replace(kind.network, outside=given.between_gb_per_s)
        kind = dataclasses.replace(kind, network=network, source="between nodes as given")
    saved, start, feed = _constants()
    claim = given.claim_gb_per_s * 1e9
    feed = dataclasses.replace(feed, claim=claim, local=not given.from_claim)
    start = dataclasses.replace(start, claim=claim)
    _sync(claim)
    _table(kind, given.nodes, given.batch, gradients_of(given.network), feed, saved, start)


if __name__ == "__main__":
    main()
