"""The weight gradient of a convolution for each example of a batch, written out."""

from sfumato.kernels.conv_weight_gradients.naive import conv_weight_gradients

__all__ = ["conv_weight_gradients"]
