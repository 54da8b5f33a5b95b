import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from sfumato.data.images import ImageSet
from sfumato.evaluation.scores import Objective, interval, judged_right, only_class, score, wilson


def test_scores_equal_scikit_learns():
    source = torch.Generator().manual_seed(0)
    labels = (torch.rand(400, generator=source) < 0.3).long()
    logits = torch.randn(400, 2, generator=source) + torch.stack([1 - labels, labels], 1)
    scores = score(logits, labels)
    assert scores.accuracy == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    assert scores.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, logits.argmax(1)))
    assert scores.auroc == pytest.approx(roc_auc_score(labels, torch.softmax(logits, 1)[:, 1]))
    assert scores.majority_rate == int((labels == 0).sum()) / len(labels)
    assert scores.accuracy_top5 is None


def test_a_class_without_images_has_no_accuracy_and_does_not_count():
    scores = score(torch.eye(7)[[0, 1, 1, 3]], torch.tensor([0, 1, 2, 3]))
    assert scores.per_class == [1.0, 1.0, 0.0, 1.0, None, None, None]
    assert scores.balanced_accuracy == pytest.approx(0.75) and scores.auroc is None
    assert scores.accuracy_top5 is not None


def test_top5_counts_the_label_among_the_five_largest():
    logits = torch.arange(10.0).repeat(10, 1)
    assert score(logits, torch.arange(10)).accuracy_top5 == pytest.approx(0.5)


def test_class_proportions_shift_loss_and_decision_towards_the_smaller_class():
    objective, plain = Objective((0.75, 0.25)), Objective()
    outputs, labels = torch.zeros(1, 2), torch.tensor([1])
    assert objective.loss(outputs, labels) == pytest.approx(-torch.log(torch.tensor([0.25])).numpy())
    assert plain.loss(outputs, labels) == pytest.approx(-torch.log(torch.tensor([0.5])).numpy())
    assert objective.decision_logits(outputs).argmax() == 1 and torch.equal(plain.decision_logits(outputs), outputs)


def test_label_smoothing_is_the_loss_by_shares_of_each_label():
    outputs, labels = torch.randn(5, 4), torch.tensor([0, 1, 3, 0, 2])
    shares = 0.8 * torch.eye(4)[labels] + 0.2 / 4
    expected = -(shares * torch.log_softmax(outputs, 1)).sum(1)
    assert torch.allclose(Objective(label_smoothing=0.2).loss(outputs, labels), expected)


@pytest.mark.parametrize("outputs", [[float("nan"), 0.0], [float("inf"), 0.0], [3e38, -3e38]])
def test_a_run_that_diverged_is_scored_and_not_a_fault(outputs):
    scores = score(torch.tensor([outputs] * 4), torch.tensor([0, 1, 0, 1]))
    assert scores.accuracy == 0.5 and scores.auroc in (None, 0.5)


def test_an_image_that_is_damaged_or_relabelled_moves_the_number_judged_right_by_itself_alone():
    source = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(50, 3, generator=source), torch.randint(0, 3, (50,), generator=source)
    images = ImageSet(torch.zeros(50, 1, 8, 8, dtype=torch.uint8), labels, labels >= 0, (0.5,), (0.5,))
    right = (logits.argmax(1) == labels).int().tolist()
    assert judged_right(logits, images) == sum(right)
    for i in range(50):
        is_i = torch.arange(50) == i
        assert judged_right(logits, dataclasses.replace(images, readable=~is_i)) == sum(right) - right[i]
        relabelled = dataclasses.replace(images, labels=torch.where(is_i, (labels + 1) % 3, labels))
        assert abs(judged_right(logits, relabelled) - sum(right)) <= 1


def test_a_model_that_names_one_class_alone_is_found():
    for decided, only in (([1, 1, 1, 1], 1), ([1, 1, 0, 1], None)):
        assert only_class(torch.eye(3)[decided]) == only


@pytest.mark.parametrize(("num_people", "share"), [(40, 0.8), (150, 0.9)])
def test_intervals_of_people_hold_where_one_person_s_images_are_right_together(num_people, share):
    """A person's images are right with a probability of the person's own; intervals of independent images fail."""
    source, covered, as_independent = np.random.default_rng(num_people), 0, 0
    for _ in range(300):
        counts = source.integers(1, 9, num_people)
        chances = source.beta(share, 1 - share, num_people)
        people = np.repeat(np.arange(num_people), counts)
        right = torch.from_numpy(source.random(len(people)) < chances[people])
        (low, high), (lower, higher) = interval(right, people), wilson(int(right.sum()), len(right))
        covered += low <= share <= high
        as_independent += lower <= share <= higher
    assert covered >= 0.92 * 300 and as_independent < 0.8 * 300


def test_people_whose_images_are_all_alike_count_once_each():
    """As many independent images as a sample of people has degrees of freedom, and Student's t for them."""
    num_people, z = 12, stats.norm.ppf(0.975)
    right = torch.arange(num_people).repeat_interleave(5) < 7
    count = (num_people - 1) * (z / stats.t.ppf(0.975, num_people - 1)) ** 2
    found = interval(right, np.arange(num_people).repeat(5))
    assert found == pytest.approx(wilson(7 / 12 * count, count), abs=1e-6)


def test_people_with_one_image_each_are_independent_images():
    right = torch.tensor([True] * 30 + [False] * 7)
    assert interval(right, np.arange(37)) == wilson(30, 37) and interval(right[:0], np.arange(0)) is None
    assert interval(torch.ones(100, dtype=torch.bool), np.array(["a", "b"] * 50)) == wilson(2, 2)  # many images of two
    low, high = interval(right, np.zeros(37))
    assert high - low > 0.6
