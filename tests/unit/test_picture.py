import xml.etree.ElementTree as ET
from pathlib import Path

from kfp_ddp.pipelines import picture

COMPILED = Path(__file__).parents[2] / "compiled" / "train_resnet.yaml"


def test_the_steps_stand_in_the_order_of_their_dependencies() -> None:
    found = {step.name: step for step in picture.steps(COMPILED)}
    chain = ["preflight", "data-sync", "dataset-volume", "train", "evaluate", "gate", "export"]
    assert [name for name in found if not found[name].on_exit] == chain
    assert [found[name].after for name in chain] == [(), *((name,) for name in chain[:-1])]
    assert found["export"].condition == "blessed"
    assert found["teardown"].on_exit


def test_the_picture_is_whole_and_needs_nothing_from_elsewhere() -> None:
    drawn = picture.svg(COMPILED)
    root = ET.fromstring(drawn)
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"data-sync", "train", "export", "teardown", "if blessed"} <= set(words)
    assert "<script" not in drawn
    assert "href" not in drawn
