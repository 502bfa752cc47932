"""A picture that is a line of pixels becomes the square that it would, in little memory."""

import pytest
import torch

from kfp_ddp.training import transforms


@pytest.mark.parametrize("shape", [(1, 5000), (1, 4999), (2, 8001), (9000, 3), (9001, 4)])
def test_the_centre_of_a_line_is_that_of_all_of_it_and_no_more_is_made(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = torch.randint(256, (3, *shape), dtype=torch.uint8)
    with monkeypatch.context() as whole:
        whole.setattr(transforms, "_LINE", 10_000)
        expected = transforms.evaluate(image, 32)
    made: list[int] = []
    resize = transforms.resize

    def counted(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
        made.append(height * width)
        return resize(image, height, width)

    monkeypatch.setattr(transforms, "resize", counted)
    assert torch.equal(transforms.evaluate(image, 32), expected)
    assert max(made) < 20 * 32 * 32
