"""The torch.func engine: vmap over examples of the gradient of one example's loss; and the clipped sum as a pure
function of the parameters, for many parameter sets side by side.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from sfumato.clipping.clip import Clip, Coefficient, clipped_rows
from sfumato.clipping.protocol import Batch, ClippedGrad, Engine, Loss, example_losses
from sfumato.clipping.random_layers import KeyedDraws
from sfumato.torch_internals import tree_map


class FuncEngine(Engine):
    """See `sfumato.clipping.protocol.Engine`. The model sees the K views of one example at a time."""

    def clipped_sum(self, coefficient: Coefficient, evaluated: Any, batch: Batch) -> ClippedGrad:
        """See `sfumato.clipping.protocol.Engine`."""
        trained = {name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad}
        with KeyedDraws(batch.seeds, batch.draw_dims, grouped=True):
            gradients, losses = _per_example(trained, self.model, self.loss_fn, batch)
        sums, norms = clipped_rows(gradients, losses, batch.is_real, coefficient)
        return ClippedGrad(sums, norms, losses)


def _per_example(
    parameters: dict[str, torch.Tensor], model: nn.Module, loss_fn: Loss, batch: Batch
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Gradients (m, *shape of the parameter) and (m,) losses."""

    def of_example(
        parameters: dict[str, torch.Tensor], views: torch.Tensor, weights: torch.Tensor, *targets: torch.Tensor
    ) -> torch.Tensor:
        outputs = functional_call(model, parameters, (views,))
        # (K, *shape for one row); rows are the first dimension unless there is one alone.
        dim = min(1, len(views) - 1)
        rows = tree_map(lambda leaf: leaf.unsqueeze(dim) if isinstance(leaf, torch.Tensor) else leaf, outputs)
        return example_losses(loss_fn, rows, tuple(target[None] for target in targets), weights[None])[0]

    in_dims = (None, 0, 0, *[0] * len(batch.targets))
    per_example = vmap(grad_and_value(of_example), in_dims=in_dims, randomness="different")
    return per_example(parameters, batch.inputs, batch.weights, *batch.targets)


def clipped_sum(
    parameters: Mapping[str, torch.Tensor],
    model: nn.Module,
    loss_fn: Loss,
    views: torch.Tensor,
    targets: Sequence[torch.Tensor],
    is_real: torch.Tensor,
    *,
    clipping_norm: float,
) -> dict[str, torch.Tensor]:
    r"""The sum of clipped per-example gradients at ``parameters``, as `clipped_grad` divides it by C.

    A function of its arguments alone: it reads no parameter of the model, keeps nothing, and takes no
    branch on a value. So `torch.func.vmap` over stacked parameters computes many models at once.

    Guarantee: putting one example in or leaving it out moves the sum by at most 1 in L2 norm, up to
    float rounding, *if* no row of the model's output depends on another image. `clipped_grad` holds
    model and loss to that; this function does not, so `prepare` a `GradFn` of the same model first. An
    example that is no real one, or whose loss or gradient norm is not finite, contributes exactly zero.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)  # output w.x: its gradient is x
        >>> x, real = torch.tensor([[[3.0, 4.0]], [[0.3, 0.4]]]), torch.tensor([True, True])
        >>> def of_one(weight):
        ...     return clipped_sum({"weight": weight}, model, lambda out: out[:, 0], x, (), real, clipping_norm=1.0)
        >>> torch.func.vmap(of_one)(torch.zeros(1000, 1, 2))["weight"].shape
        torch.Size([1000, 1, 2])

    Args:
        parameters: Each trainable parameter's name -> its value, float32 or float64.
        model: Gives the formula, its buffers, and the parameters that are not named. It draws no random
            numbers.
        loss_fn: As in `clipped_grad`: of one row.
        views: (B, K, ...); losses of an example's K views are averaged.
        targets: Each (B, ...): one for each example.
        is_real: (B,) booleans; False for padding.
        clipping_norm: C > 0.

    Returns:
        Name -> the sum, of the parameter's shape and type.
    """
    shape = views.shape[:2]
    of_views = tuple(target.unsqueeze(1).expand(*shape, *target.shape[1:]) for target in targets)
    batch = Batch(views, of_views, views.new_full(shape, 1 / shape[1]), is_real)
    gradients, losses = _per_example(dict(parameters), model, loss_fn, batch)
    sums, _ = clipped_rows(gradients, losses, is_real, Clip(clipping_norm, rescale=True))
    return {name: total.to(parameters[name].dtype) for name, total in sums.items()}
