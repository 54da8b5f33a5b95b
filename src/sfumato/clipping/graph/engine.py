"""The fast engine: one forward and one backward pass, per-example gradients only where weights meet
images.

See `sfumato.clipping.graph` for the way from a model to its clipped sum.
"""

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sfumato.clipping.graph.autotune import TRIAL_SECONDS, seconds
from sfumato.clipping.graph.compile import Tensors
from sfumato.clipping.graph.compiled_microbatch import CompiledMicrobatch
from sfumato.clipping.graph.export import module_path
from sfumato.clipping.graph.guards import is_recording
from sfumato.clipping.graph.losses import LossGradients
from sfumato.clipping.graph.passes import MEMORY_FORMATS, backward, unshared
from sfumato.clipping.graph.rules import GHOSTS
from sfumato.clipping.graph.sites import trace
from sfumato.clipping.graph.totals import Totals
from sfumato.clipping.graph.weights import Weights, evaluate_weights
from sfumato.clipping.loss import ExampleLosses
from sfumato.clipping.protocol import Batch, ClippedGrad, Coefficient, Engine, Loss
from sfumato.clipping.speed import LOW_PRECISIONS, Speed
from sfumato.clipping.stand_in import same_bits

# So often each memory format is timed.
_TRIAL_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """A place where a weight meets images, and how its per-example gradients are had.

    Attributes:
        module: The module's dotted path; empty for the model itself.
        operation: PyTorch's name for the operation.
        argument: Which of its arguments is the weight.
        parameters: Names of the trainable parameters that the weight is computed from.
        kind: See `sfumato.clipping.graph.parametrization.Group`.
        method: See `sfumato.clipping.graph.rules.METHODS`; "per_row" where the forward pass keeps
            rows apart by itself.
    """

    module: str
    operation: str
    argument: str
    parameters: tuple[str, ...]
    kind: str
    method: str


@dataclasses.dataclass(frozen=True)
class _Fixed:
    """What was computed of parameters and buffers, and their values then: PyTorch does not count every
    write (fused optimizers, `.data`).
    """

    weights: Weights
    values: dict[Any, torch.Tensor] | None

    def is_of(self, state: Mapping[Any, torch.Tensor]) -> bool:
        """Whether these are the values still."""
        if self.values is None or state.keys() != self.values.keys():
            return False
        return all(same_bits(value.detach(), self.values[name]) for name, value in state.items())


