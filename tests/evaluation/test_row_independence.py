"""In evaluation mode, too, an image's answer is its own: models that compute each image alone only while they train."""

import dataclasses

import pytest
import torch
from torch import nn

from sfumato.clipping import findings
from sfumato.data.images import ImageSet
from sfumato.errors import InputError
from sfumato.evaluation.scores import (
    evaluation_finding,
    judged_right,
    predict_each_alone,
    predict_logits,
    require_rows_apart,
)
from sfumato.models import registry

ROW = torch.zeros(1, 1, 8, 8)


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.body(x) if self.training else self.answer(x)

    def answer(self, x):
        return self.body(x)


class Range(Net):
    def answer(self, x):
        return self.body((x - x.min()) / (x.max() - x.min() + 1e-6))


class Place(Net):
    def answer(self, x):
        return self.body(x) + torch.arange(float(len(x)))[:, None].sin() * torch.arange(10)


class Odd(Net):
    def answer(self, x):
        return self.body(x) * (len(x) % 2)


class InBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, 8, 8))

    def answer(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.body(x - self.mean)


class InParameter(Net):
    def answer(self, x):
        self.body[3].bias.data.add_(x.mean())
        return self.body(x)


class InAttribute(Net):
    last = 0.0

    def answer(self, x):
        out = self.body(x) + 3 * self.last
        self.last = out.flip(1)[:1].mean(0)
        return out


MIXING = [Range, Place, Odd, InBuffer, InParameter, InAttribute]


@pytest.mark.parametrize("kind", MIXING)
def test_a_model_that_looks_beside_an_image_in_evaluation_mode_alone_is_found(kind):
    model = kind().train()
    assert not findings(model, ROW)  # in train mode there is nothing to find
    found = evaluation_finding(model, ROW)
    assert found is not None and kind.__name__ in str(found) and model.training
    with pytest.raises(InputError, match="evaluation mode"):
        require_rows_apart(model, ROW)


def test_the_registry_s_own_judge_each_image_alone():
    for name, options in (("small_cnn", {}), ("wide_resnet", {"depth": 10, "width": 1})):
        model = registry.build(name, image_size=28, channels=1, num_classes=10, options=options, seed=0)
        assert evaluation_finding(model, torch.zeros(1, 1, 28, 28)) is None


def test_batch_norm_judges_each_image_alone_once_it_is_trained_and_without_running_statistics_it_does_not():
    for tracks in (True, False):
        norm = nn.BatchNorm2d(4, track_running_stats=tracks)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Flatten(), nn.Linear(144, 10))
        assert (evaluation_finding(model, ROW) is None) == tracks


@pytest.mark.parametrize("kind", [InBuffer, InParameter])
def test_trying_a_model_leaves_it_as_it_was(kind):
    model = kind().train()
    state, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    evaluation_finding(model, ROW)
    assert model.training and all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def made_up_images(count):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 120, (count, 1, 8, 8), generator=generator).to(torch.uint8)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return ImageSet(pixels, labels, labels >= 0, (0.2,), (0.3,))


def with_one_other(images, place, value):
    pixels = images.integers().clone()
    pixels[place] = value
    return dataclasses.replace(images, stored=pixels, rows=None)


@pytest.mark.parametrize("kind", [Net, Range, InBuffer, InParameter, InAttribute])
def test_judged_alone_an_image_moves_no_answer_but_its_own_whatever_the_model_does(kind):
    """What noise on the number judged right is certified for, by what happens when one of 30 images is another."""
    images = made_up_images(30)
    model = kind()
    answers = predict_each_alone(model, images)
    assert torch.equal(predict_each_alone(model, images), answers)  # nothing is left of the first time
    for place, value in ((0, 255), (0, 0), (7, 255), (29, 255)):
        changed, others = with_one_other(images, place, value), torch.arange(30) != place
        moved = predict_each_alone(model, changed)
        assert torch.equal(moved[others], answers[others])
        assert abs(judged_right(moved, changed) - judged_right(answers, images)) <= 1


def test_together_one_image_moves_the_number_judged_right_by_many():
    """What the law is there for: the same models, judged in batches."""
    images, model = made_up_images(240), Range()
    images = dataclasses.replace(images, labels=predict_logits(model, images).argmax(1))
    changed = with_one_other(images, 0, 255)
    right = [judged_right(predict_logits(model, each), each) for each in (images, changed)]
    assert abs(right[0] - right[1]) > 10


def test_alone_and_together_are_the_same_answers_where_the_law_is_kept():
    images = made_up_images(30)
    for model in (Net(), registry.build("small_cnn", image_size=8, channels=1, num_classes=10, options={}, seed=0)):
        alone = predict_each_alone(model, images)
        assert alone.shape == (30, 10) and torch.allclose(alone, predict_logits(model, images), atol=1e-5)
