"""The clipped sum as a pure function of the parameters, by `torch.func`: for many parameter sets side by
side.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from sfumato.clipping.clip import Clip, clipped_rows
from sfumato.clipping.loss import example_losses
from sfumato.clipping.protocol import Loss


def clipped_sum(
    parameters: Mapping[str, torch.Tensor],
    model: nn.Module,
    loss_fn: Loss,
    inputs: torch.Tensor,
    targets: Sequence[torch.Tensor],
    is_real: torch.Tensor,
    *,
    clipping_norm: float,
    augmult: int = 0,
    rescale_to_unit_norm: bool = True,
) -> dict[str, torch.Tensor]:
    r"""The sum of clipped per-example gradients at ``parameters``, as `clipped_grad` defines it.

    A function of its arguments alone: it reads no parameter of the model, keeps nothing, and takes no
    branch on a value. So `torch.func.vmap` over stacked parameters computes many models at once.

    Guarantee: putting one example in or leaving it out moves the sum by at most the sensitivity (1, or C
    without rescaling) in L2 norm, up to float rounding, *if* no row of the model's output depends on
    another image. `clipped_grad` holds model and loss to that; this function does not, so `prepare` a
    `GradFn` of the same model first. An example that is no real one, or whose loss or gradient norm is
    not finite, contributes exactly zero.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)  # output w.x: its gradient is x
        >>> x, real = torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.tensor([True, True])
        >>> def of_one(weight):
        ...     return clipped_sum({"weight": weight}, model, lambda out: out[:, 0], x, (), real, clipping_norm=1.0)
        >>> torch.func.vmap(of_one)(torch.zeros(1000, 1, 2))["weight"].shape
        torch.Size([1000, 1, 2])

    Args:
        parameters: Each trainable parameter's name -> its value, float32 or float64.
        model: Gives the formula, its buffers, and the parameters that are not named. It draws no random
            numbers.
        loss_fn: As in `clipped_grad`: of one row.
        inputs: (B, ...), or (B, K, ...) where ``augmult`` = K >= 1.
        targets: Each (B, ...): one for each example.
        is_real: (B,) booleans; False for padding.
        clipping_norm: C > 0.
        augmult: K, views per example, whose losses are averaged; 0: inputs are as they are.
        rescale_to_unit_norm: Divide the sum by C.

    Returns:
        Name -> the sum, of the parameter's shape and type.
    """
    views = inputs if augmult else inputs.unsqueeze(1)  # (B, K, ...)

    def of_example(parameters: dict[str, torch.Tensor], views: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        rows = functional_call(model, parameters, (views,)).unsqueeze(1)
        weights = views.new_full((1, len(views)), 1 / len(views))
        return example_losses(
            loss_fn, rows, tuple(target.expand(1, len(views), *target.shape) for target in own), weights
        )[0]

    per_example = vmap(grad_and_value(of_example), in_dims=(None, 0, *[0] * len(targets)))
    gradients, losses = per_example(dict(parameters), views, *targets)
    sums, _ = clipped_rows(gradients, losses, is_real, Clip(clipping_norm, rescale_to_unit_norm))
    return {name: total.to(parameters[name].dtype) for name, total in sums.items()}
