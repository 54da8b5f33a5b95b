"""Convolutions: per-image weight gradients written out, or only their norms (ghost norms)."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from sfumato.clipping.clip import are_exact, at_least_float32, hidden, one_thread, products, roundings, unit
from sfumato.clipping.graph.compile import is_recording
from sfumato.clipping.graph.rules import linear
from sfumato.clipping.graph.rules.site import Direction, MaterializedGrads, Method, Moments, SiteRecord, channel_sums
from sfumato.torch_internals import quick_dilation

# Written-out gradients of more numbers than this (16 MiB in float32) lie in blocks of a few
# examples, of so many numbers each (4 MiB): between other tensors the C library finds a place for
# these, and none for one large block, so that memory grows.
_MAX_IN_ONE, _BLOCK = 2**22, 2**20

# So many values of patches are made at once on a CPU that they stay in its cache: 4 MiB in float32.
_AT_ONCE = 2**20
# And so many bytes on a GPU, where those of all examples would take more memory than all else.
_MOST_BYTES = 2**29

TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_SETTINGS = "SymInt[] stride, SymInt[] padding, SymInt[] dilation"


@torch.library.custom_op(
    "sfumato::conv_weight_gradients",
    mutates_args=(),
    schema=f"(Tensor inputs, Tensor grads, Tensor weight, {_SETTINGS}, bool transposed, SymInt[] output_padding, "
    "SymInt groups) -> Tensor",
)
def conv_weight_gradients(inputs, grads, weight, *settings):
    """One ordinary weight gradient after another: sums over each example's rows.

    Args:
        inputs: (m, rows, C, *size).
        grads: (m, rows, O, *output size): gradients with respect to the convolution's output.
        weight: Only its shape is used.
        settings: As in `aten.convolution`.

    Returns:
        (m, *shape of the weight), in the type of `grads`.
    """
    if settings[-1] > 1:  # torch 2.15 is silently wrong in float64 for some strides of one channels_last image
        inputs, grads, weight = inputs.contiguous(), grads.contiguous(), weight.contiguous()
    gradients = grads.new_empty(len(inputs), *weight.shape)
    for gradient, own_inputs, own_grads in zip(gradients, inputs, grads, strict=True):
        gradient.copy_(_weight_gradient(own_grads, own_inputs, weight, *settings))
    return gradients


@conv_weight_gradients.register_fake
def _(inputs, grads, weight, *settings):
    return grads.new_empty(len(inputs), *weight.shape)


@torch.library.custom_op(
    "sfumato::conv_weight_gradients_by_patches",
    mutates_args=(),
    schema=f"(Tensor inputs, Tensor grads, SymInt[] taps, {_SETTINGS}) -> Tensor",
)
def conv_weight_gradients_by_patches(inputs, grads, taps, *settings):
    """A matrix product of output gradients and patches, for a few examples at a time.

    Sums over each example's rows, of a two-dimensional convolution in one group, not transposed.

    Args:
        inputs: (m, rows, C, H, W).
        grads: (m, rows, O, *output size): gradients with respect to the convolution's output.
        taps: The kernel's height and width.
        settings: Stride, padding, dilation.

    Returns:
        (m, O, C, *taps), in the type of `grads`.
    """
    channels, grads = inputs.shape[2], grads.transpose(1, 2)
    examples, outputs, *positions = grads.shape
    gradients = grads.new_empty(examples, outputs, channels, *taps)
    most = _AT_ONCE if inputs.device.type == "cpu" else _MOST_BYTES // inputs.element_size()
    at_once = max(1, most // math.prod((channels, *taps, *positions)))
    parts = zip(inputs.split(at_once), grads.split(at_once), gradients.split(at_once), strict=True)
    for own_inputs, own_grads, gradient in parts:
        seen = windows(own_inputs, taps, *settings)
        patches = seen.permute(0, 2, 5, 6, 1, 3, 4).flatten(4).flatten(1, 3)  # (n, C taps, rows positions)
        torch.bmm(own_grads.flatten(2), patches.transpose(1, 2), out=gradient.flatten(2))
    return gradients


@conv_weight_gradients_by_patches.register_fake
def _by_patches(inputs, grads, taps, *settings):
    return grads.new_empty(len(inputs), grads.shape[2], inputs.shape[2], *taps)


def windows(
    inputs: torch.Tensor, taps: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> torch.Tensor:
    """(m, rows, C, *output size, *taps): what the kernel sees at each position; a view of the
    images, padded where there is a border.

    Copied once, it makes patches sooner than `F.unfold` does.
    """
    size_h, size_w = (taps[0] - 1) * dilation[0] + 1, (taps[1] - 1) * dilation[1] + 1
    padded = F.pad(inputs, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else inputs
    seen = padded.unfold(3, size_h, stride[0]).unfold(4, size_w, stride[1])
    return seen[..., :: dilation[0], :: dilation[1]]


def _weight_gradient(grads: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *settings: Any) -> torch.Tensor:
    """The ordinary gradient of a weight, summed over rows."""
    return torch.ops.aten.convolution_backward(grads, inputs, weight, None, *settings, (False, True, False))[1]


class _Problem:
    """A site in the form of `aten.convolution`: inputs (m, rows, C, *size), grads (m, rows, O, *out
    size).
    """

    def __init__(self, record: SiteRecord) -> None:
        args, self.weight = record.args, record.args["weight"]
        self.inputs, self.grads = record.example_arg("input"), record.example_grad()
        self.taps = list(self.weight.shape[2:])
        stride, dilation = self._per_dim(args["stride"]), self._per_dim(args["dilation"])
        padding = self._per_dim(0 if isinstance(args["padding"], str) else args["padding"])
        if args["padding"] == "same":  # the odd one lies at the end (aten._convolution_mode)
            totals = [step * (size - 1) for size, step in zip(self.taps, dilation, strict=True)]
            sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
            self.inputs = F.pad(self.inputs, sides)
        self.window = stride, padding, quick_dilation(self.taps, dilation, self.grads.device)
        is_transposed, outside = record.site.operation in TRANSPOSED, self._per_dim(args.get("output_padding", 0))
        self.settings = *self.window, is_transposed, outside
        self.groups: int = args["groups"]

    def _per_dim(self, value: Any) -> list[int]:
        values = [value] if isinstance(value, int) else list(value)
        return values * len(self.taps) if len(values) == 1 else values


def bias(record: SiteRecord, argument: str) -> MaterializedGrads:
    """The output's gradient summed over everything but examples and channels."""
    return MaterializedGrads(channel_sums(record.example_grad()))


