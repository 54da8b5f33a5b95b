"""A sweep's networks and weights, looked at before anything runs."""

import contextlib
import dataclasses
from collections.abc import Collection

from sfumato.errors import InputError
from sfumato.planning.resolve import Plan
from sfumato.randomness import digest
from sfumato.studies.grid import in_words
from sfumato.studies.plan import Planned, PlannedCell


def settle(planned: Planned, trust: Collection[str]) -> Planned:
    """The sweep with the digest of the weights that each cell starts from: whoever goes on with it, here or on another
    machine, has the same ones.

    Raises:
        InputError: Naming a cell whose network cannot be built, or whose weights cannot be had.
    """
    built: set[str] = set()
    weights: dict[tuple[str, str], str] = {}
    cells = []
    for cell in planned.cells:
        try:
            _try_network(cell, trust, built)
            cells.append(dataclasses.replace(cell, plan=_with_digest(cell.plan, weights)))
        except InputError as error:
            raise InputError(f"the cell {in_words(cell.settings)} cannot be: {error}") from None
    return dataclasses.replace(planned, cells=tuple(cells))


def _with_digest(plan: Plan, known: dict[tuple[str, str], str]) -> Plan:
    from sfumato.models.weights import read_weights

    model = plan.recipe.model
    model.refuse_missing_weights()
    if model.init_from is None:
        return plan
    key = model.name, model.init_from
    if key not in known:
        known[key] = read_weights(*key).digest
    if model.init_sha256 not in (None, known[key]):
        raise InputError(f"model.init_from holds other weights (SHA-256 {known[key]}) than model.init_sha256 says.")
    stated = plan.recipe.model_copy(update={"model": model.model_copy(update={"init_sha256": known[key]})})
    return dataclasses.replace(plan, recipe=stated)


def _try_network(cell: PlannedCell, trust: Collection[str], built: set[str]) -> None:
    """Builds each network once; one of the registry takes no memory."""
    import torch

    from sfumato.models import registry

    model, facts = cell.plan.recipe.model, cell.facts
    identity = digest([model.name, model.options, model.fix, dataclasses.asdict(facts)])
    if identity in built:
        return
    with torch.device("meta") if model.name in registry.MODELS else contextlib.nullcontext():
        registry.build(
            model.name,
            image_size=facts.image_size,
            channels=facts.channels,
            num_classes=facts.num_classes,
            options=model.options,
            fix=model.fix,
            seed=0,
            trust=trust,
        )
    built.add(identity)
