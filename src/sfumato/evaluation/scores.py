"""What a model answers for held-out images, and how good that is. These numbers are not private.

A model may compute each image alone while it trains, and look along the batch when it is used: `x - x.min()` of the
batch at test time, a softmax over the wrong dimension. Accuracies and answers then depend on how images are put
together: `evaluation_finding` says so. `sfumato.clipping` asks the same of training.
"""

import copy
import dataclasses
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping.model_check import Finding
from sfumato.clipping.probe import made_up_images, random_state_kept, temporary_values
from sfumato.config import DataConfig
from sfumato.data.examples import Examples
from sfumato.data.images import ImageSet
from sfumato.errors import InputError, refusing
from sfumato.models.trainable import ANY_NUMBER
from sfumato.torch_internals import QuickProducts

_ROWS, _ROWS_ON_GPU, _VALUES_ON_GPU = 128, 1024, 2**22
_Z = 1.959963984540054  # of a two-sided 95 % interval
# How far an answer may lie from that of the image alone, relative to the largest.
_TOLERANCE = 1e-2
_REMEDY = "Make it an operation on each image alone, in evaluation mode too (`self.training` is False there)."


@dataclasses.dataclass(frozen=True)
class Scores:
    """How decisions compare with labels.

    Attributes:
        balanced_accuracy: Mean of the per-class accuracies of the classes that occur.
        per_class: None for a class that does not occur.
        accuracy_top5: None below six classes.
        auroc: For two classes and finite outputs; of several labels an image the mean over them; else None.
        majority_rate: The accuracy of always naming the most frequent class.
    """

    accuracy: float
    balanced_accuracy: float
    per_class: list[float | None]
    accuracy_top5: float | None
    auroc: float | None
    majority_rate: float


def decided_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What is named without calibration, shaped like the labels: classes, or of each label whether an image has it."""
    return logits.argmax(1) if labels.ndim == 1 else (logits > 0).long()


def only_class(logits: torch.Tensor) -> int | None:
    """The one class that every image is taken for; None if several are named."""
    named = logits.argmax(1).unique().tolist()
    return named[0] if len(named) == 1 else None


def rows_at_once(images: Examples, device: torch.device) -> int:
    """How many images a network is given together to evaluate; on a GPU as many small ones as keep it busy."""
    fit = _VALUES_ON_GPU // math.prod(images.shape)
    return _ROWS if device.type == "cpu" else min(max(_ROWS, fit), _ROWS_ON_GPU)


@torch.no_grad()
def predict_logits(model: nn.Module, examples: Examples, chosen: torch.Tensor | None = None) -> torch.Tensor:
    """The model's outputs in evaluation mode, float32, shape (N, classes), on the CPU; of the chosen examples."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    parts = (torch.arange(len(examples)) if chosen is None else chosen).split(rows_at_once(examples, device))
    with QuickProducts():
        chunks = [_outputs(model, examples.batch(indices, device)).float() for indices in parts]
    model.train(was_training)
    return torch.cat(chunks).cpu()