class GraphEngine(Engine):
    """Sums clipped per-example gradients of one model; see `sfumato.clipping.clipped_grad`.

    Attributes:
        methods: "<site>.<argument>" -> name of the method that computes it, and
            "memory_format" -> that of the images. Chosen by measurement on made-up images
            unless the memory format is given; then methods not given follow a fixed rule. They
            decide speed and memory, and how the result is rounded.
        low: The type that images and weights are rounded to where they meet, and all that follows
            up to the model's output; None: none. Parameters, derived weights, losses, norms,
            coefficients and sums stay in float32.
    """

    parallel = True

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        row: torch.Tensor,
        speed: Speed,
    ) -> None:
        self.low = LOW_PRECISIONS[speed.precision]
        self.model = model
        self.traced = trace(model, row)
        nodes, capture = list(self.traced.outputs), self.traced.capture
        self.losses = ExampleLosses(loss_fn)
        self.loss_gradients = LossGradients(
            self.losses, lambda outputs: capture.output(dict(zip(nodes, outputs, strict=True)))
        )
        known_methods = {"memory_format"} | {
            f"{site.name}.{argument}" for site in self.traced.sites.values() for argument in site.weight_of
        }
        self.methods = {key: name for key, name in (speed.methods or {}).items() if key in known_methods}
        self._are_given = self.methods.get("memory_format") in MEMORY_FORMATS
        self.measures = False  # whether methods are timed now
        self.settled: set[str] = set()  # methods that were seen to fit their site
        self.examples = 0  # of the largest microbatch so far, which memory must hold
        num_sites = Counter(weight for site in self.traced.sites.values() for weight in site.weight_of.values())
        # GhostGrads norms do not add up over sites, and pulling back needs rows, or moments where
        # there is a closed form.
        ghosts: dict[str, tuple[str, ...]] = {
            "parameter": tuple(GHOSTS),
            "standardized": ("conv_ghost",),
            "general": (),
        }
        self.ghosts = {
            weight: ghosts[group.kind] if num_sites[weight] == 1 else ()
            for group in self.traced.groups
            for weight in group.weights
        }
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.compiles = speed.compile
        self._compiled = CompiledMicrobatch(self)
        self._fixed: _Fixed | None = None
        self._num_fixed, self._lock = 0, threading.Lock()

    def site_reports(self) -> list["SiteReport"]:
        """Every place where a weight meets images, in the order of the forward pass."""
        group_of = {weight: group for group in self.traced.groups for weight in group.weights}
        return [
            SiteReport(
                module=module_path(site.node),
                operation=site.operation,
                argument=argument,
                parameters=self.traced.capture.sources[weight],
                kind=group_of[weight].kind,
                method=self.methods.get(f"{site.name}.{argument}", "per_row"),
            )
            for site in self.traced.sites.values()
            for argument, weight in site.weight_of.items()
        ]

    def clipped_sum(self, coefficient: Coefficient, batch: Batch) -> ClippedGrad:
        """See `sfumato.clipping.protocol.Engine`."""
        if len(batch.inputs) > self.examples:
            self.examples = len(batch.inputs)
            self.settled.clear()
        one_pass = self._compiled if self.compiles else self.run_pass
        norms, losses, *sums = one_pass(coefficient, self._weights(), batch)
        return ClippedGrad(dict(zip(self.names, unshared(sums), strict=True)), norms, losses)

    @property
    def rounds_by(self) -> float:  # type: ignore[override]
        """See `sfumato.clipping.protocol.Engine`."""
        return 0.3 if self.low is not None else 0.02 if self.compiles else 0.0

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """See `sfumato.clipping.protocol.Engine`."""
        held = self.low, self.compiles
        self.low, self.compiles = None, False
        try:
            yield
        finally:
            self.low, self.compiles = held

    @contextmanager
    def parameters_fixed(self) -> Iterator[None]:
        """See `sfumato.clipping.protocol.Engine`. Each call enters it: what was changed since the last
        one counts.
        """
        with self._lock:
            self._num_fixed += 1
            if self._fixed is not None and not self._fixed.is_of(self.traced.capture.state(self.model)):
                self._fixed = None
        try:
            yield
        finally:
            with self._lock:  # several threads may be inside
                self._num_fixed -= 1
                if not self._num_fixed:
                    self._fixed = None

    @contextmanager
    def parameters_free(self) -> Iterator[None]:
        """See `sfumato.clipping.protocol.Engine`."""
        with self._lock:
            num_fixed, self._num_fixed, self._fixed = self._num_fixed, 0, None
        try:
            yield
        finally:
            with self._lock:
                self._num_fixed, self._fixed = self._num_fixed + num_fixed, None

    def _weights(self) -> Weights:
        fixed = self._fixed
        if fixed is not None:
            return fixed.weights
        state = self.traced.capture.state(self.model)
        weights = evaluate_weights(self.traced, state)
        with self._lock:
            if self._num_fixed:  # a context around this call may last until parameters have moved
                lasts = self._num_fixed > 1
                values = {name: value.detach().clone() for name, value in state.items()} if lasts else None
                self._fixed = _Fixed(weights, values)
        return weights

    def run_pass(self, coefficient: Coefficient, weights: Weights, batch: Batch) -> Tensors:
        """Norms, losses and each parameter's clipped sum."""
        per_example_grads, losses = backward(self, weights, batch)
        with torch.no_grad():
            totals = Totals(weights, per_example_grads)
            norms = totals.norms()
            finite = norms.isfinite() & losses.isfinite()
            coefficients = torch.where(batch.is_real & finite, coefficient(norms), 0.0)
            # Where all is finite, a coefficient of zero is enough to leave an example out. A
            # compiled graph takes none of that for granted: computed again by single operations,
            # all other examples would round otherwise.
            takes_all = not is_recording() and bool(finite.all())
            sums = totals.clipped_sums(coefficients, None if takes_all else finite)
        return norms, losses, *(sums[name] for name in self.names)

    def choose_methods(self, batch: Batch) -> None:
        """Tries the memory formats, and for each of them the methods of every site, on a made-up
        microbatch; on a CPU, which shows their order sooner, on a part of it.
        """
        self.examples = len(batch.inputs)
        if self._are_given:
            return
        self.measures = True
        try:
            self._measure(batch)
        finally:
            self.measures, self.settled = False, set()  # what was settled for the last format is not for this one

    def _measure(self, batch: Batch) -> None:
        weights, some = self._weights(), batch
        if not batch.inputs.is_cuda:
            few = batch.first(2)
            self._forget("contiguous")
            backward(self, weights, few)
            some = batch.first(max(2, int(2 * TRIAL_SECONDS / self._seconds(weights, few))))
        methods = {}
        for memory_format in MEMORY_FORMATS if some.inputs.ndim == 5 else ["contiguous"]:
            self._forget(memory_format)
            backward(self, weights, some)
            methods[memory_format] = self.methods
        took = dict.fromkeys(methods, float("inf"))
        for _ in range(_TRIAL_ROUNDS if len(methods) > 1 else 0):  # taking turns: a busy moment meets them all
            for memory_format, self.methods in methods.items():
                took[memory_format] = min(took[memory_format], self._seconds(weights, some))
        self.methods = methods[min(took, key=took.__getitem__)]

    def _forget(self, memory_format: str) -> None:
        self.methods = {"memory_format": memory_format}
        self.settled = set()

    def _seconds(self, weights: Weights, batch: Batch) -> float:
        return seconds(lambda: self.run_pass(torch.zeros_like, weights, batch), batch.inputs.device)
