"""The slow engine that anyone can check by eye: every view alone, plain autograd."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sfumato.clipping.draws import KeyedDraws
from sfumato.clipping.loss import ExampleLosses
from sfumato.clipping.norms import at_least_float32
from sfumato.clipping.outputs import tensors_of
from sfumato.clipping.protocol import Batch, ClippedGrad, Coefficient, Engine, Loss
from sfumato.clipping.speed import Speed
from sfumato.clipping.stand_in import Held, model_kept
from sfumato.torch_internals import tree_map


class ReferenceEngine(Engine):
    """See `sfumato.clipping.protocol.Engine`."""

    def __init__(self, model: nn.Module, loss_fn: Loss, row: torch.Tensor, speed: Speed) -> None:
        self.model, self.losses = model, ExampleLosses(loss_fn)
        self.methods: dict[str, str] = {}

    def clipped_sum(self, coefficient: Coefficient, batch: Batch) -> ClippedGrad:
        """See `sfumato.clipping.protocol.Engine`."""
        inputs, seeds = batch.inputs, batch.seeds
        held = Held(self.model)  # once for all images of the microbatch
        named = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        parameters = list(named.values())
        grad_sum = {
            name: at_least_float32(torch.zeros_like(parameter, requires_grad=False))
            for name, parameter in named.items()
        }
        norms, losses = [], []
        for i, real in enumerate(batch.is_real.tolist()):
            gradients = [torch.zeros_like(total) for total in grad_sum.values()]
            loss_mean = torch.zeros((), dtype=next(iter(grad_sum.values())).dtype, device=inputs.device)
            for j, view in enumerate(inputs[i]):
                with torch.enable_grad(), model_kept(self.model, held):
                    with KeyedDraws(None if seeds is None else seeds[i : i + 1, j : j + 1]):
                        outputs = self.model(view[None])
                    own = tuple(target[i, None] for target in batch.targets)
                    loss, weights = self.losses(tree_map(_as_example, outputs), own, 1)
                    view_gradients = _pulled_back(tensors_of(outputs), weights, parameters)
                loss_mean += loss[0] / len(inputs[i])
                for gradient, view_gradient in zip(gradients, view_gradients, strict=True):
                    gradient += view_gradient / len(inputs[i])
            # Each term in double precision: here speed does not matter.
            norm = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
            norms.append(norm.to(loss_mean.dtype))
            losses.append(loss_mean)
            if real and loss_mean.isfinite() and norms[-1].isfinite():
                for total, gradient in zip(grad_sum.values(), gradients, strict=True):
                    total += coefficient(norms[-1]) * gradient
        return ClippedGrad(grad_sum, torch.stack(norms), torch.stack(losses))


def _as_example(leaf: Any) -> Any:
    return leaf.detach()[None] if isinstance(leaf, torch.Tensor) else leaf


def _pulled_back(
    outputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """The gradients of parameters, from the loss's gradient with respect to each output."""
    pairs = [(output, weight[0]) for output, weight in zip(outputs, weights, strict=True) if weight is not None]
    pairs = [(output, weight) for output, weight in pairs if output.requires_grad]
    found = torch.autograd.grad(
        [output for output, _ in pairs], parameters, [weight for _, weight in pairs], materialize_grads=True
    )
    return found
