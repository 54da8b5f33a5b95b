"""Networks of which the classifier alone trains by default: what choosing one by name implies. No torch."""

from typing import Any

PACKAGED: dict[str, tuple[str, dict[str, Any]]] = {
    "efficientnet_lite0": (
        "ImageNet (ILSVRC 2012), 1.28 million public photographs with labels",
        {"image_size": 128, "channels": 3, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
    )
}
"""By the network's name in the registry: the images that made the weights, as a certificate names them, and what
`data` says of the images that it takes unless a recipe says otherwise.
"""

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
        pretrained_on, constants = PACKAGED[name]
        implied = {"trainable": "classifier"}
        if model.get("init_from") in (None, FROM_PACKAGE):
            implied |= {"init_from": FROM_PACKAGE, "pretrained_on": pretrained_on}

    def filled(section: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        return section | {key: value for key, value in more.items() if section.get(key) is None}

    return {**values, "data": filled(data, constants), "model": filled(model, implied)}
