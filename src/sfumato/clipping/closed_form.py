"""A linear classifier on features: the gradient of one example is error x feature, so nothing has to
be written out.

For outputs W x + s b, s a constant, the gradient by (W, b) is e (x, s)', with e the loss's gradient by the outputs;
its norm is ||e|| ||(x, s)||, a product of sums of squares, in which nothing cancels.

Libraries multiply the last columns of a matrix, those that fill no whole block, by another kernel,
which rounds differently; one image more or less would then move the others from one kernel to the
other. So the columns are filled up to whole blocks, and the engine looks whether equal features have
equal outputs in every place.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping.loss import ExampleLosses
from sfumato.clipping.norms import at_least_float32, row_norms
from sfumato.clipping.protocol import Batch, ClippedGrad, Coefficient, Engine, Loss
from sfumato.clipping.speed import Speed
from sfumato.errors import InputError
from sfumato.models.layers import Classifier, bias_scale
from sfumato.torch_internals import HOOKS, global_hooks

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

MICROBATCH_SIZE = 2048
_SHORT = 4096
_BLOCK = 64
"""Columns: a multiple of what a kernel takes at once."""
_SMALL = 1e-10
"""Below this, squares of a length's parts may vanish in float32."""


class ClosedFormEngine(Engine):
    """See `sfumato.clipping.protocol.Engine`. Takes `sfumato.models.layers.Classifier` with one view an example."""

    parallel = True

    def __init__(self, model: nn.Module, loss_fn: Loss, row: torch.Tensor, speed: Speed) -> None:
        if not _is_plain(model) or row.ndim != 2 or not all(p.requires_grad for p in model.parameters()):
            raise InputError("the closed form is for a linear classifier on features, all of whose parameters train")
        assert isinstance(model, Classifier)
        weight = model.layer.weight
        if not isinstance(weight, nn.Parameter) or row.dtype != weight.dtype or at_least_float32(weight) is not weight:
            raise InputError("the closed form is for plain weights and features of one type, float32 at least")
        self.methods: dict[str, str] = {}
        self._model = model
        self.losses = ExampleLosses(loss_fn)
        feature = torch.randn(row.shape[1], generator=torch.Generator().manual_seed(0)).to(model.layer.weight)
        alike = (product for product in _PRODUCTS if _is_alike_in_every_place(product, model.layer.weight, feature))
        product = next(alike, None)
        if product is None:
            raise InputError("a product of matrices rounds differently from place to place on this machine")
        self._product = product

    def clipped_sum(self, coefficient: Coefficient, batch: Batch) -> ClippedGrad:
        """See `sfumato.clipping.protocol.Engine`."""
        if batch.inputs.shape[1] != 1:
            raise InputError("the closed form is for one view of each example")
        weight, bias = self._model.layer.weight, self._model.layer.bias
        scale = bias_scale(self._model.layer)
        features = batch.inputs[:, 0]
        outputs = _outputs(self._product, weight, features)
        outputs = outputs if bias is None else outputs + scale * bias
        losses, (errors,) = self.losses(outputs[:, None], batch.targets, 1)
        assert errors is not None
        errors = errors[:, 0]
        # In float64, or two factors, of which one is tiny and one large, would seem to make nothing.
        norms = torch.linalg.vector_norm(errors, dim=1, dtype=torch.float64) * _lengths(
            features, None if bias is None else scale
        )
        finite = norms.isfinite() & losses.isfinite()
        coefficients = torch.where(batch.is_real & finite, coefficient(norms), 0.0)
        if not finite.all():  # a coefficient of zero does not silence it: 0 * NaN is NaN
            errors = torch.where(finite[:, None], errors, 0.0)
            features = torch.where(finite[:, None], features, 0.0)
        clipped = errors * coefficients[:, None].to(errors.dtype)
        names = {id(value): name for name, value in self._model.named_parameters()}
        sums = {names[id(weight)]: clipped.T @ features}
        if bias is not None:
            sums[names[id(bias)]] = scale * clipped.sum(0)
        return ClippedGrad(sums, norms.to(losses.dtype), losses)


# Each from (classes, D) and (m, D) to (m, classes). With the few rows of the weight first a product takes
# half the time on a CPU, which is that of reading the features; in float64 MKL rounds it by place.
_PRODUCTS: tuple[Product, ...] = (
    lambda weight, features: (weight @ features.T).T,
    lambda w, features: F.linear(features, w),
)


def _is_plain(model: nn.Module) -> bool:
    """Whether a model is a linear classifier and nothing else: no subclass, and no hooks."""
    hooks = (getattr(module, name) for module in model.modules() for name in HOOKS)
    own = type(model) is Classifier and "forward" not in vars(model)
    return own and not any(hooks) and not any(global_hooks())


def _outputs(product: Product, weight: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """(m, classes), of whole blocks of rows."""
    missing = -len(features) % _BLOCK
    return product(weight, F.pad(features, (0, 0, 0, missing)) if missing else features)[: len(features)]


def _is_alike_in_every_place(product: Product, weight: torch.Tensor, feature: torch.Tensor) -> bool:
    """Whether equal features have equal outputs."""
    made_up = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight)  # it may be all zeros
    with torch.no_grad():
        for count in (_BLOCK, 17 * _BLOCK, MICROBATCH_SIZE):
            outputs = _outputs(product, made_up, feature.expand(count, -1).contiguous())
            if not torch.equal(outputs, outputs[:1].expand_as(outputs)):
                return False
    return True


def _lengths(features: torch.Tensor, constant: float | None) -> torch.Tensor:
    """Of each (feature, constant), or of the feature alone: (m,) float64."""
    # A row of a few thousand is summed in lanes, to less than 1e-5.
    short = features.shape[1] <= _SHORT
    lengths = (torch.linalg.vector_norm(features, dim=1) if short else row_norms(features)).double()
    if constant is not None:
        return torch.hypot(lengths, torch.full_like(lengths, constant))
    small = lengths < _SMALL
    if small.any():
        exact = torch.linalg.vector_norm(features[small], dim=1, dtype=torch.float64)
        lengths = lengths.masked_scatter(small, exact)
    return lengths
