"""A trained network as what is handed on: from pixels to a decision, and nothing of PyTorch's own."""

import copy

import torch
from torch import nn

from sfumato.evaluation.calibration import uncalibrated
from sfumato.evaluation.trained import Trained
from sfumato.json_record import pick
from sfumato.models.layers import WeightStandardizedConv2d, replaced
from sfumato.models.textures import dead_leaves


class Deployed(nn.Module):
    """Constants of images, network, temperature, softmax and decision in one module.

    Shape:
        (rows, height, width, channels), uint16 of one channel, uint8 of three -> class (rows,), int64, or of several
        labels an image (rows, classes), 1 for each that is named; and probabilities (rows, classes), float32, which
        mean nothing where nobody calibrated them
    """

    scale: torch.Tensor
    shift: torch.Tensor
    decision_shift: torch.Tensor
    offsets: torch.Tensor
    shifts: torch.Tensor
    boundaries: torch.Tensor

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        channels = trained.shape[0]
        most = 65535 if channels == 1 else 255
        mean, std = (torch.tensor(trained.decoding[key], dtype=torch.float64) for key in ("mean", "std"))
        self.register_buffer("scale", (1 / (most * std)).float()[:, None, None])
        self.register_buffer("shift", (mean / std).float()[:, None, None])
        self.model = folded(trained.model)
        zeros, self.is_multilabel = torch.zeros(len(trained.classes)), trained.objective.is_multilabel
        self.register_buffer("decision_shift", trained.objective.decision_logits(zeros[None]))
        calibration = trained.calibration or uncalibrated(self.is_multilabel)
        self.temperature, self.names_the_largest = calibration.temperature, calibration.names_the_largest
        self.place, self.threshold = None, 0.0
        if calibration.threshold is not None:
            self.place = trained.classes.index(calibration.threshold.positive)
            self.threshold = _in_float32(calibration.threshold.probability)
        self.register_buffer("offsets", zeros if calibration.offsets is None else torch.tensor(calibration.offsets))
        self.register_buffer("shifts", zeros if calibration.shifts is None else torch.tensor(calibration.shifts))
        self.register_buffer("boundaries", torch.tensor([_in_float32(each) for each in calibration.boundaries]))

    def decisive(self, pixels: torch.Tensor) -> torch.Tensor:
        """(rows, classes): the outputs that decide."""
        images = pixels.permute(0, 3, 1, 2).float() * self.scale - self.shift
        return self.model(images) + self.decision_shift

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        decisive = self.decisive(pixels)
        if self.is_multilabel:
            probabilities = torch.sigmoid(decisive / self.temperature)
            named = decisive > 0 if self.names_the_largest else probabilities >= self.boundaries
            return named.long(), probabilities
        probabilities = torch.softmax((decisive + self.offsets) / self.temperature + self.shifts, 1)
        if self.place is not None:
            is_positive = probabilities[:, self.place] >= self.threshold
            return torch.where(is_positive, self.place, 1 - self.place), probabilities
        return (decisive if self.names_the_largest else probabilities).argmax(1), probabilities


def _in_float32(probability: float) -> float:
    """Above 1, too, where no image is named."""
    return probability if probability <= 1 else 2.0


def folded(model: nn.Module) -> nn.Module:
    """A copy in which standardised convolutions are plain ones, with the kernels that they amount to."""

    def plain(conv: WeightStandardizedConv2d) -> nn.Module:
        names = "in_channels out_channels kernel_size stride padding dilation groups padding_mode".split()
        made = nn.Conv2d(**pick(conv, *names), bias=conv.bias is not None)
        made.weight.data, made.bias = conv.standardized_weight().detach(), conv.bias
        return made

    return replaced(copy.deepcopy(model), WeightStandardizedConv2d, plain).eval()


def trial_images(trained: Trained, count: int) -> torch.Tensor:
    """Made-up images for comparisons, half of textures and half of noise: (count, height, width, channels), of the type
    that `Deployed` takes.
    """
    channels, size, _ = trained.shape
    textures = torch.from_numpy(dead_leaves(count - count // 2, size, channels))
    noise = torch.rand(count // 2, channels, size, size, generator=torch.Generator().manual_seed(0))
    unit = torch.cat([0.2 * textures.float() + 0.5, noise]).clamp(0, 1).permute(0, 2, 3, 1)
    return (unit * 65535).round().to(torch.uint16) if channels == 1 else (unit * 255).round().to(torch.uint8)
