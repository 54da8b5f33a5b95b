"""`sfumato check`: may this model be trained privately?"""

import dataclasses
from typing import Annotated, Any

import typer

from sfumato.cli import options, output
from sfumato.errors import InputError

# Images that methods are tried on.
_EXAMPLES = 8


def check(
    model: Annotated[str, typer.Argument(help="A registry name, package.module:factory, or a run folder.")],
    fix: Annotated[
        str | None, typer.Option(help='"groupnorm": say what would be replaced, and check the result.')
    ] = None,
    image_size: Annotated[int, typer.Option(help="Height and width in pixels.")] = 32,
    channels: Annotated[int, typer.Option(help="1 or 3.")] = 3,
    num_classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    trust: options.Trust = None,
    json_: options.Json = False,
) -> None:
    """Says whether a model has per-example gradients, how each would be computed, and what would
    have to change. Status 0 either way.
    """
    if fix not in (None, "groupnorm"):
        raise InputError(f'--fix knows "groupnorm" only, not {fix!r}.')
    import torch

    from sfumato.clipping.model_check import findings
    from sfumato.evaluation.scores import evaluation_finding

    network, shape = _build(model, image_size, channels, num_classes, trust or [])
    example = torch.zeros(4, *shape)
    replaced: list[str] = []
    if fix:
        from sfumato.clipping import fix_groupnorm

        before = {name: type(module) for name, module in network.named_modules()}
        network = fix_groupnorm(network)
        now = dict(network.named_modules())
        replaced = [
            f"{kind.__name__} at {name!r} by {type(now[name]).__name__}"
            for name, kind in before.items()
            if name in now and type(now[name]) is not kind
        ]
    found = [_as_json(finding) for finding in findings(network, example)]
    grad_fn = None
    if not found:
        try:
            grad_fn = _try(network, example)
            if (mixing := evaluation_finding(network, example[:1])) is not None:
                found = [_as_json(mixing)]
        except InputError as error:  # what shows only when gradients are compared
            found = [
                {"module": "", "kind": type(network).__name__, "reason": str(error), "remedy": "", "says": str(error)}
            ]
    uses = grad_fn.site_reports if grad_fn else []
    refusal = grad_fn.refusal if grad_fn else None
    if json_:
        output.print_json(
            {
                "model": model,
                "compatible": not found,
                "findings": [{key: value for key, value in finding.items() if key != "says"} for finding in found],
                "replaced": replaced,
                "engine": grad_fn.engine if grad_fn else None,
                "engine_refusal": refusal,
                "uses": [dataclasses.asdict(use) for use in uses],
            }
        )
        return
    for line in replaced:
        output.say(f"replaced: {line}")
    for finding in found:
        output.say(finding["says"])
    for use in uses:
        derived = "" if use.kind == "parameter" else f", {use.kind}"
        output.say(
            f"{use.module or 'model'}: {use.operation} {use.argument} "
            f"({', '.join(use.parameters)}{derived}): {use.method}"
        )
    if grad_fn and refusal:
        slow = ", one image at a time, which is slow" if grad_fn.engine == "reference" else ""
        output.say(f'engine "graph" is not for this model, so that "{grad_fn.engine}" takes it{slow}: {refusal}')
    output.say(f"{model}: {'compatible' if not found else 'cannot be trained privately as it is'}")


def _as_json(finding: Any) -> dict[str, str]:
    return {
        "module": finding.path,
        "kind": finding.kind,
        "reason": finding.reason,
        "remedy": finding.remedy,
        "says": str(finding),
    }


def _try(network: Any, example: Any) -> Any:
    """What sums clipped gradients of the network, prepared as training would.

    Raises:
        InputError: If training would refuse the model.
    """
    import torch

    from sfumato.clipping import clipped_grad
    from sfumato.torch_internals import tree_leaves

    def loss(outputs: Any) -> torch.Tensor:
        return torch.stack(
            [leaf.square().flatten(1).sum(1) for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        ).sum(0)

    grad_fn = clipped_grad(network, loss, clipping_norm=1.0, microbatch_size=_EXAMPLES)
    grad_fn.prepare(example)
    return grad_fn


def _build(
    model: str, image_size: int, channels: int, num_classes: int, trust: list[str]
) -> tuple[Any, tuple[int, int, int]]:
    from pathlib import Path

    from sfumato.models import registry

    if Path(model).is_dir():
        from sfumato.evaluation.trained import load

        trained = load(Path(model), trust)
        return trained.model.train(), trained.shape
    typed = registry.imported_module(model)  # on the command line, so the user's own word
    trust = trust if typed is None else [*trust, typed]
    network = registry.build(
        model, image_size=image_size, channels=channels, num_classes=num_classes, options={}, seed=0, trust=trust
    )
    return network, (channels, image_size, image_size)
