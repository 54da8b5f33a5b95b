"""Two small classics for 28x28 images: the tanh CNN of private MNIST, and LeNet-5."""

from torch import nn

TANH_CNN_MIN_SIZE = 14
LENET_MIN_SIZE = 12


def _pooled(size: int, kernel: int, stride: int, padding: int, pool_stride: int) -> int:
    """Pixels left of `size` after a convolution and 2x2 max-pooling."""
    size = (size + 2 * padding - kernel) // stride + 1
    return (size - 2) // pool_stride + 1


class TanhCNN(nn.Sequential):
    """The CNN of Papernot et al. (2021), whose bounded activations suit clipping.

    Convolutions 16 of 8x8/2 and 32 of 4x4/2, each with tanh and 2x2 max-pooling of stride 1,
    then a hidden layer of 32. 26,010 parameters for 28x28x1 and 10 classes.

    Shape:
        (rows, channels, image_size, image_size) -> (rows, num_classes)
    """

    def __init__(self, num_classes: int, image_size: int = 28, channels: int = 1) -> None:
        size = _pooled(_pooled(image_size, 8, 2, 3, 1), 4, 2, 0, 1)
        super().__init__(
            nn.Conv2d(channels, 16, 8, stride=2, padding=3),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
            nn.Linear(32 * size * size, 32),
            nn.Tanh(),
            nn.Linear(32, num_classes),
        )


class LeNet(nn.Sequential):
    """LeNet-5 (LeCun et al. 1998), as usual with ReLU, max-pooling and padding 2.

    61,706 parameters for 28x28x1 and 10 classes.

    Shape:
        (rows, channels, image_size, image_size) -> (rows, num_classes)
    """

    def __init__(self, num_classes: int, image_size: int = 28, channels: int = 1) -> None:
        size = _pooled(_pooled(image_size, 5, 1, 2, 2), 5, 1, 0, 2)
        super().__init__(
            nn.Conv2d(channels, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * size * size, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_classes),
        )
