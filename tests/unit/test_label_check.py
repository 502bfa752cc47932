"""Doubtful labels by confident learning (Northcutt et al. 2021)."""

import numpy as np
import torch

from kfp_ddp.evaluation.label_check import label_errors, near_duplicates
from kfp_ddp.evaluation.predict import EMBEDDED, FEATURES


def test_example_by_hand() -> None:
    """The thresholds are (0.9 + 0.8 + 0.1) / 3 = 0.6 and (0.8 + 0.7 + 0.45) / 3 = 0.65.

    So 0.9 for class 1 contradicts the third label, and 0.55 for class 0 does not the last one.
    """
    first = np.array([0.9, 0.8, 0.1, 0.2, 0.3, 0.55])
    logits = np.log(np.stack([first, 1 - first, np.full(6, 1e-9)], 1))
    ((position, suggested, score),) = label_errors(logits, np.array([0, 0, 0, 1, 1, 1]))
    assert (position, suggested, round(score, 6)) == (2, 1, 0.8)


def test_changed_labels_of_separable_samples_are_first() -> None:
    draw = np.random.default_rng(0)
    targets = draw.integers(0, 5, 400)
    logits = draw.normal(size=(400, 5)) + 12 * np.eye(5)[targets]
    changed = draw.choice(400, 12, replace=False)
    given = targets.copy()
    given[changed] = (given[changed] + 1) % 5
    doubtful = label_errors(logits, given)
    scores = [score for _, _, score in doubtful]
    assert scores == sorted(scores, reverse=True)
    assert {position for position, _, _ in doubtful} == set(changed.tolist())
    assert all(suggested == targets[position] for position, suggested, _ in doubtful)


def test_near_duplicates_are_of_two_kinds_and_agree_in_embedding_and_pixels() -> None:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(8, FEATURES, generator=draw)
    features[1] = features[0]
    features[3, :EMBEDDED] = features[2, :EMBEDDED]
    features[5, EMBEDDED:] = features[4, EMBEDDED:]
    features[7] = features[6]
    kinds = torch.tensor([[0, 0], [1, 0], [0, 0], [1, 1], [0, 0], [1, 1], [0, 0], [0, 0]])
    ((one, other, score),) = near_duplicates(features, kinds)
    assert (one, other) == (0, 1)
    assert score > 0.999
