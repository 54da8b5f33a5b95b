"""`sfumato check`: may this model be trained privately?"""

import dataclasses
from pathlib import Path
from typing import Any

from sfumato.cli import options, output
from sfumato.errors import InputError, refusal
from sfumato.json_record import pick

# Images that methods are tried on.
_EXAMPLES = 8
# What networks are made for, smallest first.
_SIZES = (32, 64, 96, 128, 160, 224, 256, 299, 384, 448)


def models(*, json_: bool = False) -> None:
    """Names the networks that model.name takes: their smallest images, and the options of model.options.

    Example:
        sfumato models
    """
    from sfumato.models.registry import MODELS

    rows = [
        {"name": name, "min_size": network.min_size, "options": list(network.options or ())}
        for name, network in MODELS.items()
    ]
    output.answer({"models": rows}, json_, _show_models)


def _show_models(facts: dict[str, Any]) -> None:
    for row in facts["models"]:
        options = f"; options {', '.join(row['options'])}" if row["options"] else ""
        output.say(f"{row['name']}: images of {row['min_size']} pixels or more{options}")
    output.say("timm:NAME, torchvision:NAME: those of these libraries; package.module:factory with --trust: your own")


def check(
    model: str,
    *,
    fix: str | None = None,
    image_size: int = 32,
    channels: int = 3,
    num_classes: int = 10,
    trust: options.Trust = None,
    json_: bool = False,
) -> None:
    """Says whether a model has per-example gradients, how each would be computed, and what would
    have to change. Status 0 either way.

    Args:
        model: A registry name, package.module:factory, or a run folder.
        fix: "groupnorm": say what would be replaced, and check the result.
        image_size: Height and width in pixels.
        channels: 1 or 3.
        num_classes: Number of classes.

    Example:
        sfumato check torchvision:resnet18 --fix groupnorm
    """
    if fix not in (None, "groupnorm"):
        raise InputError(f'--fix knows "groupnorm" only, not {fix!r}.')
    import torch

    from sfumato.clipping import fix_groupnorm
    from sfumato.clipping.model_check import Finding, findings

    def looked_at(size: int) -> Any:
        network, shape = _build(model, (channels, size, size), num_classes, trust or [])
        kinds, example = {name: type(module) for name, module in network.named_modules()}, torch.zeros(4, *shape)
        network = fix_groupnorm(network) if fix else network
        return kinds, network, example, findings(network, example)

    try:
        before, network, example, found = looked_at(image_size)
    except InputError as error:
        works = next((size for size in _SIZES if refusal(looked_at, size) is None), None)
        raise InputError(f"{error} It takes --image-size {works}." if works else str(error)) from None
    replaced = [
        f"{before[name].__name__} at {name!r} by {type(module).__name__}"
        for name, module in network.named_modules()
        if before.get(name, type(module)) is not type(module)
    ]
    grad_fn = None
    if not found:
        try:
            found, grad_fn = _try(network, example)
        except InputError as error:  # what shows only when gradients are compared
            found = [Finding("", type(network).__name__, str(error), "")]
    facts = {
        "model": model,
        "compatible": not found,
        "findings": [{"module": each.path, **pick(each, "kind", "reason", "remedy")} for each in found],
        "replaced": replaced,
        "engine": grad_fn.engine if grad_fn else None,
        "engine_refusal": grad_fn.refusal if grad_fn else None,
        "uses": [dataclasses.asdict(use) for use in grad_fn.site_reports] if grad_fn else [],
    }
    says = [str(each) if each.remedy else each.reason for each in found]
    output.answer(facts, json_, lambda facts: _show(facts, says))


def _show(facts: dict[str, Any], findings: list[str]) -> None:
    for line in [*(f"replaced: {each}" for each in facts["replaced"]), *findings]:
        output.say(line)
    for use in facts["uses"]:
        derived = "" if use["kind"] == "parameter" else f", {use['kind']}"
        weights = f"{use['operation']} {use['argument']} ({', '.join(use['parameters'])}{derived})"
        output.say(f"{use['module'] or 'model'}: {weights}: {use['method']}")
    engine, refusal = facts["engine"], facts["engine_refusal"]
    if refusal:
        slow = ", one image at a time, which is slow" if engine == "reference" else ""
        output.say(f'engine "graph" is not for this model, so that "{engine}" takes it{slow}: {refusal}')
    output.say(f"{facts['model']}: {'compatible' if facts['compatible'] else 'cannot be trained privately as it is'}")


def _try(network: Any, example: Any) -> tuple[list[Any], Any]:
    """What shows of a network in evaluation mode, and what sums its clipped gradients, prepared as training would.

    Raises:
        InputError: If training would refuse the model.
    """
    import torch

    from sfumato.clipping import clipped_grad
    from sfumato.evaluation.scores import evaluation_finding
    from sfumato.torch_internals import tree_leaves

    def loss(outputs: Any) -> torch.Tensor:
        return torch.stack(
            [leaf.square().flatten(1).sum(1) for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        ).sum(0)

    grad_fn = clipped_grad(network, loss, clipping_norm=1.0, microbatch_size=_EXAMPLES)
    grad_fn.prepare(example)
    mixing = evaluation_finding(network, example[:1])
    return [] if mixing is None else [mixing], grad_fn


def _build(
    model: str, shape: tuple[int, int, int], num_classes: int, trust: list[str]
) -> tuple[Any, tuple[int, int, int]]:
    """The network, and the shape (channels, height, width) of its images."""
    from sfumato.models import registry

    if Path(model).is_dir():
        from sfumato.evaluation.trained import load

        trained = load(Path(model), trust)
        return trained.model.train(), trained.shape
    typed = registry.imported_module(model)  # on the command line, so the user's own word
    trust = trust if typed is None else [*trust, typed]
    network = registry.build(
        model, image_size=shape[1], channels=shape[0], num_classes=num_classes, options={}, seed=0, trust=trust
    )
    return network, shape
