"""The slow engine that anyone can check by eye: every view alone, plain autograd."""

from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call


def accumulate(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    coefficient: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,  # (m, K, ...)
    targets: tuple[torch.Tensor, ...],  # each (m, ...)
    is_real: torch.Tensor,  # (m,)
    grad_sum: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds each real example's coefficient(norm) times its gradient to `grad_sum`, in place.

    Returns:
        The gradient norms and the losses, both (m,).
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norms, losses = [], []
    for i, real in enumerate(is_real.tolist()):
        gradients = [torch.zeros_like(total) for total in grad_sum.values()]
        loss_mean = torch.zeros((), dtype=next(iter(grad_sum.values())).dtype, device=inputs.device)
        for view in inputs[i]:
            with torch.enable_grad():
                # Copies, so that a layer that updates its buffers leaves the model as it was.
                buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
                outputs = functional_call(model, buffers, (view[None],))
                loss = loss_fn(outputs, *(target[i, None] for target in targets)).sum()  # one row
                view_gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
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
    return torch.stack(norms), torch.stack(losses)
