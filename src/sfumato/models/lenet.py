"""Two small classics for 28x28 images: the tanh CNN of private MNIST, and LeNet-5."""

import itertools

from torch import nn

Convolution = tuple[int, int, int, int, int]
"""Channels in and out, kernel, stride, padding."""


def _layers(
    convolutions: list[Convolution], hidden: list[int], activation: type[nn.Module], size: int, pool_stride: int
) -> list[nn.Module]:
    """Convolutions, each with an activation and 2x2 max-pooling, then linear layers with activations in between."""
    layers: list[nn.Module] = []
    for fan_in, fan_out, kernel, stride, padding in convolutions:
        layers += [nn.Conv2d(fan_in, fan_out, kernel, stride, padding), activation(), nn.MaxPool2d(2, pool_stride)]
        size = ((size + 2 * padding - kernel) // stride - 1) // pool_stride + 1
    layers.append(nn.Flatten())
    for fan_in, fan_out in itertools.pairwise([convolutions[-1][1] * size * size, *hidden]):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return layers[:-1]


class TanhCNN(nn.Sequential):
    """The CNN of Papernot et al. (2021), whose bounded activations suit clipping.

    Convolutions 16 of 8x8/2 and 32 of 4x4/2, each with tanh and 2x2 max-pooling of stride 1,
    then a hidden layer of 32. 26,010 parameters for 28x28x1 and 10 classes.

    Shape:
        (rows, channels, image_size, image_size) -> (rows, num_classes)
    """

    def __init__(self, num_classes: int, image_size: int = 28, channels: int = 1) -> None:
        convolutions = [(channels, 16, 8, 2, 3), (16, 32, 4, 2, 0)]
        super().__init__(*_layers(convolutions, [32, num_classes], nn.Tanh, image_size, 1))


class LeNet(nn.Sequential):
    """LeNet-5 (LeCun et al. 1998), as usual with ReLU, max-pooling and padding 2.

    61,706 parameters for 28x28x1 and 10 classes.

    Shape:
        (rows, channels, image_size, image_size) -> (rows, num_classes)
    """

    def __init__(self, num_classes: int, image_size: int = 28, channels: int = 1) -> None:
        convolutions = [(channels, 6, 5, 1, 2), (6, 16, 5, 1, 0)]
        super().__init__(*_layers(convolutions, [120, 84, num_classes], nn.ReLU, image_size, 2))
