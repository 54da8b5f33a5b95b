"""One ordinary update: the mean gradient, without privacy."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sfumato.clipping.speed import Speed
from sfumato.data.views import Views
from sfumato.evaluation.objective import Objective
from sfumato.randomness import Stream
from sfumato.training.step import Randomness, Statistics


class OrdinaryStep:
    """The mean gradient of a batch by plain autograd: no clipping per example, no noise.

    Args:
        max_grad_norm: If given, the mean gradient is scaled to at most this norm and then
            divided by it, as clipping does per example, so that a learning rate tuned
            for private updates keeps its meaning.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        views: Views,
        microbatch_size: int,
        max_grad_norm: float | None,
        speed: Speed,
    ) -> None:
        self.model: Any = torch.compile(model) if speed.compile else model
        self.precision, self.objective, self.views = speed.precision, objective, views
        self.microbatch_size, self.max_grad_norm = microbatch_size, max_grad_norm

    def collect(
        self,
        examples: Any,
        parameters: Mapping[str, torch.Tensor],
        randomness: Randomness,
        *,
        with_norms: bool = False,
    ) -> tuple[dict[str, torch.Tensor], Statistics]:
        """The mean gradient of the readable images; there are no single examples' norms that could
        be added.
        """
        device = next(iter(parameters.values())).device
        drawn = torch.from_numpy(randomness.indices)
        drawn = drawn[examples.readable[drawn]]
        count = max(len(drawn), 1)
        gradient = {name: torch.zeros_like(value) for name, value in parameters.items()}
        total_loss = 0.0
        for indices in drawn.split(self.microbatch_size):
            inputs, labels = self.views.with_labels(examples, indices, randomness.view_bits, device)
            if self.views.augmult:
                inputs = inputs.flatten(0, 1)  # (b K, C, H, W)
                labels = labels.repeat_interleave(self.views.augmult)
            with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                outputs = self.model(inputs)
            loss = self.objective.loss(outputs.to(inputs.dtype), labels).sum() / (count * max(self.views.augmult, 1))
            found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
            for name, value in zip(parameters, found, strict=True):
                gradient[name] += value
            total_loss += float(loss.detach())
        norm = float(torch.linalg.vector_norm(torch.stack([value.norm() for value in gradient.values()])))
        if self.max_grad_norm is not None:
            scale = min(1 / self.max_grad_norm, 1 / max(norm, 1e-12))
            gradient = {name: value * scale for name, value in gradient.items()}
        return gradient, Statistics(total_loss, 0.0, norm, 0.0)

    def release(self, gradient: dict[str, torch.Tensor], noise: Stream) -> dict[str, torch.Tensor]:
        """The same: nothing is added."""
        return gradient
