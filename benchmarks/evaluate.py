"""Evaluation and export against their peers, ratios > 1 where ours is faster.

- `metrics_vs_torchmetrics`: accuracy, top 5, per-class precision, recall and F1, calibration error
  and confusion matrix of 50,000 samples in 1,000 classes, from the same logits in the same
  batches; torchmetrics with compute groups and without its argument checks, as it is fastest.
  Ours also has the loss, each sample's confidence and the classes' intervals.
- `rn50_224_vs_reference`: images a second of the evaluation of JPEG files, against `validate()` of
  pytorch/examples' imagenet/main.py, a ResNet-50 in float32 on a CPU, each in its own process.
- `bulk_vs_evaluation`, `bulk_vs_imagefolder`: images a second of a batch prediction of the same
  files, from the listing to the table, against our evaluation and that loop.
- `onnx_vs_eager_rn50_b1`, `onnx_vs_eager_rn50_b8`: a ResNet-50 at 224 pixels, as the export
  component writes it, in ONNX Runtime against the same model in eager torch; uint8 images in,
  logits out.

CPU time of one thread each.
"""

import itertools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.input import photographs
from benchmarks.rounds import add_to_meters, apart, measure, ratio, table, take_turns

SAMPLES, CLASSES, BATCH = 50_000, 1000, 500
IMAGES, ROUNDS = 128, 7


def run() -> dict[str, float]:
    """Measure, print a table, and return the figures by name."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return _metrics() | _against_reference() | _onnx((1, 8))


def _metrics() -> dict[str, float]:
    import torch

    from kfp_ddp.evaluation.measure import Tally

    try:
        from torchmetrics import MetricCollection
        from torchmetrics import classification as peer
    except ImportError:
        print("torchmetrics is missing: pip install torchmetrics")
        return {}
    targets = torch.randint(CLASSES, (SAMPLES,))
    logits = torch.randn(SAMPLES, CLASSES)
    logits[torch.arange(SAMPLES), targets] += 3
    batches = list(zip(torch.split(logits, BATCH), torch.split(targets, BATCH), strict=True))
    names = [str(i) for i in range(CLASSES)]

    def ours() -> dict[str, Any]:
        tally = Tally(CLASSES)
        for some, truth in batches:
            tally.update(some, truth)
        return {
            "accuracy": tally.correct / tally.samples,
            "top5": tally.top5,
            "classes": tally.per_class(names),
            "calibration": tally.calibration_error,
            "confusion": tally.confusion,
        }

    def theirs() -> dict[str, Any]:
        options: dict[str, Any] = {"num_classes": CLASSES, "validate_args": False}
        metrics = MetricCollection(
            {
                "accuracy": peer.MulticlassAccuracy(average="micro", **options),
                "top5": peer.MulticlassAccuracy(average="micro", top_k=5, **options),
                "precision": peer.MulticlassPrecision(average=None, **options),
                "recall": peer.MulticlassRecall(average=None, **options),
                "f1": peer.MulticlassF1Score(average=None, **options),
                "calibration": peer.MulticlassCalibrationError(n_bins=15, **options),
                "confusion": peer.MulticlassConfusionMatrix(**options),
            }
        )
        for some, truth in batches:
            metrics.update(some, truth)
        computed: dict[str, Any] = metrics.compute()
        return computed

    mine, other = ours(), theirs()
    for name in ("accuracy", "top5", "calibration"):
        if abs(float(mine[name]) - float(other[name])) > 1e-5:
            raise RuntimeError(f"{name} differs: ours {mine[name]}, torchmetrics {other[name]}")
    if not torch.equal(mine["confusion"], other["confusion"]):
        raise RuntimeError("the confusion matrices differ")
    for name in ("precision", "recall", "f1"):
        of_classes = torch.tensor([getattr(one, name) for one in mine["classes"]])
        if not torch.allclose(of_classes, other[name], rtol=0, atol=1e-6):
            raise RuntimeError(f"{name} of the classes differs")
    seconds = measure({"kfp-ddp": ours, "torchmetrics": theirs}, ROUNDS)
    title = f"Metrics in {CLASSES:,} classes, {SAMPLES:,} samples a round"
    table(title, seconds, SAMPLES // 1000, "1,000 samples")
    return {"metrics_vs_torchmetrics": ratio(seconds, "kfp-ddp", "torchmetrics")}


def _against_reference() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        root = photographs(Path(folder) / "data", 4 * IMAGES) / "val"
        ours, peer, bulk = "kfp-ddp", "pytorch/examples imagenet", "kfp-ddp, batch prediction"
        with (
            apart(_ours, root) as evaluation,
            apart(_reference, root) as reference,
            apart(_bulk, root) as prediction,
        ):
            calls = {ours: evaluation, peer: reference, bulk: prediction}
            seconds = take_turns(calls, rounds=3)
    table("A ResNet-50 at 224 px over JPEG files", seconds, IMAGES, "image")
    return {
        "rn50_224_vs_reference": ratio(seconds, ours, peer),
        "bulk_vs_evaluation": ratio(seconds, bulk, ours),
        "bulk_vs_imagefolder": ratio(seconds, bulk, peer),
    }


def _ours(root: Path) -> Callable[[], object]:
    import torch

    from kfp_ddp.evaluation.predict import merged, predict_share
    from kfp_ddp.pictures.splits import scan
    from kfp_ddp.training.distributed import alone
    from kfp_ddp.training.model.networks import build

    torch.set_num_threads(1)
    model, info, index = build("resnet50", 2).eval(), _info(2), scan(root)
    world = alone(torch.device("cpu"))
    return lambda: merged(index, [predict_share(model, info, index, 32, world)])


def _bulk(root: Path) -> Callable[[], object]:
    import torch

    from kfp_ddp.evaluation import bulk_rank
    from kfp_ddp.evaluation.evaluator import Subject
    from kfp_ddp.evaluation.request import PredictionRequest
    from kfp_ddp.models.bundle import Bundle
    from kfp_ddp.storage.kinds import open_store
    from kfp_ddp.training.distributed import alone
    from kfp_ddp.training.model.networks import build

    torch.set_num_threads(1)
    subject = Subject(build("resnet50", 2).eval(), _info(2), "", "")
    bundle = Bundle.at(open_store(str(root)), sealed=False)
    # A bundle is more than its weights, and reading it is no part of the figure.
    setattr(bulk_rank, "read_bundle", lambda *_, **__: (subject, bundle))  # noqa: B010
    world, numbers = alone(torch.device("cpu")), itertools.count()

    def predict() -> None:
        file = f"{root.parent}/{next(numbers)}.csv"
        options = {"batch_size": 32}
        request = PredictionRequest.from_inputs(str(root), str(root), file, options)
        bulk_rank.predict_share(request, world)

    return predict


def _reference(root: Path) -> Callable[[], object]:
    """`validate()` of pytorch/examples' imagenet/main.py, its meters included."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision import datasets, models, transforms

    torch.set_num_threads(1)
    network = models.get_model("resnet50", weights=None)
    criterion = torch.nn.CrossEntropyLoss()
    normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    steps = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normalize]
    dataset = datasets.ImageFolder(str(root), transforms.Compose(steps))
    loader = DataLoader(dataset, batch_size=32, shuffle=False)

    def validate() -> None:
        seen = [0.0, 0.0, 0.0]
        network.eval()
        with torch.no_grad():
            for images, target in loader:
                output = network(images)
                loss = criterion(output, target)
                add_to_meters(seen, loss, output, target)

    return validate


