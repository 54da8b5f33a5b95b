"""Convolutions: per-image weight gradients written out, or only their norms (ghost norms)."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from sfumato.clipping.clip import are_exact, at_least_float32, hidden, products, roundings, unit
from sfumato.clipping.graph.compile import guard, is_recording
from sfumato.clipping.graph.rules import linear
from sfumato.clipping.graph.rules.per_example import MaterializedGrads, Moments
from sfumato.clipping.graph.rules.site import SiteRecord

# Written-out gradients of more numbers than this (16 MiB in float32) lie in blocks of a few
# examples, of so many numbers each (4 MiB): between other tensors the C library finds a place for
# these, and none for one large block, so that memory grows.
_MAX_IN_ONE, _BLOCK = 2**22, 2**20

# Lengths of one that are no farther apart than this point in one direction, but for roundings.
_SAME_DIRECTION = 1e-5

# So many values of patches are made at once on a CPU that they stay in its cache: 4 MiB in float32.
_AT_ONCE = 2**20
# And so many bytes on a GPU, where those of all examples would take more memory than all else.
_MOST_BYTES = 2**29


@torch.library.custom_op("sfumato::conv_weight_gradients", mutates_args=())
def conv_weight_gradients(
    inputs: torch.Tensor,
    grads: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> torch.Tensor:
    """One ordinary weight gradient after another: sums over each example's rows.

    Args:
        inputs: (m, rows, C, *size).
        grads: (m, rows, O, *output size): gradients with respect to the convolution's output.
        weight: Only its shape is used.
        stride, padding, dilation, transposed, output_padding, groups: As in `aten.convolution`.

    Returns:
        (m, *shape of the weight), in the type of `grads`.
    """
    if groups > 1:  # torch 2.15 is silently wrong in float64 for some strides of one channels_last image
        inputs, grads, weight = inputs.contiguous(), grads.contiguous(), weight.contiguous()
    gradients = grads.new_empty(len(inputs), *weight.shape)
    for gradient, own_inputs, own_grads in zip(gradients, inputs, grads, strict=True):
        backward = torch.ops.aten.convolution_backward(
            own_grads,
            own_inputs,
            weight,
            None,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
            (False, True, False),
        )
        gradient.copy_(backward[1])
    return gradients


@conv_weight_gradients.register_fake
def _(inputs, grads, weight, stride, padding, dilation, transposed, output_padding, groups):
    return grads.new_empty(len(inputs), *weight.shape)


@torch.library.custom_op("sfumato::conv_weight_gradients_by_patches", mutates_args=())
def conv_weight_gradients_by_patches(
    inputs: torch.Tensor,
    grads: torch.Tensor,
    taps: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> torch.Tensor:
    """A matrix product of output gradients and patches, for a few examples at a time.

    Sums over each example's rows, of a two-dimensional convolution in one group, not transposed.

    Args:
        inputs: (m, rows, C, H, W).
        grads: (m, rows, O, *output size): gradients with respect to the convolution's output.
        taps: The kernel's height and width.
        stride, padding, dilation: As in `aten.convolution`.

    Returns:
        (m, O, C, *taps), in the type of `grads`.
    """
    examples, _, channels = inputs.shape[:3]
    grads = grads.transpose(1, 2)
    gradients = grads.new_empty(examples, grads.shape[1], channels, *taps)
    most = _AT_ONCE if inputs.device.type == "cpu" else _MOST_BYTES // inputs.element_size()
    at_once = max(1, most // (channels * taps[0] * taps[1] * grads[0, 0].numel()))
    for own_inputs, own_grads, gradient in zip(
        inputs.split(at_once), grads.split(at_once), gradients.split(at_once), strict=True
    ):
        seen = windows(own_inputs, taps, stride, padding, dilation)
        patches = seen.permute(0, 2, 5, 6, 1, 3, 4).flatten(4).flatten(1, 3)  # (n, C taps, rows positions)
        torch.bmm(own_grads.flatten(2), patches.transpose(1, 2), out=gradient.flatten(2))
    return gradients


@conv_weight_gradients_by_patches.register_fake
def _by_patches(inputs, grads, taps, stride, padding, dilation):
    return grads.new_empty(len(inputs), grads.shape[2], inputs.shape[2], *taps)


def windows(
    inputs: torch.Tensor, taps: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> torch.Tensor:
    """(m, rows, C, *output size, *taps): what the kernel sees at each position; a view of the
    images, padded where there is a border.

    Copied once, it makes patches sooner than `F.unfold` does.
    """
    (border_h, border_w), (step_h, step_w) = padding, stride
    size_h, size_w = ((number - 1) * step + 1 for number, step in zip(taps, dilation, strict=True))
    padded = F.pad(inputs, (border_w, border_w, border_h, border_h)) if border_h or border_w else inputs
    return padded.unfold(3, size_h, step_h).unfold(4, size_w, step_w)[..., :: dilation[0], :: dilation[1]]


TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


class _Problem:
    """A site in the form of `aten.convolution`: inputs (m, rows, C, *size), grads (m, rows, O, *out
    size).
    """

    def __init__(self, record: SiteRecord) -> None:
        args = record.args
        self.weight: torch.Tensor = args["weight"]
        self.transposed = record.site.operation in TRANSPOSED
        self.groups: int = args["groups"]
        dims = self.weight.ndim - 2
        self.stride, self.dilation = _per_dim(args["stride"], dims), _per_dim(args["dilation"], dims)
        self.output_padding = _per_dim(args.get("output_padding", 0), dims)
        self.inputs, self.grads = record.example_arg("input"), record.example_grad()
        padding = args["padding"]
        if isinstance(padding, str):
            if padding == "same":
                self.inputs = _pad_same(self.inputs, self.weight.shape[2:], self.dilation)
            padding = 0
        self.padding = _per_dim(padding, dims)

    def weight_gradient(
        self, grads: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, groups: int
    ) -> torch.Tensor:
        """The ordinary gradient of a weight, summed over rows."""
        return torch.ops.aten.convolution_backward(
            grads,
            inputs,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            groups,
            (False, True, False),
        )[1]

    def weight_gradients(self, inputs: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
        """One ordinary weight gradient for each of some examples, (n, *shape of the weight)."""
        return conv_weight_gradients(
            inputs,
            grads,
            self.weight,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )


def _per_dim(value: Any, dims: int) -> list[int]:
    values = [value] * dims if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _pad_same(inputs: torch.Tensor, kernel: torch.Size, dilation: list[int]) -> torch.Tensor:
    """What padding="same" adds: the odd one at the end (aten._convolution_mode)."""
    pads: list[int] = []
    for size, step in zip(reversed(kernel), reversed(dilation), strict=True):
        total = step * (size - 1)
        pads += [total // 2, total - total // 2]
    return F.pad(inputs, pads)


def bias(record: SiteRecord, argument: str) -> MaterializedGrads:
    """The output's gradient summed over everything but examples and channels."""
    grads = record.example_grad()  # (m, rows, O, *size)
    return MaterializedGrads(grads.flatten(3).sum(dim=(1, 3)) if grads.ndim > 3 else grads.sum(dim=1))


