"""What every engine is: one way of summing the clipped gradients of a microbatch; what it takes and gives."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import vmap

from sfumato.clipping.clip import Coefficient, at_least_float32
from sfumato.errors import InputError
from sfumato.torch_internals import tree_flatten, tree_unflatten

Loss = Callable[..., torch.Tensor]
# What images and weights are rounded to where they meet; None leaves them as they are.
LOW_PRECISIONS = {"float32": None, "tf32": None, "bf16": torch.bfloat16}
# The fastest first.
ENGINES = ("graph", "func", "reference")
# For `sfumato.models.layers.Classifier`, which it takes before all others.
CLOSED_FORM = "closed_form"


@dataclasses.dataclass(frozen=True)
class Batch:
    """A microbatch of m examples with K views each.

    Attributes:
        inputs: (m, K, ...).
        targets: Each (m, K, ...): one for each view.
        weights: (m, K): an example's gradient is the sum of its views' times these; 1/K: their mean.
        is_real: (m,): False for padding, whose norms and losses say nothing.
        seeds: (m, K, 2), of the random numbers inside the model (`sfumato.clipping.random_layers`); None:
            it draws none.
        draw_dims: For each draw of random numbers inside the model, in order, the dimension that counts rows.
    """

    inputs: torch.Tensor
    targets: tuple[torch.Tensor, ...]
    weights: torch.Tensor
    is_real: torch.Tensor
    seeds: torch.Tensor | None = None
    draw_dims: tuple[int, ...] = ()

    def take(self, examples: torch.Tensor | slice) -> "Batch":
        """These of the examples."""
        return self.like(tuple(tensor[examples] for tensor in self.tensors))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in an order that `like` knows."""
        seeds = () if self.seeds is None else (self.seeds,)
        return (self.inputs, self.weights, self.is_real, *self.targets, *seeds)

    def like(self, tensors: tuple[torch.Tensor, ...]) -> "Batch":
        """A batch of such tensors."""
        inputs, weights, is_real, *rest = tensors
        targets = tuple(rest[: len(self.targets)])
        seeds = rest[-1] if self.seeds is not None else None
        return Batch(inputs, targets, weights, is_real, seeds, self.draw_dims)


@dataclasses.dataclass(frozen=True)
class ClippedGrad:
    """What `sfumato.clipping.clipped_grad` computes for one batch of B examples.

    Attributes:
        grad_sum: Each trainable parameter's name, in the model's order -> sum of the clipped
            gradients, shaped like the parameter, in float32 (float64 for float64 parameters). Safe
            to release only after noise of `sensitivity` times sigma has been added.
        grad_norms: (B,) L2 norms before clipping, what float32 roundings may hide included
            (docs/engine.md); not private. Zero at padding.
        losses: (B,) losses, averaged over an example's views; not private. Zero at padding.
        sensitivity: How far one example moves the sum, in L2 norm: what noise multiplies.
        clipping_norm: C, to which each gradient was clipped; the sum is divided by it where sensitivity is 1.
    """

    grad_sum: dict[str, torch.Tensor]
    grad_norms: torch.Tensor
    losses: torch.Tensor
    sensitivity: float = math.nan
    clipping_norm: float = math.nan