def _info(classes: int) -> Any:
    from kfp_ddp.training.model.networks import MEAN, STD
    from kfp_ddp.training.state.checkpoint import ModelInfo

    return ModelInfo(
        model="resnet50",
        classes=tuple(map(str, range(classes))),
        image_size=224,
        mean=MEAN,
        std=STD,
        step=0,
        config={},
    )


def _onnx(sizes: tuple[int, ...]) -> dict[str, float]:
    import torch

    from kfp_ddp.export.formats import Servable, eager, onnx_predict, trace, write_onnx
    from kfp_ddp.models.bundle import ONNX
    from kfp_ddp.training.model.networks import build

    model = build("resnet50", CLASSES)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
    model(torch.randn(8, 3, 224, 224))  # gives batch norm real statistics
    info = _info(CLASSES)
    servable = Servable(model.eval(), info).eval()
    figures = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_onnx(trace(servable, 224), info, Path(folder) / ONNX)
        exported, plain = onnx_predict(Path(folder) / ONNX), eager(servable)
        for size in sizes:
            images = torch.randint(0, 256, (size, 3, 224, 224), dtype=torch.uint8)
            torch.testing.assert_close(exported(images), plain(images), atol=1e-3, rtol=1e-3)
            calls = {
                "kfp-ddp, model.onnx": lambda images=images: exported(images),
                "eager torch": lambda images=images: plain(images),
            }
            seconds = measure(calls, ROUNDS)
            table(f"ResNet-50 at 224 px, batches of {size}", seconds, size, "image")
            figures[f"onnx_vs_eager_rn50_b{size}"] = ratio(
                seconds, "kfp-ddp, model.onnx", "eager torch"
            )
    return figures