def _outputs(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    if batch.ndim != 4:
        return model(batch)
    try:  # pooling on a CPU takes a fifth of the time when channels lie together
        return model(batch.contiguous(memory_format=torch.channels_last))
    except RuntimeError:  # a model that folds channels into rows by `view`
        return model(batch)


@torch.no_grad()
def predict_each_alone(model: nn.Module, images: ImageSet) -> torch.Tensor:
    """As `predict_logits`, but the model never sees two images at once.

    Guarantee: an image's row is a function of the weights, its own pixels and its place: it is
    computed as a batch of one, by a fresh copy of the model, with PyTorch's random numbers seeded by its place.
    What a model keeps outside of itself (in globals, files, generators of its own) is not seen here:
    `require_rows_apart` tries for that.
    """
    device = next(model.parameters()).device
    outputs = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for place in range(len(images)):
            torch.manual_seed(place)
            row = images.batch(torch.tensor([place]), device)
            outputs.append(copy.deepcopy(model).eval()(row).float().cpu())
    return torch.cat(outputs)


def evaluation_finding(model: nn.Module, row: torch.Tensor) -> Finding | None:
    """Why an image's answer in evaluation mode is not its own; None if nothing shows on made-up
    images: three of them together, each alone, and two of them in another order.

    Models whose output is not one tensor of rows are not judged.

    Args:
        model: Takes one tensor of rows. Its mode, parameters and buffers are afterwards what they were.
        row: (1, ...): shape, type and device of an input; its values are not used.

    Raises:
        InputError: If the model fails on made-up images.
    """
    images = made_up_images(3, 1, row, 1, only_pixels=True)[:, 0]
    failure = f"the model fails in evaluation mode on made-up images of shape {tuple(row.shape)}"
    its_faults = refusing(failure, ANY_NUMBER, Exception)
    with its_faults, random_state_kept(row), temporary_values(model, None, None), torch.no_grad():
        model.eval()
        together, alone = model(images), [model(image[None]) for image in images]
        if not isinstance(together, torch.Tensor) or not together.ndim or len(together) != 3:
            return None
        again = model(images[[2, 0]])
    answers = torch.cat(alone).double().nan_to_num()
    others = torch.cat([together, again]).double().nan_to_num()
    if (torch.cat([answers, answers[[2, 0]]]) - others).abs().max() <= _TOLERANCE * answers.abs().max():
        return None
    reason = "in evaluation mode gives an image beside or after other images another answer than the image alone"
    return Finding("", type(model).__name__, reason, _REMEDY)


def require_rows_apart(model: nn.Module, row: torch.Tensor) -> None:
    """Raises InputError with the `evaluation_finding`, if there is one."""
    found = evaluation_finding(model, row)
    if found is not None:
        raise InputError(str(found))


def judged_right(logits: torch.Tensor, images: ImageSet) -> int:
    """How many images are judged right; one that cannot be read is not.

    Guarantee: where each row of ``logits`` is its own image's alone (`predict_each_alone`), a sum
    of one term in {0, 1} for each image, so that an image that is damaged, mended or relabelled
    moves it by at most 1. For that ``images`` must hold unreadable ones in their places.

    Args:
        logits: (N, classes), already shifted as the decision demands.
        images: (N, ...), with the labels.
    """
    return int(((logits.argmax(1) == images.labels) & images.readable).sum())


def score(logits: torch.Tensor, labels: torch.Tensor, decided: torch.Tensor | None = None) -> Scores:
    """Scores decisions against labels.

    Args:
        logits: (N, classes), already shifted as the decision demands.
        labels: (N,), int64.
        decided: Of the labels' shape, int64; None: `decided_labels`.
    """
    decided = decided_labels(logits, labels) if decided is None else decided
    if labels.ndim == 2:
        return _score_several(logits, labels, decided)
    num_classes = logits.shape[1]
    correct = (decided == labels).double()
    counts = torch.bincount(labels, minlength=num_classes)
    hits = torch.bincount(labels, weights=correct, minlength=num_classes)
    per_class = [float(hit / count) if count else None for hit, count in zip(hits, counts, strict=True)]
    present = [value for value in per_class if value is not None]
    in_top5 = (logits.topk(min(5, num_classes), dim=1).indices == labels[:, None]).any(1)
    return Scores(
        accuracy=float(correct.mean()),
        balanced_accuracy=float(np.mean(present)),
        per_class=per_class,
        accuracy_top5=float(in_top5.double().mean()) if num_classes >= 6 else None,
        auroc=auroc(labels == 1, logits[:, 1].double() - logits[:, 0].double()) if num_classes == 2 else None,
        majority_rate=int(counts.max()) / int(counts.sum()),
    )


def _score_several(logits: torch.Tensor, labels: torch.Tensor, decided: torch.Tensor) -> Scores:
    """Among what is known; of a label that nothing is known of, None."""
    known, right = labels >= 0, decided == labels
    accuracies: list[float | None] = []
    balanced, areas, most = [], [], 0
    for own, outputs, hits in zip(labels.T, logits.double().T, right.T, strict=True):
        sides = [hits[own == side].double() for side in (0, 1) if (own == side).any()]
        accuracies.append(float(torch.cat(sides).mean()) if sides else None)
        if sides:
            balanced.append(float(np.mean([float(side.mean()) for side in sides])))
            most += max(map(len, sides))
            areas.append(auroc(own[own >= 0] == 1, outputs[own >= 0]))
    told = [area for area in areas if area is not None]
    return Scores(
        accuracy=float(right[known].double().mean()),
        balanced_accuracy=float(np.mean(balanced)),
        per_class=accuracies,
        accuracy_top5=None,
        auroc=float(np.mean(told)) if told else None,
        majority_rate=most / int(known.sum()),
    )


def interval(right: torch.Tensor, people: np.ndarray) -> list[float] | None:
    """95 % interval for the share of images that are judged right; None of none.

    Wilson's, of independent images. Where several are of one person the number of images is divided by
    the design effect (Kish 1965), at least 1, and corrected for few people as Korn and Graubard (1998)
    do.

    Args:
        right: (N,), bool.
        people: (N,), whose each image is.
    """
    count = len(right)
    if len(set(people)) == count:
        return wilson(int(right.sum()), count)
    place = torch.from_numpy(np.unique(people, return_inverse=True)[1])
    groups, share = int(place.max()) + 1, float(right.double().mean())
    if groups == 1 or share in (0.0, 1.0):
        return wilson(share * groups, groups)
    apart = torch.bincount(place, weights=right.double() - share)
    effect = groups / (groups - 1) * float(apart.square().sum()) / (count * share * (1 - share))
    from scipy import stats

    effective = count / max(effect, 1.0) * (_Z / float(stats.t.ppf(0.975, groups - 1))) ** 2
    return wilson(share * effective, effective)


def wilson(hits: float, count: float) -> list[float] | None:
    """Lower and upper end of a 95 % interval for a share (Wilson 1927); None of nothing."""
    if not count:
        return None
    share = hits / count
    centre = share + _Z**2 / (2 * count)
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    low, high = (centre - half) / scale, (centre + half) / scale
    return [max(min(low, share), 0.0), min(max(high, share), 1.0)]  # roundings at 0 and 1


def auroc(is_own: torch.Tensor, scores: torch.Tensor) -> float | None:
    """The share of pairs in which the class's own image scores higher, ties count half; None of one side alone, or
    where scores are not finite.
    """
    from sklearn.metrics import roc_auc_score

    if is_own.all() or not is_own.any() or not scores.isfinite().all():
        return None
    return float(roc_auc_score(is_own.numpy(), scores.numpy()))


@dataclasses.dataclass(frozen=True)
class Objective:
    """Cross-entropy, adjusted by public class proportions where they are given; of images that may have several labels,
    the mean of the binary cross-entropies of those that are known of an image.

    Privacy noise costs the smaller class first. With proportions p the loss sees
    outputs + log p, so that the outputs themselves score balanced classes, and the
    decision subtracts log p once more (docs/imbalance.md has the measurements).

    Attributes:
        class_proportions: Public, positive, one a class; None: plain cross-entropy.
        label_smoothing: Share of each label that is spread evenly over all classes (Szegedy et al.
            2016).
        is_multilabel: Whether labels are (rows, F): 1, 0, or -1 where it is unknown.
    """

    class_proportions: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    is_multilabel: bool = False

    @classmethod
    def of(cls, data: DataConfig, label_smoothing: float = 0.0) -> "Objective":
        """That of a recipe."""
        proportions = data.class_proportions
        return cls(tuple(proportions) if proportions else None, label_smoothing, data.task == "multilabel")

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One loss per row: (rows, classes), (rows,) or (rows, classes) -> (rows,)."""
        if self.is_multilabel:
            known, is_there = labels >= 0, labels.clamp(0, 1).to(outputs.dtype)
            each = F.binary_cross_entropy_with_logits(outputs, is_there, reduction="none")
            return (each * known).sum(1) / known.sum(1).clamp(min=1)
        if self.class_proportions is not None:
            outputs = outputs + _log_prior(self.class_proportions, outputs)
        return F.cross_entropy(outputs, labels, reduction="none", label_smoothing=self.label_smoothing)

    def decision_logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """What the decision takes the largest of, or of several labels those above 0: (rows, classes)."""
        return outputs if self.class_proportions is None else outputs - _log_prior(self.class_proportions, outputs)

    @property
    def offsets(self) -> list[float] | None:
        """By which the loss's outputs differ from what the decision takes the largest of, a class each;
        None: they do not differ. Probabilities are of the classes as often as they are.
        """
        if self.class_proportions is None:
            return None
        return (2 * _log_prior(self.class_proportions, torch.zeros(0, dtype=torch.float64))).tolist()


def _log_prior(class_proportions: tuple[float, ...], outputs: torch.Tensor) -> torch.Tensor:
    shares = torch.tensor(class_proportions, dtype=outputs.dtype, device=outputs.device)
    return torch.log(shares / shares.mean())