@dataclasses.dataclass(frozen=True)
class Speed:
    """Settings of `sfumato.clipping.clipped_grad` that decide speed alone.

    Attributes:
        engine: Of `ENGINES`, or "closed_form", or "auto": the first of them that takes the model.
        microbatch_size: Examples differentiated at once; None: see `sfumato.clipping.microbatch`.
        methods: How engine "graph" computes at each operation, as recorded; None: measured.
        precision: "float32", "tf32" or "bf16"; see `sfumato.clipping.clipped_grad`.
        compile: Whether a microbatch becomes one compiled graph.
        workers: Microbatches computed at once on a CPU, one thread each; 1: one after another, by
            all threads; None: as many as PyTorch has threads, of which one loads at a time.

    Raises:
        InputError: If one of them is out of range, or two do not go together.
    """

    engine: str = "auto"
    microbatch_size: int | None = None
    methods: dict[str, str] | None = None
    precision: str = "float32"
    compile: bool = False
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.engine not in ("auto", CLOSED_FORM, *ENGINES):
            raise InputError(f'engine "{self.engine}" is unknown. Known are auto, {", ".join(ENGINES)}.')
        if self.microbatch_size is not None and not _is_count(self.microbatch_size):
            raise InputError(f"microbatch_size must be a whole number, at least 1, not {self.microbatch_size!r}.")
        if self.precision not in LOW_PRECISIONS:
            raise InputError(f'precision "{self.precision}" is unknown. Known are {", ".join(LOW_PRECISIONS)}.')
        if self.workers is not None and not _is_count(self.workers):
            raise InputError(f"workers must be a whole number, at least 1, not {self.workers!r}.")
        if self._needs_graph and self.engine not in ("auto", "graph"):
            raise InputError(f'compile and precision "bf16" need engine "graph", not "{self.engine}".')

    @property
    def engines(self) -> tuple[str, ...]:
        """The names to try, in order."""
        if self._needs_graph:
            return ("graph",)
        return ENGINES if self.engine == "auto" else (self.engine,)

    @property
    def _needs_graph(self) -> bool:
        return self.compile or self.precision == "bf16"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class Engine(ABC):
    """Sums clipped per-example gradients of one model.

    Attributes:
        methods: How it computes, as far as that decides speed and rounding; empty where there is no
            choice.
        parallel: Whether several threads may use it at once.
        leaves_out: Whether an example whose norm or loss is not finite adds exactly zero. Where it does not, since it
            would wait for the device to see that, the sum may be no number, and `GradFn` takes it again.

    Args:
        row: (1, ...): one input, of which only shape, type and device are used.

    Raises:
        InputError: If it does not take the model.
    """

    methods: dict[str, str]
    parallel, leaves_out = False, True

    def __init__(self, model: nn.Module, loss_fn: Loss, row: torch.Tensor, speed: Speed) -> None:
        self.model, self.loss_fn, self.methods = model, loss_fn, {}

    def choose_methods(self, batch: Batch) -> None:  # noqa: B027  (most have no choice)
        """Settles how to compute, by trying it on a made-up batch as large as a microbatch will be."""

    @property
    def written_out(self) -> int:
        """Numbers of one example's gradients that it writes out, by the methods settled."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def evaluate(self) -> Any:
        """What depends on parameters and buffers alone, as they are: computed once for all microbatches of a call."""
        return None

    @abstractmethod
    def clipped_sum(self, coefficient: Coefficient, evaluated: Any, batch: Batch) -> ClippedGrad:
        """The sum of each real example's coefficient(norm) times its gradient, in tensors that
        share no memory.

        Args:
            evaluated: From `evaluate`, at the present parameters.
        """


def example_losses(
    loss_fn: Loss, outputs: Any, targets: tuple[torch.Tensor, ...], weights: torch.Tensor
) -> torch.Tensor:
    """(m,) losses: of each example, the sum of its K rows' losses times their weights.

    ``loss_fn`` is called through `torch.func.vmap`, with a batch of one row, and returns its loss, of shape () or (1,).

    Args:
        outputs: Any nesting of tensors (m K, *shape of the model's output for one row); what else is in it goes to
            the loss as it is.
        targets: Each (m, K, ...).
        weights: (m, K).
    """
    leaves, structure = tree_flatten(outputs)
    tensors = list(filter(torch.is_tensor, leaves))

    def of_row(*parts: torch.Tensor) -> torch.Tensor:
        own = iter(parts[: len(tensors)])
        row = tree_unflatten([next(own) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)
        return one_loss(loss_fn, row, parts[len(tensors) :])

    losses = vmap(of_row)(*tensors, *(target.flatten(0, 1).unsqueeze(1) for target in targets))
    return (at_least_float32(losses).view_as(weights) * weights).sum(1)


def one_loss(loss_fn: Loss, outputs: Any, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """The loss of one row, of shape ().

    Raises:
        InputError: If the loss gives another number of values than one.
    """
    loss = loss_fn(outputs, *targets)
    if not isinstance(loss, torch.Tensor) or loss.shape not in ((), (1,)):
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InputError(
            f"loss_fn gave {shape} for one row, not its loss, of shape () or (1,). It is called with one row at a time."
        )
    return loss.reshape(())
