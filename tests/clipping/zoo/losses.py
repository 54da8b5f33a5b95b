"""Losses with state, with random numbers, of several rows; and ordinary ones."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.clipping.zoo.entry import Entry, cross_entropy, net


def threshold():
    """Counts losses above a running mean twice."""
    mean = [0.0]

    def loss(outputs, targets):
        losses = cross_entropy(outputs, targets)
        mean[0] = 0.9 * mean[0] + 0.1 * losses.detach().mean()
        return torch.where(losses > mean[0], 2 * losses, losses)

    return loss


class Threshold(nn.Module):
    """The same in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, outputs, targets):
        losses = cross_entropy(outputs, targets)
        self.mean = 0.9 * self.mean + 0.1 * losses.detach().mean()
        return losses * (1 + (losses.detach() > self.mean).float())


class InPlaceThreshold(Threshold):
    """The same, written in place."""

    def forward(self, outputs, targets):
        losses = cross_entropy(outputs, targets)
        self.mean.mul_(0.9).add_(0.1 * losses.detach().mean())
        return losses * (1 + (losses.detach() > self.mean).float())


def counting(number):
    """Doubles from the n-th call on."""
    calls = [0]

    def loss(outputs, targets):
        calls[0] += 1
        return cross_entropy(outputs, targets) * (2 if calls[0] >= number else 1)

    return loss


class Normalized(nn.Module):
    """Divides by the largest loss so far, a plain number."""

    largest = 1e-3

    def forward(self, outputs, targets):
        losses = cross_entropy(outputs, targets)
        self.largest = max(self.largest, losses.max().item())
        return losses / self.largest


def random_smoothing(outputs, targets):
    return cross_entropy(outputs + torch.randn_like(outputs), targets)


def dropped_logits(outputs, targets):
    return cross_entropy(F.dropout(outputs, 0.3), targets)


def centred(outputs, targets):
    losses = cross_entropy(outputs, targets)
    return losses - 0.5 * losses.mean()


def over_rows(outputs, targets):
    return cross_entropy(outputs, targets) / len(outputs)


def contrastive(outputs, targets):
    features = outputs.tanh()
    return cross_entropy(outputs, targets) + 0.1 * cross_entropy(features @ features.T, torch.arange(len(features)))


def of_next_target(outputs, targets):
    return cross_entropy(outputs, targets.roll(1, 0))


def hooked(outputs, targets):
    if outputs.requires_grad:
        outputs.register_hook(lambda grad: 2 * grad)
    return cross_entropy(outputs, targets)


def places_weigh(outputs, targets):
    return cross_entropy(outputs, targets) * (1 + torch.arange(len(outputs)))


def writes_into_outputs(outputs, targets):
    return cross_entropy(outputs.mul_(2), targets)


def smoothed(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


def weighted(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 2, 3, 4, 5]), reduction="none")


def focal(outputs, targets):
    losses = cross_entropy(outputs, targets)
    return losses * (1 - (-losses).exp()) ** 2


def distilled(outputs, targets):
    teacher = outputs.detach().tanh().softmax(1)
    return cross_entropy(outputs, targets) + F.kl_div(outputs.log_softmax(1), teacher, reduction="none").sum(1)


def one_hot(outputs, targets):
    return (outputs.sigmoid() - F.one_hot(targets, 5)).square().sum(1)


def of(name, says, loss, **expected):
    return Entry(f"loss_{name}", says, net, loss=loss, **expected)


ENTRIES = [
    of("threshold", "a running threshold in a closure", threshold),
    of("threshold_buffer", "a running threshold in a buffer", Threshold),
    of("threshold_in_place", "a running threshold written in place", InPlaceThreshold),
    of("second_call", "doubles from the second call on", lambda: counting(2)),
    of("tenth_call", "doubles from the tenth call on", lambda: counting(10)),
    of("largest", "divides by the largest loss so far", Normalized),
    of("random", "adds noise to logits", lambda: random_smoothing),
    of("dropout", "drops logits", lambda: dropped_logits),
    of("centred", "takes the mean loss off", lambda: centred),
    of("over_rows", "divides by the number of rows", lambda: over_rows),
    of("contrastive", "compares rows", lambda: contrastive),
    of("next_target", "takes the target of another row", lambda: of_next_target),
    of("places", "weighs rows by their number", lambda: places_weigh),
    of("hooked", "a hook that doubles the gradient of logits", lambda: hooked),
    of("in_place", "doubles logits in place", lambda: writes_into_outputs),
    of("smoothed", "label smoothing", lambda: smoothed, harmless=True, graph=True),
    of("weighted", "class weights", lambda: weighted, harmless=True, graph=True),
    of("focal", "a focal loss", lambda: focal, harmless=True, graph=True),
    of("distilled", "a detached target of its own", lambda: distilled, harmless=True, graph=True),
    of("one_hot", "squares of probabilities", lambda: one_hot, harmless=True, graph=True),
    of("module", "PyTorch's module", lambda: nn.CrossEntropyLoss(reduction="none"), harmless=True, graph=True),
]
