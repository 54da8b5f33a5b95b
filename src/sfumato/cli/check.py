"""`sfumato check`: may this model be trained privately?"""

from typing import Annotated, Any

import typer

from sfumato.cli import output
from sfumato.errors import InputError


def check(
    model: Annotated[str, typer.Argument(help="A registry name, package.module:factory, or a run folder.")],
    fix: Annotated[str | None, typer.Option(help='"groupnorm": say what would be replaced, and check the result.')] = None,
    image_size: Annotated[int, typer.Option(help="Height and width in pixels.")] = 32,
    channels: Annotated[int, typer.Option(help="1 or 3.")] = 3,
    num_classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Says whether a model has per-example gradients, and what would have to change. Status 0 either way."""
    if fix not in (None, "groupnorm"):
        raise InputError(f'--fix knows "groupnorm" only, not {fix!r}.')
    import torch

    from sfumato.clipping.checks import findings

    network, shape = _build(model, image_size, channels, num_classes)
    example = torch.zeros(4, *shape)
    replaced: list[str] = []
    if fix:
        from sfumato.clipping.groupnorm_fix import fix_groupnorm

        before = {name: type(module) for name, module in network.named_modules()}
        network = fix_groupnorm(network)
        now = dict(network.named_modules())
        replaced = [
            f"{kind.__name__} at {name!r} by {type(now[name]).__name__}"
            for name, kind in before.items()
            if name in now and type(now[name]) is not kind
        ]
    found = findings(network, example)
    if json_:
        rows = [{"module": finding.path, "kind": finding.kind, "reason": finding.reason, "remedy": finding.remedy} for finding in found]
        output.print_json({"model": model, "compatible": not found, "findings": rows, "replaced": replaced})
        return
    for line in replaced:
        print(f"replaced: {line}")
    for finding in found:
        print(finding)
    print(f"{model}: {'compatible' if not found else 'cannot be trained privately as it is'}")


def _build(model: str, image_size: int, channels: int, num_classes: int) -> tuple[Any, tuple[int, int, int]]:
    from pathlib import Path

    from sfumato.models import registry

    if Path(model).is_dir():
        from sfumato.training.trained import load_run

        trained = load_run(Path(model))
        return trained.model.train(), (trained.channels, trained.image_size, trained.image_size)
    network = registry.build(model, image_size=image_size, channels=channels, num_classes=num_classes, options={}, seed=0)
    return network, (channels, image_size, image_size)
