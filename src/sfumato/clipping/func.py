"""The torch.func engine: vmap over examples of the gradient of one example's mean loss."""

from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from sfumato.clipping.draws import KeyedDraws
from sfumato.clipping.norms import at_least_float32, global_norms
from sfumato.clipping.outputs import is_usual, tensors_of
from sfumato.clipping.protocol import Batch, ClippedGrad, Coefficient, Engine, Loss
from sfumato.clipping.speed import Speed
from sfumato.clipping.user_code import catches, model_catches
from sfumato.errors import InputError
from sfumato.torch_internals import tree_map


class FuncEngine(Engine):
    """See `sfumato.clipping.protocol.Engine`."""

    def __init__(self, model: nn.Module, loss_fn: Loss, row: torch.Tensor, speed: Speed) -> None:
        if catches(loss_fn) or model_catches(model):
            raise InputError(
                "torch.func shows a model's code many images at once, and the code catches errors (try): "
                "one that a single image raises would be all others' too"
            )
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
            repeated = (target.expand(len(views), *target.shape).clone() for target in example_targets)
            # As in `LossGradients`: the loss sees no outputs that are not finite.
            usual = is_usual([value[None] for value in tensors_of(outputs)])[0]
            shown = tree_map(lambda value: _or_zero(usual, value), outputs)
            return torch.where(usual, self.loss_fn(shown, *repeated).mean(), torch.nan)

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


def _or_zero(usual: torch.Tensor, value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return torch.where(usual, value, 0.0) if is_float else value
