"""The torch.func engine: vmap over examples of the gradient of one example's loss."""

from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from sfumato.clipping.clip import clipped_rows
from sfumato.clipping.loss import example_losses
from sfumato.clipping.protocol import Batch, ClippedGrad, Coefficient, Engine, Loss
from sfumato.clipping.random_layers import KeyedDraws
from sfumato.clipping.speed import Speed
from sfumato.torch_internals import tree_map


class FuncEngine(Engine):
    """See `sfumato.clipping.protocol.Engine`. The model sees the K views of one example at a time."""

    def __init__(self, model: nn.Module, loss_fn: Loss, row: torch.Tensor, speed: Speed) -> None:
        self.model, self._loss_fn = model, loss_fn
        self.methods: dict[str, str] = {}

    def clipped_sum(self, coefficient: Coefficient, evaluated: Any, batch: Batch) -> ClippedGrad:
        """See `sfumato.clipping.protocol.Engine`."""
        parameters = {
            name: parameter.detach() for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }

        def of_example(
            parameters: dict[str, torch.Tensor], views: torch.Tensor, weights: torch.Tensor, *targets: torch.Tensor
        ) -> torch.Tensor:
            outputs = functional_call(self.model, parameters, (views,))
            # (K, *shape for one row); rows are the first dimension unless there is one alone.
            rows = tree_map(
                lambda leaf: leaf.unsqueeze(min(1, len(views) - 1)) if isinstance(leaf, torch.Tensor) else leaf, outputs
            )
            return example_losses(self._loss_fn, rows, tuple(target[None] for target in targets), weights[None])[0]

        per_example = vmap(
            grad_and_value(of_example), in_dims=(None, 0, 0, *[0] * len(batch.targets)), randomness="different"
        )
        with KeyedDraws(batch.seeds, batch.draw_dims, grouped=True):
            gradients, losses = per_example(parameters, batch.inputs, batch.weights, *batch.targets)
        sums, norms = clipped_rows(gradients, losses, batch.is_real, coefficient)
        return ClippedGrad(sums, norms, losses)
