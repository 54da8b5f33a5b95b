"""A microbatch as one compiled graph, for as long as the loss is what was compiled."""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sfumato.clipping.graph.compile import CompiledPass, Tensors
from sfumato.clipping.graph.passes import gradients_of
from sfumato.clipping.graph.weights import Weights, evaluate_weights
from sfumato.clipping.protocol import Batch, Coefficient

if TYPE_CHECKING:
    from sfumato.clipping.graph.engine import GraphEngine

# So often passes are compiled: changes of the clipping norm, of the number of targets, of the loss's settings together.
_COMPILATIONS = 8
# How far losses and their gradients may lie from those of the loss as it is now: rounding, in float32 and bfloat16.
_LOSSES, _LOW_LOSSES = 1e-4, 2e-2


class CompiledMicrobatch:
    """Computes what an engine's pass does by compiled graphs, and by single operations where one does not fit."""

    def __init__(self, engine: "GraphEngine") -> None:
        self._engine = engine
        # For each coefficient and kind of batch. A loss that goes on changing is left to single operations in the end.
        self._compiled: dict[Any, CompiledPass] = {}
        self._compilations_left = _COMPILATIONS
        self._compiling = threading.Lock()

    def __call__(self, coefficient: Coefficient, weights: Weights, batch: Batch) -> Tensors:
        """The same as `GraphEngine.run_pass`. The weights stay outside the graph unless autograd's record of them is
        needed in it.
        """
        weights_of: Callable[[Sequence[torch.Tensor]], Weights]
        if any(group.kind == "general" for group in self._engine.traced.groups):
            state = self._engine.traced.capture.state(self._engine.model)
            tensors, nodes = list(state.values()), list(state)
            weights_of = lambda tensors: evaluate_weights(self._engine.traced, dict(zip(nodes, tensors, strict=True)))  # noqa: E731
        elif weights.need_record:  # a closed form no longer holds
            return self._engine.run_pass(coefficient, weights, batch)
        else:
            tensors, weights_of = weights.apart()
        key = coefficient, len(batch.targets), batch.seeds is None
        # Compiled anew where the loss is another: by the same kind of graph, so that other examples round as they did.
        for _ in range(2):
            compiled = self._prepared(key, coefficient, weights, batch, tensors, weights_of)
            if compiled is None:
                break
            results, holds = compiled(*batch.tensors, *tensors)
            count = 2 + len(self._engine.names)
            if not holds:
                break
            if self._is_the_loss(results[1], results[count:], batch):
                return results[:count]
            with self._compiling:
                if self._compiled.get(key) is compiled:
                    del self._compiled[key]
        return self._engine.run_pass(coefficient, weights, batch)

    def _prepared(
        self,
        key: Any,
        coefficient: Coefficient,
        weights: Weights,
        batch: Batch,
        tensors: Sequence[torch.Tensor],
        weights_of: Callable[[Sequence[torch.Tensor]], Weights],
    ) -> CompiledPass | None:
        """The compiled pass of a key, ready for such tensors; None if it was compiled too often."""
        of_batch = batch.tensors
        with self._compiling:  # several threads may be here
            if key not in self._compiled:
                if not self._compilations_left:
                    return None
                self._compilations_left -= 1
                self._engine.run_pass(coefficient, weights, batch)  # settles the methods
                batch_of, start = batch.like, len(of_batch)

                def of_tensors(*tensors: torch.Tensor) -> Tensors:
                    return self._engine.run_pass(coefficient, weights_of(tensors[start:]), batch_of(tensors[:start]))

                self._compiled[key] = CompiledPass(of_tensors)
            compiled = self._compiled[key]
            compiled.prepare(*of_batch, *tensors)
            return compiled

    def _is_the_loss(self, losses: torch.Tensor, seen: Tensors, batch: Batch) -> bool:
        """Whether the loss, applied anew, gives what it gave in a compiled pass: its settings may have changed since.

        Args:
            losses: (m,), of the compiled pass.
            seen: What the loss was given there, and its gradients with respect to that.
        """
        nodes, tolerance = list(self._engine.traced.outputs), _LOSSES if self._engine.low is None else _LOW_LOSSES
        with torch.enable_grad():
            outputs = [value.detach().requires_grad_(value.is_floating_point()) for value in seen[: len(nodes)]]
            given = self._engine.traced.capture.output(dict(zip(nodes, outputs, strict=True)))
            again = self._engine.losses(given, batch.targets, batch.inputs.shape[1])
            gradients = gradients_of(again, outputs)
        sizes = _lengths([output.detach() for output in outputs])
        pairs = [(losses, again.detach()), *zip(seen[len(nodes) :], gradients, strict=True)]
        differ = torch.stack([_differ(one, other, tolerance, sizes) for one, other in pairs]).any(0)
        # In bfloat16 another pass rounds all examples otherwise, so that one alone, at a kink of the loss perhaps, must
        # not decide it: it keeps its gradient, which is clipped as any.
        return int(differ.sum()) <= (self._engine.low is not None)


def _differ(one: torch.Tensor, other: torch.Tensor, tolerance: float, sizes: torch.Tensor) -> torch.Tensor:
    """(m,): whether a row differs by more than rounding, relative to its own length and to its own outputs'.

    To nothing of another row: one image must not decide what is rounding for the others. What is not finite counts for
    nothing in the sum, and says nothing here.
    """
    one, other = (value.reshape(len(value), -1).double() for value in (one, other))
    lengths, errors = other.norm(dim=1), (one - other).norm(dim=1)
    return (errors > tolerance * (lengths + sizes)) & errors.isfinite() & lengths.isfinite()


def _lengths(outputs: list[torch.Tensor]) -> torch.Tensor:
    """(m,): how long all outputs of each example are, as far as that is finite, and at most one: what a loss's own
    terms round by.
    """
    squares = [
        value.reshape(len(value), -1).double().nan_to_num(posinf=0.0, neginf=0.0).square().sum(1) for value in outputs
    ]
    return torch.stack(squares).sum(0).sqrt().clamp(max=1.0)