def _written_out(gradients: Callable[[_Problem, torch.Tensor, torch.Tensor], torch.Tensor]) -> Method:
    """A method that writes gradients out, in several blocks where there are many numbers. A GPU's allocator, or a
    compiled graph, finds a place for one by itself.
    """

    @functools.wraps(gradients)
    def method(record: SiteRecord, argument: str) -> MaterializedGrads:
        problem = _Problem(record)
        values = problem.weight.numel()
        divides = record.grad.device.type == "cpu" and values * record.examples > _MAX_IN_ONE and not is_recording()
        at_once = max(1, _BLOCK // values) if divides else record.examples
        parts = problem.inputs.split(at_once), problem.grads.split(at_once)
        return MaterializedGrads(*map(functools.partial(gradients, problem), *parts))

    return method


@_written_out
def loop(problem: _Problem, inputs: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    """One ordinary weight gradient for each example."""
    return conv_weight_gradients(inputs, grads, problem.weight, *problem.settings, problem.groups)


@_written_out
def grouped(problem: _Problem, inputs: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    """One convolution in which every example is a group of its own."""
    weight, examples = problem.weight, len(inputs)
    inputs = inputs.transpose(0, 1).flatten(1, 2).contiguous()  # (rows, n C, *size)
    grads = grads.transpose(0, 1).flatten(1, 2).contiguous()
    several = weight.new_empty(examples * len(weight), *weight.shape[1:])  # its gradient does not depend on it
    gradient = _weight_gradient(grads, inputs, several, *problem.settings, examples * problem.groups)
    return gradient.unflatten(0, (examples, -1))


@_written_out
def unfold(problem: _Problem, inputs: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    """Patches times output gradients, a batched matrix product."""
    return conv_weight_gradients_by_patches(inputs, grads, problem.taps, *problem.window)


def can_unfold(record: SiteRecord) -> bool:
    """Whether `unfold` and `PatchGhost` know this convolution: two-dimensional, one group, not
    transposed.
    """
    return record.args["weight"].ndim == 4 and record.args["groups"] == 1 and record.site.operation not in TRANSPOSED


def can_ghost(record: SiteRecord) -> bool:
    """Whether `GhostGrads` fits: what it sums must not be rounded otherwise than what it measures. cuDNN
    rounds to TF32 unless told not to.
    """
    return can_unfold(record) and are_exact("conv", record.grad.device)


def gram_values(record: SiteRecord) -> int:
    """Numbers that `GhostGrads` keeps at its peak: inner products of all pairs of pixels and of
    positions.
    """
    pixels, positions = map(_places, (record.example_arg("input"), record.example_grad()))
    return record.examples * (pixels**2 + 2 * positions**2)


def _places(tensor: torch.Tensor) -> int:
    """Pixels or positions of one example, (m, rows, C, *size)."""
    return tensor.shape[1] * math.prod(tensor.shape[3:])


class GhostGrads:
    """Per-example gradients that are never written out: norms from inner products of positions; the clipped sum as one
    ordinary weight gradient.
    """

    def __init__(self, record: SiteRecord, argument: str) -> None:
        problem = self.problem = _Problem(record)
        # Norms and the sum see the very same products, none of them rounded to less than float32.
        own = problem.inputs, problem.grads, problem.weight
        problem.inputs, problem.grads, problem.weight = map(at_least_float32, own)
        self._bias = None if record.args["bias"] is None else at_least_float32(record.args["bias"])
        self._positions, channels = _places(problem.grads), problem.weight.shape[1]
        terms = roundings(channels) + sum(problem.taps) + 2 * roundings(self._positions) + 1
        self._share = unit(problem.grads) * terms
        # Now: the gradient is in the processor's cache, and the output need not be kept.
        grads = self._grads()
        self._squares, self._largest = self._channel_squares(grads)
        self._with_output, output = None, record.output
        if output is not None and output.dtype == grads.dtype:  # of bfloat16 it would lack half the digits
            output = record.site.out_layout.by_example(output, record.examples, record.views)
            self._with_output = torch.linalg.vecdot(output.transpose(1, 2).flatten(2), grads), grads.abs().sum(2)

    def square_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._squares.sum(1), self._share * self._largest.square().sum(1)

    def moments(self, direction: Direction) -> Moments:
        """See `MaterializedGrads.moments`."""
        problem, grads = self.problem, self._grads()
        channels, taps = problem.weight.shape[1], problem.weight[0, 0].numel()
        ones = torch.ones_like(problem.weight[:1, :1])
        sums = self._convolved(problem.inputs.sum(2, keepdim=True), ones)  # (m, rows, 1, *size)
        plain = products(grads, sums.flatten(1)[:, :, None])[..., 0]
        # A patch's sum is at most its length times the root of its size.
        share = unit(plain) * (roundings(channels) + taps + roundings(self._positions))
        plain_error = share * (channels * taps) ** 0.5 * self._largest
        along, along_error = self._along(grads, direction)
        return Moments(self._squares, plain, along, self._share * self._largest.square(), plain_error, along_error)

    def _along(self, grads: torch.Tensor, direction: Direction) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums over positions of grads times the convolution with the direction, and bounds on
        their rounding errors.

        Where each channel of the weight points in its direction, that convolution is the output
        without its bias, divided by a length, and need not be computed again.
        """
        fan_in = direction.along.shape[1]
        # Of a convolution nothing is known but how many terms it adds up.
        times = fan_in + 1 + roundings(self._positions)
        if self._with_output is None or not direction.is_of_weight:
            kernels = direction.along.view_as(self.problem.weight).to(self.problem.inputs.dtype)
            convolved = self._convolved(self.problem.inputs, kernels)
            along = torch.linalg.vecdot(convolved.transpose(1, 2).flatten(2), grads)
            return along, unit(grads) * times * self._largest
        with_output, sizes = self._with_output
        length, apart = direction.length.to(grads.dtype), direction.apart.to(grads.dtype)
        bias = self._bias if self._bias is not None else torch.zeros_like(length)
        share = unit(grads) * (times + roundings(fan_in) + 4)
        error = (share + apart) * self._largest + 2 * share * (bias / length).abs() * sizes
        return (with_output - bias * grads.sum(2)) / length, error

    def _convolved(self, inputs: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        rows = F.conv2d(inputs.flatten(0, 1), kernels, None, *self.problem.window)
        return rows.unflatten(0, self.problem.inputs.shape[:2])

    def weighted_sum(self, coefficients: torch.Tensor) -> torch.Tensor:
        problem = self.problem
        grads = problem.grads * coefficients.to(problem.grads.dtype)[:, None, None, None, None]
        rows = grads.flatten(0, 1), problem.inputs.flatten(0, 1)
        return _weight_gradient(*rows, problem.weight, *problem.settings, problem.groups)

    def written_out(self) -> torch.Tensor:
        problem = self.problem
        return conv_weight_gradients(problem.inputs, problem.grads, problem.weight, *problem.settings, problem.groups)

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
        gram = products(pixels.transpose(1, 2), pixels).view(examples, rows, height, width, rows, height, width)
        with one_thread(gram.numel()):
            for axis in (0, 1):
                gram = self._over_taps(gram, axis)
        return gram.view(examples, self._positions, self._positions)

    def _over_taps(self, of_pairs: torch.Tensor, axis: int) -> torch.Tensor:
        """Sums over the kernel's taps along height or width: of pairs of pixels there remain pairs of positions."""
        (step, border, apart), dims = (each[axis] for each in self.problem.window), (axis + 2, axis + 5)
        if border:  # not added to a part of the sum: a compiler would nest each tap's places in those of the one before
            of_pairs = F.pad(of_pairs, [border * (dim in dims) for dim in range(6, 1, -1) for _ in range(2)])
        end = (self.problem.grads.shape[axis + 3] - 1) * step + 1
        starts = range(0, self.problem.taps[axis] * apart, apart)
        first, *others = (of_pairs[_at(slice(start, start + end, step), dims)] for start in starts)
        return functools.reduce(torch.Tensor.add_, others, first.clone(memory_format=torch.contiguous_format))


def _at(chosen: slice, dims: tuple[int, int]) -> tuple[slice, ...]:
    """An index that takes these of two dimensions."""
    return tuple(chosen if dim in dims else slice(None) for dim in range(7))


def overlaps(record: SiteRecord) -> bool:
    """Whether one pixel lies in several patches, which then take more memory than the images."""
    problem = _Problem(record)
    stride, _, dilation = problem.window
    return any(step < (n - 1) * apart + 1 for step, n, apart in zip(stride, problem.taps, dilation, strict=True))


def patch_gram_values(record: SiteRecord) -> int:
    """Numbers that `PatchGhost` keeps at its peak: patches, and inner products of all pairs of
    positions.
    """
    positions = _places(record.example_grad())
    return record.examples * positions * (record.args["weight"][0].numel() + 2 * positions)


class PatchGhost(linear.GhostGrads):
    """The ghost norm of a linear layer on patches, which are written out: of a weight as a matrix (O, C taps)."""

    def __init__(self, record: SiteRecord, argument: str) -> None:
        problem = _Problem(record)
        self._shape = problem.weight.shape[1:]
        seen = windows(problem.inputs, problem.taps, *problem.window)
        patches = seen.permute(0, 1, 3, 4, 2, 5, 6).flatten(4).flatten(1, 3)  # (m, rows positions, C taps)
        super().__init__(patches, problem.grads.flatten(3).transpose(2, 3).flatten(1, 2), linear.gram)

    def weighted_sum(self, coefficients: torch.Tensor) -> torch.Tensor:
        return super().weighted_sum(coefficients).unflatten(1, self._shape)
