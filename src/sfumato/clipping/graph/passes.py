"""The forward and the backward pass: what every site gives to the per-example gradients of its
weights.

The forward pass runs the graph with every weight detached, so the backward pass computes gradients
of data alone. At each site the output's gradient is caught as it passes, and a rule (`rules/`)
makes of it and of the operation's inputs that site's part of the per-example gradients, written out
or as norms alone.
"""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from sfumato.clipping.draws import KeyedDraws
from sfumato.clipping.graph.autotune import fastest
from sfumato.clipping.graph.rules import (
    GHOSTS,
    METHODS,
    MaterializedGrads,
    PerExampleGrads,
    SiteRecord,
    candidates,
    named_args,
    normalization,
    worth_trying,
)
from sfumato.clipping.graph.weights import Weights
from sfumato.clipping.norms import at_least_float32
from sfumato.clipping.protocol import Batch
from sfumato.torch_internals import tree_map

if TYPE_CHECKING:
    from sfumato.clipping.graph.engine import GraphEngine

MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# Operations that refuse tensors of two types.
_PRODUCTS = tuple(
    f"aten.{name}"
    for name in ("linear", "conv", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "scaled_dot_product")
)


def backward(
    engine: "GraphEngine",
    weights: Weights,
    batch: Batch,
) -> tuple[dict[str, PerExampleGrads], torch.Tensor]:
    """Both passes: what the sites contribute to each weight, and the (m,) losses."""
    traced, (examples, views) = engine.traced, batch.inputs.shape[:2]
    draws = KeyedDraws(None if batch.seeds is None else batch.seeds.reshape(-1, 1, 2), engine.draw_dims)
    per_example_grads: dict[str, PerExampleGrads] = {}
    firsts: list[torch.Tensor] = []  # the first outputs that depend on a weight: where the backward pass may stop
    outputs_of: dict[str, torch.Tensor] = {}
    per_row: list[tuple[str, torch.Tensor]] = []  # weights that every row has a copy of

    def call(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        site = traced.sites.get(node)
        if engine.low is not None and str(node.target).startswith(_PRODUCTS):  # they take one type only
            args, kwargs = tree_map(lowered, (args, kwargs))
        if site is None:
            with draws if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) else nullcontext():
                return node.target(*args, **kwargs)  # type: ignore[operator]
        named = named_args(node, args, kwargs)
        if normalization.can_be_per_row(site, named):
            value, leaves = normalization.per_row(site, named)
            per_row.extend((site.weight_of[argument], leaf) for argument, leaf in leaves.items())
            return value
        if normalization.has_statistics(site, named):
            value, named = normalization.with_statistics(named)
        else:
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        if not value.is_floating_point():  # a comparison, say: no gradient passes
            return value
        if not value.requires_grad:
            value = value.detach().requires_grad_()
            firsts.append(value)
        held = [{name: _detached(arg) for name, arg in named.items()}]
        if (
            site.weight_of.get("weight") in weights.directions
            and engine.methods.get(f"{site.name}.weight", "conv_ghost") == "conv_ghost"
        ):
            # Kept only for who may want it.
            outputs_of[site.name] = value.detach()

        def catch(grad: torch.Tensor) -> None:
            with torch.no_grad():
                _collect(
                    engine,
                    weights,
                    SiteRecord(site, examples, views, held.pop(), grad, outputs_of.pop(site.name, None)),
                    per_example_grads,
                )

        value.register_hook(catch)
        return value

    def lowered(value: Any) -> Any:
        is_float = engine.low is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(engine.low) if is_float else value

    with torch.enable_grad():
        values = {node: lowered(_detached(value)) for node, value in weights.shared.items()}
        rows = lowered(batch.inputs.flatten(0, 1))
        if "memory_format" in engine.methods:
            rows = rows.contiguous(memory_format=MEMORY_FORMATS[engine.methods["memory_format"]])
        values[traced.capture.input] = rows
        kept = {*traced.capture.outputs, *weights.shared}
        traced.capture.data.run(values, keep=kept.__contains__, call=call)
        for node, layout in traced.outputs.items():
            values[node] = layout.by_example(
                values[node] if engine.low is None else values[node].float(), examples, views
            )
        outputs = [values[node] for node in traced.outputs]
        del values
        losses, of_outputs = engine.loss_gradients(outputs, batch.targets, views)
        leaves = [*(leaf for _, leaf in per_row), *firsts]
        ends = [(end, grad) for end, grad in zip(outputs, of_outputs, strict=True) if end.requires_grad]
        del outputs
        gradients = torch.autograd.grad([end for end, _ in ends], leaves, [grad for _, grad in ends], allow_unused=True)
    for (weight, _), gradient in zip(per_row, gradients, strict=False):
        if gradient is not None:
            # One image may lie in many of the operation's rows, one after another: tokens, windows.
            _add(
                per_example_grads,
                weight,
                MaterializedGrads(gradient.view(examples, -1, *weights.values[weight].shape).sum(1)),
            )
    for weight, value in weights.values.items():  # whose use does not reach the loss
        if weight not in per_example_grads:
            per_example_grads[weight] = MaterializedGrads(
                torch.zeros(examples, *value.shape, dtype=value.dtype, device=value.device)
            )
    return per_example_grads, losses


def _collect(
    engine: "GraphEngine", weights: Weights, record: SiteRecord, per_example_grads: dict[str, PerExampleGrads]
) -> None:
    for argument, weight in record.site.weight_of.items():
        key = f"{record.site.name}.{argument}"
        if key not in engine.settled:
            names = [
                name
                for name in candidates(record, argument, engine.examples)
                if name not in GHOSTS or name in engine.ghosts[weight]
            ]
            # A method of another model's record could be silently wrong here.
            if engine.methods.get(key) not in names:
                names = worth_trying(names, record, argument)
                engine.methods[key] = (
                    fastest(names, record, argument, weights, weight)
                    if engine.measures and len(names) > 1
                    else names[0]
                )
            engine.settled.add(key)
        _add(per_example_grads, weight, METHODS[engine.methods[key]](record, argument))


def _add(per_example_grads: dict[str, PerExampleGrads], weight: str, per_example: PerExampleGrads) -> None:
    before = per_example_grads.setdefault(weight, per_example)
    if before is not per_example:
        assert isinstance(before, MaterializedGrads) and isinstance(
            per_example, MaterializedGrads
        )  # ghost norms do not add up
        per_example_grads[weight] = before + per_example


def unshared(sums: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same in float32 at least, none sharing memory with another or with itself.

    Autograd gives one tensor to both parameters of a + b, and one number to all values of a sum:
    noise that is added to one in place would be added to the others, or fail.
    """
    apart: list[torch.Tensor] = []
    seen: set[int] = set()
    for total in map(at_least_float32, sums):
        is_repeated = any(size > 1 and not step for size, step in zip(total.shape, total.stride(), strict=True))
        apart.append(
            total.clone(memory_format=torch.contiguous_format) if is_repeated or total.data_ptr() in seen else total
        )
        seen.add(apart[-1].data_ptr())
    return apart


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value
