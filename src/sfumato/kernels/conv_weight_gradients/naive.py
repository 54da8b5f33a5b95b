"""One ordinary weight gradient after another.

A custom operator, so that a compiled graph holds one call and not as many as there are examples.
"""

import torch


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
    """Sums over each example's rows, in the arithmetic of ordinary training.

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
            own_grads, own_inputs, weight, None, stride, padding, dilation, transposed, output_padding, groups, (False, True, False)
        )
        gradient.copy_(backward[1])
    return gradients


@conv_weight_gradients.register_fake
def _(inputs, grads, weight, stride, padding, dilation, transposed, output_padding, groups):
    return grads.new_empty(len(inputs), *weight.shape)
