"""A linear classifier on features: the gradient of one example is error x feature, so nothing has to
be written out.

For outputs W x + b the gradient by (W, b) is e (x, 1)', with e the loss's gradient by the outputs;
its norm is ||e|| ||(x, 1)||, a product of sums of squares, in which nothing cancels.
"""

import torch
from torch import nn

from sfumato.clipping.loss import ExampleLosses
from sfumato.clipping.norms import row_norms
from sfumato.clipping.protocol import Batch, ClippedGrad, Coefficient, Engine, Loss
from sfumato.clipping.speed import Speed
from sfumato.errors import InputError
from sfumato.nn import Classifier

MICROBATCH_SIZE = 2048
_SHORT = 4096


class ClosedFormEngine(Engine):
    """See `sfumato.clipping.protocol.Engine`. Takes `sfumato.nn.Classifier` with one view an example."""

    parallel = True

    def __init__(self, model: nn.Module, loss_fn: Loss, row: torch.Tensor, speed: Speed) -> None:
        if not isinstance(model, Classifier) or row.ndim != 2 or not all(p.requires_grad for p in model.parameters()):
            raise InputError("the closed form is for a linear classifier on features, all of whose parameters train")
        self.methods: dict[str, str] = {}
        self._model = model
        self._names = {id(value): name for name, value in model.named_parameters()}
        self._losses = ExampleLosses(loss_fn)

    def renew(self) -> None:
        """See `sfumato.clipping.protocol.Engine`."""
        self._losses.renew()

    def clipped_sum(self, coefficient: Coefficient, batch: Batch) -> ClippedGrad:
        """See `sfumato.clipping.protocol.Engine`."""
        if batch.inputs.shape[1] != 1:
            raise InputError("the closed form is for one view of each example")
        weight, bias = self._model.layer.weight, self._model.layer.bias
        features = batch.inputs[:, 0]
        # The few rows of the weight first: half the time of `F.linear` on a CPU, which is that of
        # reading the features.
        outputs = (weight @ features.T).T
        outputs = outputs if bias is None else outputs + bias
        losses, (errors,) = self._losses(outputs[:, None], batch.targets, 1)
        assert errors is not None
        errors = errors[:, 0]
        # A row of a few thousand is summed in lanes, to less than 1e-5.
        short = features.shape[1] <= _SHORT
        lengths = torch.linalg.vector_norm(features, dim=1) if short else row_norms(features)
        if bias is not None:
            lengths = torch.hypot(lengths, torch.ones_like(lengths))
        norms = torch.linalg.vector_norm(errors, dim=1) * lengths
        finite = norms.isfinite() & losses.isfinite()
        coefficients = torch.where(batch.is_real & finite, coefficient(norms), 0.0)
        if not finite.all():  # a coefficient of zero does not silence it: 0 * NaN is NaN
            errors = torch.where(finite[:, None], errors, 0.0)
            features = torch.where(finite[:, None], features, 0.0)
        clipped = errors * coefficients[:, None].to(errors.dtype)
        sums = {self._names[id(weight)]: clipped.T @ features}
        if bias is not None:
            sums[self._names[id(bias)]] = clipped.sum(0)
        return ClippedGrad(sums, norms, losses)
