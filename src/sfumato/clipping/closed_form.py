"""A linear classifier on features: the gradient of one example is error x feature, so nothing has to
be written out.

For outputs W x + s b, s a constant, the gradient by (W, b) is e (x, s)', with e the loss's gradient by the outputs;
its norm is ||e|| ||(x, s)||, a product of sums of squares, in which nothing cancels.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping.clip import at_least_float32, row_norms
from sfumato.clipping.protocol import Batch, ClippedGrad, Coefficient, Engine, Loss, Speed, example_losses
from sfumato.errors import InputError
from sfumato.models.layers import Classifier, bias_scale

MICROBATCH_SIZE = 2048
_SHORT = 4096
_SMALL = 1e-10
"""Below this, squares of a length's parts may vanish in float32."""


class ClosedFormEngine(Engine):
    """See `sfumato.clipping.protocol.Engine`. Takes `sfumato.models.layers.Classifier` with one view an example."""

    parallel = True

    def __init__(self, model: nn.Module, loss_fn: Loss, row: torch.Tensor, speed: Speed) -> None:
        if type(model) is not Classifier or row.ndim != 2 or not all(p.requires_grad for p in model.parameters()):
            raise InputError("is for a linear classifier on features, all of whose parameters train")
        weight = model.layer.weight
        if not isinstance(weight, nn.Parameter) or row.dtype != weight.dtype or at_least_float32(weight) is not weight:
            raise InputError("is for plain weights and features of one type, float32 at least")
        super().__init__(model, loss_fn, row, speed)
        self._layer, self._scale = model.layer, bias_scale(model.layer)

    def clipped_sum(self, coefficient: Coefficient, evaluated: Any, batch: Batch) -> ClippedGrad:
        """See `sfumato.clipping.protocol.Engine`."""
        if batch.inputs.shape[1] != 1:
            raise InputError("is for one view of each example")
        weight, bias, scale = self._layer.weight, self._layer.bias, self._scale
        features = batch.inputs[:, 0]
        outputs = F.linear(features, weight, None if bias is None else scale * bias).detach()
        with torch.enable_grad():
            losses = example_losses(self.loss_fn, outputs.requires_grad_()[:, None], batch.targets, batch.weights)
            (errors,) = torch.autograd.grad(losses.sum(), outputs)
        losses = losses.detach()
        # In float64, or two factors, of which one is tiny and one large, would seem to make nothing.
        lengths = _lengths(features, None if bias is None else scale)
        norms = torch.linalg.vector_norm(errors, dim=1, dtype=torch.float64) * lengths
        finite = norms.isfinite() & losses.isfinite()
        coefficients = torch.where(batch.is_real & finite, coefficient(norms), 0.0)
        if finite.is_cuda or not finite.all():  # a coefficient of zero does not silence it: 0 * NaN is NaN
            errors, features = (torch.where(finite[:, None], part, 0.0) for part in (errors, features))
        clipped = errors * coefficients[:, None].to(errors.dtype)
        names = {id(value): name for name, value in self.model.named_parameters()}
        sums = {names[id(weight)]: clipped.T @ features}
        if bias is not None:
            sums[names[id(bias)]] = scale * clipped.sum(0)
        return ClippedGrad(sums, norms.to(losses.dtype), losses)


def _lengths(features: torch.Tensor, constant: float | None) -> torch.Tensor:
    """Of each (feature, constant), or of the feature alone: (m,) float64."""
    # A row of a few thousand is summed in lanes, to less than 1e-5.
    short = features.shape[1] <= _SHORT
    lengths = (torch.linalg.vector_norm(features, dim=1) if short else row_norms(features)).double()
    if constant is not None:
        return torch.hypot(lengths, torch.full_like(lengths, constant))
    small = lengths < _SMALL
    if small.is_cuda or small.any():  # a GPU is not waited for
        lengths = torch.where(small, torch.linalg.vector_norm(features, dim=1, dtype=torch.float64), lengths)
    return lengths
