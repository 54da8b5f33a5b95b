"""AugTest against naive loops: several views of each held-out image decide together."""

import collections
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from sfumato.data.augmentation import augment
from sfumato.data.images import ImageSet
from sfumato.data.views import Views
from sfumato.evaluation.augtest import WithViews, _public_bits, augtest, decide_together
from sfumato.evaluation.calibration import Calibration, Threshold, uncalibrated
from sfumato.evaluation.scores import predict_logits, score

FLIP = Views("flip", 2, 0)


def images(number=60, size=8, seed=0, symmetric=False):
    source = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (number, 1, size, size), generator=source, dtype=torch.uint8)
    if symmetric:
        pixels[..., size // 2 :] = pixels[..., : size // 2].flip(-1)
    labels = torch.randint(0, 3, (number,), generator=source)
    return ImageSet(pixels, labels, torch.ones(number, dtype=torch.bool), (0.3,), (0.2,))


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3))


def unchanged(outputs):
    return outputs


def naive(network, held_out, views, num_views, decide=unchanged):
    """One image, one view at a time, counting on fingers."""
    network.eval()
    by_vote, by_mean, bits = 0, 0, _public_bits(len(held_out), num_views)
    for i in range(len(held_out)):
        votes, total = collections.Counter(), np.zeros(3)
        for k in range(num_views):
            image = held_out.batch(torch.tensor([i]))
            view = augment(image, bits[i : i + 1, k : k + 1], views.kind, views.padding, held_out.mean, held_out.std)[0]
            with torch.no_grad():
                logits = decide(network(view))[0].double().numpy()
            votes[int(logits.argmax())] += 1
            total += np.exp(logits) / np.exp(logits).sum()
        tied = [name for name, count in votes.items() if count == max(votes.values())]
        by_vote += max(tied, key=lambda name: total[name]) == int(held_out.labels[i])
        by_mean += int(total.argmax()) == int(held_out.labels[i])
    return WithViews(num_views, by_vote / len(held_out), by_mean / len(held_out))


@pytest.mark.parametrize(("kind", "num_views"), [("crop_flip", 4), ("rrc", 7), ("tan", 3)])
def test_vote_and_mean_equal_a_naive_loop(kind, num_views):
    """60 images in pieces of up to 128 views, the last of which is smaller."""
    held_out, network, views = images(), model(), Views(kind, 2, 3)
    found = augtest(network.train(), held_out, views, num_views, unchanged)
    assert found == naive(network.eval(), held_out, views, num_views)
    assert augtest(network, held_out, views, num_views, unchanged) == found  # the same again


def test_where_views_are_alike_both_equal_the_plain_accuracy():
    held_out, network = images(symmetric=True), model().train()  # a mirror image is the image
    plain = score(predict_logits(network, held_out), held_out.labels).accuracy
    for num_views in (1, 2, 5):
        found = augtest(network, held_out, FLIP, num_views, unchanged)
        assert found == WithViews(num_views, plain, plain)
    assert network.training  # left as it was


def test_nothing_is_tested_without_views():
    for views, number in ((FLIP, 0), (Views("none", 2, 4), 8)):
        assert augtest(model(), images(), views, number, unchanged) == WithViews(0, None, None)


def test_the_decision_is_that_of_the_objective():
    held_out, network = images(), model()
    favour_last = lambda outputs: outputs + torch.tensor([0.0, 0.0, 100.0])  # noqa: E731
    found = augtest(network, held_out, FLIP, 3, favour_last)
    assert found.accuracy_augtest_vote == float((held_out.labels == 2).double().mean())
    mild = lambda outputs: outputs + torch.tensor([0.0, 0.4, 0.0])  # noqa: E731
    assert augtest(network, held_out, FLIP, 3, mild) == naive(network, held_out, FLIP, 3, mild)


def test_a_vote_is_never_outweighed_by_probability_and_ties_are_broken_by_it():
    for views, expected in (
        ([[0.50, 0.05, 0.45], [0.02, 0.50, 0.48], [0.02, 0.50, 0.48]], (1, 2)),  # the first view alone says 0
        ([[0.6, 0.4, 0.0], [0.1, 0.9, 0.0]], (1, 1)),  # one vote each for 0 and 1; 1 is surer
        ([[0.9, 0.1, 0.0], [0.4, 0.6, 0.0]], (0, 0)),
        ([[0.4, 0.3, 0.3], [0.3, 0.3, 0.4]], (0, 0)),  # a tie in both: the first
        ([[0.51, 0.49], [0.51, 0.49], [0.51, 0.49], [0.0, 1.0], [0.0, 1.0]], (0, 1)),
    ):
        vote, mean = decide_together(torch.tensor([views]).log(), uncalibrated(is_multilabel=False))
        assert (vote.item(), mean.item()) == expected


def test_views_of_more_begin_with_those_of_fewer():
    assert torch.equal(_public_bits(9, 12)[:, :5], _public_bits(9, 5))
    bits = _public_bits(500, 40)
    assert bits.min() >= 0 and bits.max() < 2**32 and len(bits.unique()) > 19_990


def test_a_threshold_decides_with_views_as_it_does_without():
    """Where views are alike, both equal the plain decision: a reader compares rules, not decisions."""
    held_out, network = images(symmetric=True), model()
    two = lambda outputs: outputs[:, :2]  # noqa: E731
    outputs = two(predict_logits(network, held_out))
    held_out = dataclasses.replace(held_out, labels=held_out.labels.clamp(max=1))
    for probability in (0.2, 0.5, 0.8):
        threshold = Threshold(positive="b", probability=probability, aim="sensitivity", at=0.9)
        for shifts in (None, [0.7, -0.7]):
            fitted = Calibration(temperature=0.3, shifts=shifts, fitted_on="folder", num_images=60, threshold=threshold)
            plain = float((fitted.decided(outputs, "ab") == held_out.labels).double().mean())
            found = augtest(network, held_out, FLIP, 4, two, fitted, "ab")
            assert found == WithViews(4, plain, plain)


def test_with_as_many_votes_the_threshold_decides_by_the_mean():
    threshold = Threshold(positive="ill", probability=0.2, aim="sensitivity", at=0.9)
    fitted = Calibration(temperature=1.0, fitted_on="folder", num_images=60, threshold=threshold)
    ill = torch.tensor([[0.1, 0.35], [0.15, 0.45], [0.01, 0.21]], dtype=torch.float64)
    logits = torch.stack([torch.zeros_like(ill), torch.logit(ill)], 2)
    vote, mean = decide_together(logits, fitted, ("well", "ill"))
    assert vote.tolist() == mean.tolist() == [1, 1, 0]  # means of 0.225, 0.3 and 0.11
