"""The weight gradients of a convolution for each example of a batch, written out, as custom
operators.

A loop over examples, or over a few examples' patches at a time, is one call in a compiled graph and
not as many nodes as there are examples.
"""

import torch
from torch.nn import functional as F

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
