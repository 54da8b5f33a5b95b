"""A microbatch as one compiled graph."""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sfumato.clipping.graph.compile import CompiledPass, Tensors
from sfumato.clipping.graph.weights import Weights, evaluate_weights
from sfumato.clipping.protocol import Batch, Coefficient

if TYPE_CHECKING:
    from sfumato.clipping.graph.engine import GraphEngine

# So often passes are compiled: for the clipping norms and numbers of targets together.
_COMPILATIONS = 8


class CompiledMicrobatch:
    """Computes what an engine's pass does by compiled graphs, and by single operations where one
    does not fit.
    """

    def __init__(self, engine: "GraphEngine") -> None:
        self._engine = engine
        # For each coefficient and kind of batch.
        self._compiled: dict[Any, CompiledPass] = {}
        self._compilations_left = _COMPILATIONS
        self._compiling = threading.Lock()

    def __call__(self, coefficient: Coefficient, weights: Weights, batch: Batch) -> Tensors:
        """The same as `GraphEngine.run_pass`. The weights stay outside the graph unless autograd's
        record of them is needed in it.
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
        compiled = self._prepared(key, coefficient, weights, batch, tensors, weights_of)
        if compiled is not None:
            results, holds = compiled(*batch.tensors, *tensors)
            if holds:  # what was taken for granted of the weights: nothing that an image decides
                return results
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
