"""The fast engine: one forward and one backward pass, per-example gradients only where weights meet
images.

See `sfumato.clipping.graph` for the way from a model to its clipped sum.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sfumato.clipping.clip import one_thread
from sfumato.clipping.graph.autotune import TRIAL_SECONDS, seconds
from sfumato.clipping.graph.compile import Tensors, compiled
from sfumato.clipping.graph.export import trace
from sfumato.clipping.graph.passes import MEMORY_FORMATS, Passes
from sfumato.clipping.graph.rows import module_path, name_of
from sfumato.clipping.graph.rules import CONVOLUTIONS, GHOSTS
from sfumato.clipping.graph.weights import NormsAndSums, Weights, evaluate_weights, unshared
from sfumato.clipping.protocol import LOW_PRECISIONS, Batch, ClippedGrad, Coefficient, Engine, Loss, Speed

# So often each memory format is timed.
_TRIAL_ROUNDS = 2


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


class GraphEngine(Engine):
    """Sums clipped per-example gradients of one model; see `sfumato.clipping.clipped_grad`.

    Given float64, it computes in it, operation by operation: neither rounded to less nor compiled.

    Attributes:
        methods: "<site>.<argument>" -> name of the method that computes it, and
            "memory_format" -> that of the images. Chosen by measurement on made-up images
            unless the memory format is given; then methods not given follow a fixed rule. They
            decide speed and memory, and how the result is rounded.
    """

    parallel, leaves_out = True, False

    def __init__(self, model: nn.Module, loss_fn: Loss, row: torch.Tensor, speed: Speed) -> None:
        self.model = model
        self.traced = trace(model, row)
        keys = {f"{site.name}.{argument}" for site in self.traced.sites.values() for argument in site.weight_of}
        given = {key: name for key, name in (speed.methods or {}).items() if key in keys | {"memory_format"}}
        self._are_given = given.get("memory_format") in MEMORY_FORMATS
        num_sites = Counter(weight for site in self.traced.sites.values() for weight in site.weight_of.values())
        # Ghost norms do not add up over sites, and pulling back needs rows, or moments where
        # there is a closed form.
        ghosts: dict[str, tuple[str, ...]] = {"parameter": tuple(GHOSTS), "standardized": ("conv_ghost",)}
        self._kinds = {weight: group.kind for group in self.traced.groups for weight in group.weights}
        ghosts_of = {name: ghosts.get(kind, ()) if num_sites[name] == 1 else () for name, kind in self._kinds.items()}
        self._passes = Passes(self.traced, loss_fn, ghosts_of, given, LOW_PRECISIONS[speed.precision])
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._names, self._largest = list(trained), max(parameter.numel() for parameter in trained.values())
        self._compiles = speed.compile
        self._compiled: Callable[..., tuple[Tensors, bool]] | None = None

    @property
    def methods(self) -> dict[str, str]:  # type: ignore[override]
        """See `GraphEngine`."""
        return self._passes.methods

    def site_reports(self) -> list[SiteReport]:
        """Every place where a weight meets images, in the order of the forward pass."""
        reports = []
        for site in self.traced.sites.values():
            for argument, weight in site.weight_of.items():
                method = self.methods.get(f"{site.name}.{argument}", "per_row")
                of_weight = self.traced.sources[weight], self._kinds[weight], method
                reports.append(SiteReport(module_path(site.node), site.operation, argument, *of_weight))
        return reports

    @property
    def written_out(self) -> int:
        """See `sfumato.clipping.protocol.Engine`."""
        sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        written = [report for report in self.site_reports() if report.method not in GHOSTS]
        return sum(sizes[name] for report in written for name in report.parameters)

    def evaluate(self) -> Weights:
        """See `sfumato.clipping.protocol.Engine`."""
        with one_thread(self._largest):
            return evaluate_weights(self.traced, self.traced.state(self.model))

    def clipped_sum(self, coefficient: Coefficient, evaluated: Weights, batch: Batch) -> ClippedGrad:
        """See `sfumato.clipping.protocol.Engine`."""
        compiles = self._compiles and batch.weights.dtype != torch.float64
        norms, losses, *sums = (self._run_compiled if compiles else self._run)(coefficient, evaluated, batch)
        return ClippedGrad(dict(zip(self._names, unshared(sums), strict=True)), norms, losses)

    def _run(self, coefficient: Coefficient, weights: Weights, batch: Batch) -> Tensors:
        """Norms, losses and each parameter's clipped sum."""
        per_example_grads, losses = self._passes(weights, batch)
        with torch.no_grad():
            both = NormsAndSums(weights, per_example_grads)
            norms = both.norms()
            sums = both.clipped_sums(torch.where(batch.is_real, coefficient(norms), 0.0))
        return norms, losses, *map(sums.__getitem__, self._names)

    def _run_compiled(self, coefficient: Coefficient, weights: Weights, batch: Batch) -> Tensors:
        """The same. The weights stay outside the graph unless autograd's record of them is needed in it."""
        weights_of: Callable[[Any], Weights]
        if any(group.kind == "general" for group in self.traced.groups):
            state = self.traced.state(self.model)
            tensors = list(state.values())
            weights_of = lambda tensors: evaluate_weights(self.traced, dict(zip(state, tensors, strict=True)))  # noqa: E731
        elif weights.need_record:  # a closed form no longer holds
            return self._run(coefficient, weights, batch)
        else:
            tensors, weights_of = weights.apart()
        own, start = tuple(tensor.contiguous() for tensor in batch.tensors), len(batch.tensors)
        if self._compiled is None:
            self._run(coefficient, weights, batch)  # settles the methods
            self._compiled = compiled(
                lambda *given: self._run(coefficient, weights_of(given[start:]), batch.like(given[:start])),
                (*own, *tensors),
            )
        results, holds = self._compiled(*own, *tensors)
        return results if holds else self._run(coefficient, weights, batch)

    def choose_methods(self, batch: Batch) -> None:
        """Tries the memory formats, and for each of them the methods of every site, on a made-up
        microbatch; on a CPU, which shows their order sooner, on a part of it.
        """
        self._passes.examples = len(batch.inputs)
        weights, some, few = self.evaluate(), batch, batch.take(slice(2))
        if self._are_given:
            self._passes(weights, few)  # what is not given follows the rule
            return
        if not batch.inputs.is_cuda:
            self._passes.forget("contiguous")
            self._passes(weights, few)
            some = batch.take(slice(max(2, int(2 * TRIAL_SECONDS / self._seconds(weights, few)))))
        methods = {}
        convolutions = [node for node in self.traced.last_uses if name_of(node) in CONVOLUTIONS]
        # One alone, of patches or the first, gains nothing by another order, and a trial takes a second.
        for memory_format in MEMORY_FORMATS if some.inputs.ndim == 5 and len(convolutions) > 1 else ["contiguous"]:
            self._passes.forget(memory_format)
            self._passes(weights, some, measures=True)
            methods[memory_format] = self.methods
        took = dict.fromkeys(methods, float("inf"))
        for _ in range(_TRIAL_ROUNDS if len(methods) > 1 else 0):  # taking turns: a busy moment meets them all
            for memory_format, self._passes.methods in methods.items():
                took[memory_format] = min(took[memory_format], self._seconds(weights, some))
        self._passes.methods = methods[min(took, key=took.__getitem__)]
        self._passes.settled = set()  # what was settled for the last format is not for this one

    def _seconds(self, weights: Weights, batch: Batch) -> float:
        return seconds(lambda: self._run(torch.zeros_like, weights, batch), batch.inputs.device)
