"""The slow engine that anyone can check by eye: every view alone, plain autograd."""

from typing import Any

import torch

from sfumato.clipping.clip import at_least_float32
from sfumato.clipping.protocol import Batch, ClippedGrad, Coefficient, Engine, example_losses
from sfumato.clipping.random_layers import KeyedDraws
from sfumato.torch_internals import tree_map


class ReferenceEngine(Engine):
    """See `sfumato.clipping.protocol.Engine`."""

    def clipped_sum(self, coefficient: Coefficient, evaluated: Any, batch: Batch) -> ClippedGrad:
        """See `sfumato.clipping.protocol.Engine`."""
        named = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        grad_sum = {name: at_least_float32(torch.zeros_like(value)).detach() for name, value in named.items()}
        norms, losses = [], []
        for i, is_real in enumerate(batch.is_real.tolist()):
            gradients = [torch.zeros_like(total) for total in grad_sum.values()]
            loss = batch.weights.new_zeros(())
            for j, view in enumerate(batch.inputs[i]):
                seeds = None if batch.seeds is None else batch.seeds[i : i + 1, j : j + 1]
                own = tuple(target[i : i + 1, j : j + 1] for target in batch.targets)
                with torch.enable_grad(), KeyedDraws(seeds):
                    outputs = tree_map(_as_row, self.model(view[None]))
                    of_view = example_losses(self.loss_fn, outputs, own, batch.weights[i : i + 1, j : j + 1])[0]
                    found = torch.autograd.grad(of_view, list(named.values()), materialize_grads=True)
                loss = loss + of_view.detach()
                for gradient, of_parameter in zip(gradients, found, strict=True):
                    gradient += of_parameter
            # Each term in double precision: here speed does not matter.
            norm = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
            norms.append(norm.to(loss.dtype))
            losses.append(loss)
            if is_real and loss.isfinite() and norm.isfinite():
                for total, gradient in zip(grad_sum.values(), gradients, strict=True):
                    total += coefficient(norms[-1]) * gradient
        return ClippedGrad(grad_sum, torch.stack(norms), torch.stack(losses))


def _as_row(leaf: Any) -> Any:
    return leaf[None] if isinstance(leaf, torch.Tensor) else leaf
