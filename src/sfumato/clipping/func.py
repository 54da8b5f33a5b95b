"""The torch.func engine: vmap over examples of the gradient of one example's mean loss."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from sfumato.clipping.draws import KeyedDraws
from sfumato.clipping.norms import at_least_float32, global_norms
from sfumato.clipping.protocol import Batch, ClippedGrad, Coefficient, Engine, Loss
from sfumato.clipping.speed import Speed


class FuncEngine(Engine):
    """See `sfumato.clipping.protocol.Engine`."""

    def __init__(self, model: nn.Module, loss_fn: Loss, row: torch.Tensor, speed: Speed) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.methods: dict[str, str] = {}

    def clipped_sum(self, coefficient: Coefficient, batch: Batch) -> ClippedGrad:
        """See `sfumato.clipping.protocol.Engine`."""
        parameters = {
            name: parameter.detach() for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }

        def example_loss(
            parameters: dict[str, torch.Tensor], views: torch.Tensor, *example_targets: torch.Tensor
        ) -> torch.Tensor:
            outputs = functional_call(self.model, parameters, (views,))  # K rows, all of one example
            repeated = (target.expand(len(views), *target.shape) for target in example_targets)
            return self.loss_fn(outputs, *repeated).mean()

        in_dims = (None, 0) + (0,) * len(batch.targets)
        per_example = vmap(grad_and_value(example_loss), in_dims=in_dims, randomness="different")
        with KeyedDraws(batch.seeds, self.draw_dims, grouped=True):
            gradients, losses = per_example(parameters, batch.inputs, *batch.targets)
        # The norm is taken of exactly the values that are summed, after the conversion to float32.
        rows = {name: at_least_float32(gradient.reshape(len(batch.inputs), -1)) for name, gradient in gradients.items()}
        norms = global_norms(rows.values())
        counts = batch.is_real & norms.isfinite() & losses.isfinite()
        coefficients = torch.where(counts, coefficient(norms), 0.0)
        if not norms.isfinite().all():  # a coefficient of zero does not silence it: 0 * NaN is NaN
            rows = {name: torch.where(counts[:, None], row, 0.0) for name, row in rows.items()}
        sums = {name: (coefficients.to(row.dtype) @ row).view(parameters[name].shape) for name, row in rows.items()}
        return ClippedGrad(sums, norms, losses)
