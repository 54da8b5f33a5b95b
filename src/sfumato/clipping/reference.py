"""The slow engine that anyone can check by eye: every view alone, plain autograd."""

import torch
from torch import nn

from sfumato.clipping.draws import KeyedDraws
from sfumato.clipping.kept import Kept
from sfumato.clipping.norms import at_least_float32
from sfumato.clipping.outputs import is_usual, tensors_of
from sfumato.clipping.protocol import Batch, ClippedGrad, Coefficient, Engine, Loss
from sfumato.clipping.speed import Speed
from sfumato.clipping.stand_in import buffers_kept


class ReferenceEngine(Engine):
    """See `sfumato.clipping.protocol.Engine`."""

    def __init__(self, model: nn.Module, loss_fn: Loss, row: torch.Tensor, speed: Speed) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.methods: dict[str, str] = {}

    def clipped_sum(self, coefficient: Coefficient, batch: Batch) -> ClippedGrad:
        """See `sfumato.clipping.protocol.Engine`."""
        inputs, seeds = batch.inputs, batch.seeds
        named = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        parameters = list(named.values())
        grad_sum = {
            name: at_least_float32(torch.zeros_like(parameter, requires_grad=False))
            for name, parameter in named.items()
        }
        norms, losses = [], []
        kept = Kept(self.loss_fn)  # what the loss keeps of one view, no other meets
        kept.require_all()
        for i, real in enumerate(batch.is_real.tolist()):
            gradients = [torch.zeros_like(total) for total in grad_sum.values()]
            loss_mean = torch.zeros((), dtype=next(iter(grad_sum.values())).dtype, device=inputs.device)
            for j, view in enumerate(inputs[i]):
                with torch.enable_grad(), buffers_kept(self.model):
                    with KeyedDraws(None if seeds is None else seeds[i : i + 1, j : j + 1]):
                        outputs = self.model(view[None])
                    if not is_usual([value[None] for value in tensors_of(outputs)]):
                        loss_mean += torch.nan
                        gradients[0] += torch.nan
                        continue
                    own = (target[i, None].clone() for target in batch.targets)
                    try:
                        loss = self.loss_fn(outputs, *own).sum()  # one row
                        view_gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
                    finally:
                        kept.restore()
                loss_mean += loss.detach() / len(inputs[i])
                for gradient, view_gradient in zip(gradients, view_gradients, strict=True):
                    gradient += view_gradient / len(inputs[i])
            # Each term in double precision: here speed does not matter.
            norm = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
            norms.append(norm.to(loss_mean.dtype))
            losses.append(loss_mean)
            if real and loss_mean.isfinite() and norms[-1].isfinite():
                for total, gradient in zip(grad_sum.values(), gradients, strict=True):
                    total += coefficient(norms[-1]) * gradient
        kept.require_unwritten()
        return ClippedGrad(grad_sum, torch.stack(norms), torch.stack(losses))