def loop(record: SiteRecord, argument: str) -> MaterializedGrads:
    """One ordinary weight gradient for each example."""
    problem = _Problem(record)
    return _written_out(record, problem, problem.weight_gradients)


def grouped(record: SiteRecord, argument: str) -> MaterializedGrads:
    """One convolution in which every example is a group of its own."""
    problem = _Problem(record)

    def side_by_side(inputs: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
        examples = len(inputs)
        inputs = inputs.transpose(0, 1).flatten(1, 2)  # (rows, n C, *size)
        grads = grads.transpose(0, 1).flatten(1, 2)
        weight = problem.weight.new_empty(
            examples * problem.weight.shape[0], *problem.weight.shape[1:]
        )  # its gradient does not depend on it
        gradient = problem.weight_gradient(grads.contiguous(), inputs.contiguous(), weight, examples * problem.groups)
        return gradient.unflatten(0, (examples, -1))

    return _written_out(record, problem, side_by_side)


def unfold(record: SiteRecord, argument: str) -> MaterializedGrads:
    """Patches times output gradients, a batched matrix product."""
    problem = _Problem(record)
    taps = list(problem.weight.shape[2:])

    def by_patches(inputs: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
        return conv_weight_gradients_by_patches(inputs, grads, taps, problem.stride, problem.padding, problem.dilation)

    return _written_out(record, problem, by_patches)


def _written_out(
    record: SiteRecord, problem: _Problem, weight_gradients: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> MaterializedGrads:
    """In several blocks where there are many numbers. A GPU's allocator, or a compiled graph, finds
    a place for one by itself.
    """
    values = problem.weight.numel()
    divides = record.grad.device.type == "cpu" and values * record.examples > _MAX_IN_ONE and not is_recording()
    at_once = max(1, _BLOCK // values) if divides else record.examples
    parts = zip(problem.inputs.split(at_once), problem.grads.split(at_once), strict=True)
    return MaterializedGrads(*itertools.starmap(weight_gradients, parts))


def can_unfold(record: SiteRecord) -> bool:
    """Whether `unfold` and `patch_ghost` know this convolution: two-dimensional, one group, not
    transposed.
    """
    return record.args["weight"].ndim == 4 and record.args["groups"] == 1 and record.site.operation not in TRANSPOSED


def ghost(record: SiteRecord, argument: str) -> "GhostGrads":
    """Norms from inner products of positions; the clipped sum as one ordinary weight gradient."""
    problem = _Problem(record)
    # Norms and the sum see the very same products, none of them rounded to less than float32.
    problem.inputs, problem.grads, problem.weight = (
        at_least_float32(tensor) for tensor in (problem.inputs, problem.grads, problem.weight)
    )
    output = None
    if (
        record.output is not None and record.output.dtype == problem.grads.dtype
    ):  # of bfloat16 it would lack half the digits
        output = record.site.out_layout.by_example(record.output, record.examples, record.views)
    return GhostGrads(problem, output, None if record.args["bias"] is None else at_least_float32(record.args["bias"]))


def can_ghost(record: SiteRecord) -> bool:
    """Whether `ghost` fits: what it sums must not be rounded otherwise than what it measures. cuDNN
    rounds to TF32 unless told not to.
    """
    return can_unfold(record) and are_exact("conv", record.grad.device)


def gram_values(record: SiteRecord) -> int:
    """Numbers that `ghost` keeps at its peak: inner products of all pairs of pixels and of
    positions.
    """
    inputs, grads = record.example_arg("input"), record.example_grad()
    pixels, positions = (tensor.shape[1] * math.prod(tensor.shape[3:]) for tensor in (inputs, grads))
    return record.examples * (pixels**2 + 2 * positions**2)


class GhostGrads:
    """Per-example gradients that are never written out."""

    def __init__(self, problem: _Problem, output: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        self.problem, self.bias = problem, bias
        channels, kernel = problem.weight.shape[1], problem.weight.shape[2:]
        self._positions = problem.grads.shape[1] * math.prod(problem.grads.shape[3:])
        self._share = unit(problem.grads) * (roundings(channels) + sum(kernel) + 2 * roundings(self._positions) + 1)
        # Now: the gradient is in the processor's cache, and the output need not be kept.
        grads = self._grads()
        self._squares, self._largest = self._channel_squares(grads)
        self._with_output = None
        if output is not None:
            self._with_output = torch.linalg.vecdot(output.transpose(1, 2).flatten(2), grads), grads.abs().sum(2)

    def square_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._squares.sum(1), self._share * self._largest.square().sum(1)

    def moments(self, directions: torch.Tensor, weight: torch.Tensor) -> Moments:
        problem, grads = self.problem, self._grads()
        channels, taps = problem.weight.shape[1], problem.weight[0, 0].numel()
        ones = torch.ones_like(problem.weight[:1, :1])
        sums = self._convolved(problem.inputs.sum(2, keepdim=True), ones)  # (m, rows, 1, *size)
        plain = products(grads, sums.flatten(1)[:, :, None])[..., 0]
        # A patch's sum is at most its length times the root of its size.
        share = unit(plain) * (roundings(channels) + taps + roundings(self._positions))
        plain_error = share * (channels * taps) ** 0.5 * self._largest
        along, along_error = self._along(grads, directions, weight)
        return Moments(self._squares, plain, along, (self._share * self._largest.square(), plain_error, along_error))

    def _along(
        self, grads: torch.Tensor, directions: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums over positions of grads times the convolution with the directions, and bounds on
        their rounding errors.

        Where each channel of the weight points in its direction, that convolution is the output
        without its bias, divided by a length, and need not be computed again.
        """
        rows = weight.flatten(1)
        length = torch.linalg.vecdot(rows, directions)
        apart = torch.linalg.vector_norm(rows / length[:, None] - directions, dim=1).to(grads.dtype)
        # Of a convolution nothing is known but how many terms it adds up.
        times = rows.shape[1] + 1 + roundings(self._positions)
        if self._with_output is None or not guard((apart <= _SAME_DIRECTION).all()):
            kernels = directions.view_as(self.problem.weight).to(self.problem.inputs.dtype)
            convolved = self._convolved(self.problem.inputs, kernels)
            along = torch.linalg.vecdot(convolved.transpose(1, 2).flatten(2), grads)
            return along, unit(grads) * times * self._largest
        with_output, sizes = self._with_output
        length = length.to(grads.dtype)
        bias = self.bias if self.bias is not None else torch.zeros_like(length)
        share = unit(grads) * (times + roundings(rows.shape[1]) + 4)
        error = (share + apart) * self._largest + 2 * share * (bias / length).abs() * sizes
        return (with_output - bias * grads.sum(2)) / length, error

    def _convolved(self, inputs: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        problem = self.problem
        rows = F.conv2d(inputs.flatten(0, 1), kernels, None, problem.stride, problem.padding, problem.dilation)
        return rows.unflatten(0, problem.inputs.shape[:2])

    def weighted_sum(self, coefficients: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        problem = self.problem
        grads = problem.grads * coefficients.to(problem.grads.dtype)[:, None, None, None, None]
        inputs = problem.inputs
        if counts is not None:
            mask = counts[:, None, None, None, None]
            grads, inputs = torch.where(mask, grads, 0.0), torch.where(mask, inputs, 0.0)
        return problem.weight_gradient(grads.flatten(0, 1), inputs.flatten(0, 1), problem.weight, problem.groups)

    def written_out(self) -> torch.Tensor:
        return self.problem.weight_gradients(self.problem.inputs, self.problem.grads)

    def _grads(self) -> torch.Tensor:
        """(m, O, rows positions): a copy where there are several rows."""
        return self.problem.grads.transpose(1, 2).flatten(2)

    def _channel_squares(self, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both (m, O): squares of each output channel's gradient norm, d' G d over pairs of
        positions, and the most that such a norm can be.
        """
        gram = self._gram()
        squares = torch.linalg.vecdot(products(grads, gram), grads).clamp(min=0)
        # |sum of x_t d_t| <= sum of |x_t| |d_t|: what the terms could have been that cancelled, and
        # so what roundings are a share of.
        lost = hidden(self.problem.weight[0].numel(), self._share, gram)
        lengths = (gram.diagonal(dim1=1, dim2=2).clamp(min=0) + lost).sqrt()
        return squares, torch.matmul(grads.abs(), lengths[:, :, None])[..., 0]

    def _gram(self) -> torch.Tensor:
        """(m, positions, positions) inner products of patches: shifted sums of those of pixels."""
        examples, rows, channels, height, width = self.problem.inputs.shape
        pixels = self.problem.inputs.transpose(1, 2).reshape(examples, channels, -1)
        of_pixels = products(pixels.transpose(1, 2), pixels).view(examples, rows, height, width, rows, height, width)
        positions = rows * math.prod(self.problem.grads.shape[3:])
        return _over_taps(_over_taps(of_pixels, 2, self.problem), 3, self.problem).view(examples, positions, positions)


def patch_ghost(record: SiteRecord, argument: str) -> "PatchGhost":
    """The ghost norm of a linear layer on patches, which are written out."""
    return PatchGhost(_Problem(record))


def overlaps(record: SiteRecord) -> bool:
    """Whether one pixel lies in several patches, which then take more memory than the images."""
    problem = _Problem(record)
    return any(
        step < (taps - 1) * apart + 1
        for step, taps, apart in zip(problem.stride, problem.weight.shape[2:], problem.dilation, strict=True)
    )


def patch_gram_values(record: SiteRecord) -> int:
    """Numbers that `patch_ghost` keeps at its peak: patches, and inner products of all pairs of
    positions.
    """
    grads = record.example_grad()
    positions = grads.shape[1] * math.prod(grads.shape[3:])
    return record.examples * positions * (record.args["weight"][0].numel() + 2 * positions)


class PatchGhost(linear.GhostGrads):
    """Per-example gradients that are never written out, of a weight as a matrix (O, C taps)."""

    def __init__(self, problem: _Problem) -> None:
        self._shape = problem.weight.shape[1:]
        seen = windows(problem.inputs, list(self._shape[1:]), problem.stride, problem.padding, problem.dilation)
        patches = seen.permute(0, 1, 3, 4, 2, 5, 6).flatten(4).flatten(1, 3)  # (m, rows positions, C taps)
        super().__init__(patches, problem.grads.flatten(3).transpose(2, 3).flatten(1, 2), linear.gram)

    def weighted_sum(self, coefficients: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        return super().weighted_sum(coefficients, counts).unflatten(1, self._shape)


def _over_taps(products: torch.Tensor, dim: int, problem: _Problem) -> torch.Tensor:
    """Sums over the kernel's taps along one dimension: of pairs of pixels there (`dim` and `dim` +
    3) remain pairs of positions.
    """
    step, dilation, border = problem.stride[dim - 2], problem.dilation[dim - 2], problem.padding[dim - 2]
    size, positions = products.shape[dim], problem.grads.shape[dim + 1]
    shape = list(products.shape)
    shape[dim] = shape[dim + 3] = positions
    total = products.new_zeros(shape)
    for tap in range(problem.weight.shape[dim]):
        shift = tap * dilation - border
        first, last = (
            max(0, -(shift // step)),
            min(positions - 1, (size - 1 - shift) // step),
        )  # the border is zeros and adds nothing
        if first <= last:
            places, pixels = slice(first, last + 1), slice(first * step + shift, last * step + shift + 1, step)
            total[_both(places, dim)] += products[_both(pixels, dim)]
    return total


def _both(chosen: slice, dim: int) -> tuple[slice, ...]:
    """An index that takes these of dimensions `dim` and `dim` + 3."""
    every = (slice(None),)
    return (*every * dim, chosen, *every * 2, chosen)
