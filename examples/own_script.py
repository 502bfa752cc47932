"""A training script of your own, between kfp-ddp's sync, evaluation, gate and export.

    kfp-ddp run ./photos --local \
        --set script=examples/own_script.py --set model=examples/own_script.py:build
    kfp-ddp run gs://bucket/photos --pipeline own_script \
        --set script=examples/own_script.py --set model=examples/own_script.py:build

Each rank runs this file as under torchrun. Variables name the file of the settings, the table of
the images and the folder of the results, in which rank 0 saves the weights.
"""

import argparse
import csv
import json
import os

import torch
import torch.distributed as dist
from PIL import Image, ImageOps
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.transforms import v2


def build(num_classes: int) -> nn.Module:
    """The network, which the evaluation and the export build again to load the weights into."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes)),
    )


class Images(Dataset):
    """The images of a split, as the network will be given them in the evaluation."""

    def __init__(self, split: str, config: dict) -> None:
        with open(os.environ["KFP_DDP_IMAGES"], newline="") as file:
            self.rows = [row for row in csv.DictReader(file) if row["split"] == split]
        size = config["image_size"]
        short = round(size / 0.875) if size >= 128 else size
        self.transform = v2.Compose(
            [
                v2.PILToTensor(),
                v2.Resize(short, antialias=True),
                v2.CenterCrop(size),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(config["mean"], config["std"]),
            ]
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        row = self.rows[at]
        upright = ImageOps.exif_transpose(Image.open(row["path"]))  # as photographs are turned
        return self.transform(upright.convert("RGB")), int(row["target"])


def main() -> None:
    """Train with DistributedDataParallel, and leave the weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--momentum", type=float, default=0.9)
    options = parser.parse_args()
    with open(os.environ["KFP_DDP_CONFIG"]) as file:
        config = json.load(file)

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    torch.manual_seed(config["seed"])
    network = DistributedDataParallel(build(len(config["classes"])).to(device))
    optimizer = torch.optim.SGD(network.parameters(), config["learning_rate"], options.momentum)

    images = Images("train", config)
    sampler = DistributedSampler(images)
    batch = max(1, min(config["batch_size"], len(images)) // dist.get_world_size())
    loader = DataLoader(images, batch, sampler=sampler)
    step = 0
    for epoch in range(config["epochs"]):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(network(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)

    if dist.get_rank() == 0:
        output = os.environ["KFP_DDP_OUTPUT"]
        torch.save(network.module.state_dict(), f"{output}/model.pt")
        with open(f"{output}/result.json", "w") as file:
            json.dump({"step": step}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
