"""The torch.func engine: vmap over examples of the gradient of one example's mean loss."""

from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from sfumato.clipping.norms import global_norms


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
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}

    def example_loss(parameters: dict[str, torch.Tensor], views: torch.Tensor, *example_targets: torch.Tensor) -> torch.Tensor:
        outputs = functional_call(model, parameters, (views,))  # K rows, all of one example
        repeated = (target.expand(len(views), *target.shape) for target in example_targets)
        return loss_fn(outputs, *repeated).mean()

    in_dims = (None, 0) + (0,) * len(targets)
    per_example = vmap(grad_and_value(example_loss), in_dims=in_dims, randomness="different")
    gradients, losses = per_example(parameters, inputs, *targets)
    # The norm is taken of exactly the values that are summed, after the conversion to float32.
    rows = {name: gradient.reshape(len(inputs), -1).to(grad_sum[name].dtype) for name, gradient in gradients.items()}
    norms = global_norms(rows.values())
    counts = is_real & norms.isfinite() & losses.isfinite()
    coefficients = torch.where(counts, coefficient(norms), 0.0)
    if not norms.isfinite().all():  # a coefficient of zero does not silence it: 0 * NaN is NaN
        rows = {name: torch.where(counts[:, None], row, 0.0) for name, row in rows.items()}
    for name, row in rows.items():
        grad_sum[name] += (coefficients.to(row.dtype) @ row).view_as(grad_sum[name])
    return norms, losses
