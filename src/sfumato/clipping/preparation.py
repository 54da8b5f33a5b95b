"""Before the first private image: an engine that keeps the law, and how it computes. Made-up images
alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sfumato.clipping.agreement import first_line
from sfumato.clipping.checks import random_state_kept
from sfumato.clipping.closed_form import MICROBATCH_SIZE, ClosedFormEngine
from sfumato.clipping.comparison import complaint, complaint_of_speed
from sfumato.clipping.func import FuncEngine
from sfumato.clipping.graph.autotune import warm_seconds
from sfumato.clipping.graph.engine import GraphEngine
from sfumato.clipping.law import Law, Truth
from sfumato.clipping.microbatch import FIRST_ON_GPU, default_microbatch_size, find_microbatch_size, fits_batch
from sfumato.clipping.numerics import convolutions, refuse_missing_tf32
from sfumato.clipping.protocol import Coefficient, Engine, Loss, is_out_of_memory
from sfumato.clipping.reference import ReferenceEngine
from sfumato.clipping.signature import signature
from sfumato.clipping.speed import CLOSED_FORM, Speed
from sfumato.clipping.stand_in import stand_in
from sfumato.errors import InputError, MachineError
from sfumato.models.layers import Classifier

BUILDERS: dict[str, Callable[..., Engine]] = {
    CLOSED_FORM: ClosedFormEngine,
    "graph": GraphEngine,
    "func": FuncEngine,
    "reference": ReferenceEngine,
}
_SLOW = ', or use engine="reference", which is slow'


class Preparation:
    """What is settled for one model, loss and kind of images.

    Looks at shapes and types of what it is given, never at values.

    Attributes:
        engine: It agrees with plain autograd on single images (`sfumato.clipping.law`).
        name: The engine's.
        refusal: Why no faster one takes the model; None if none is faster.
        microbatch_size: Examples differentiated at once.

    Args:
        views: (..., K, ...): their shape but for the first dimension, type and device.
        targets: Likewise.
        batch_size: Expected, a public number; None: not known.
        tries: Whether a whole microbatch is tried.

    Raises:
        InputError: If no engine takes the model.
        MachineError: If memory does not hold a microbatch.
    """

    engine: Engine

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        speed: Speed,
        coefficient: Coefficient,
        views: torch.Tensor,
        targets: tuple[torch.Tensor, ...],
        *,
        batch_size: int | None,
        tries: bool,
    ) -> None:
        refuse_missing_tf32(speed.precision, views.device)
        self._model, self._loss_fn, self._speed, self._tries = model, loss_fn, speed, tries
        self._batch_size = batch_size
        self._row = torch.zeros(1, *views.shape[2:], dtype=views.dtype, device=views.device)
        self._law, truth = self._examine(views, targets)
        self._is_double = truth.double
        num_parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.microbatch_size = speed.microbatch_size or min(
            default_microbatch_size(num_parameters, views.shape[1], truth.values_saved), fits_batch(batch_size)
        )
        refusals: list[str] = []
        engines = speed.engines
        if isinstance(model, Classifier) and speed.engine == "auto" and engines[0] == "graph" and len(engines) > 1:
            engines = (CLOSED_FORM, *engines)
        for name in engines:
            self.name = name
            try:
                self.engine = self._build(truth, coefficient)
                break
            except InputError as refusal:  # what keeps it from the fast engine keeps nothing from the general one
                if name == engines[-1]:
                    raise
                refusals.append(str(refusal))
        self.refusal = "; and ".join(refusal.rstrip(".") for refusal in refusals) or None
        self._shape, self._kinds = _shape(views), {_kinds(targets)}
        self.note()

    def fits(self, views: torch.Tensor) -> bool:
        """Whether it is for images of such a shape, type and device."""
        return self._shape == _shape(views)

    def is_current(self) -> bool:
        """Whether it is for the model as it is: with another mode, layer, setting or hook the
        engine is another.
        """
        return self._signature.holds(signature(self._model))

    def note(self) -> None:
        """What the model's own code noted in helpers is no change from outside."""
        self._signature = signature(self._model)

    def knows(self, targets: tuple[torch.Tensor, ...]) -> bool:
        """Whether the loss was held to the law with such targets."""
        return _kinds(targets) in self._kinds

    def take(self, views: torch.Tensor, targets: tuple[torch.Tensor, ...], coefficient: Coefficient) -> None:
        """Holds the engine to the law with other targets.

        Raises:
            InputError: If it does not keep it.
        """
        law, truth = self._examine(views, targets)
        self._hold(law, self.engine, truth, coefficient)
        self._law, self._is_double = law, truth.double
        self._kinds.add(_kinds(targets))

    def verify(self, coefficient: Coefficient, seed: int) -> None:
        """Holds the engine to the law once more, at the parameters as they are now."""
        self.engine.losses.renew(self._law.targets)
        truth = self._law.truth(self._is_double, seed, shifted=False)
        self._hold(self._law, self.engine, truth, coefficient)

    def filled(self, count: int) -> int:
        """How many examples a microbatch of so many is filled up to: all of them, always. Libraries
        choose kernels by the number of rows, and kernels round differently: one image more would
        move all others that lie at a kink.
        """
        return count if self.name == "reference" else max(count, self.microbatch_size)

    def _examine(self, views: torch.Tensor, targets: tuple[torch.Tensor, ...]) -> tuple[Law, Truth]:
        law = Law(self._model, self._loss_fn, self._row, tuple(target[:0] for target in targets), views.shape[1])
        return law, law.examine()

    def _build(self, truth: Truth, coefficient: Coefficient) -> Engine:
        """The engine of that name, tried on made-up examples.

        Raises:
            InputError: If it cannot take the model, or breaks the law.
        """
        try:
            engine = BUILDERS[self.name](self._model, self._loss_fn, self._row, self._speed)
            engine.draw_dims = truth.draw_dims
            with convolutions(self._speed.precision):
                self._try(engine, truth, coefficient)
        except InputError:
            raise
        except Exception as error:  # engines raise whatever the model's code runs into
            if is_out_of_memory(error) or isinstance(error, MachineError):
                raise
            raise InputError(f'engine "{self.name}" fails on this model: {first_line(error)}') from error
        self._hold(self._law, engine, truth, coefficient)
        if self.name == CLOSED_FORM and self._speed.microbatch_size is None:  # nothing is written out
            self.microbatch_size = min(MICROBATCH_SIZE, fits_batch(self._batch_size))
        return engine

    def _try(self, engine: Engine, truth: Truth, coefficient: Coefficient) -> None:
        """Settles the microbatch's size, and how the engine computes it."""
        if not self._tries:
            engine.choose_methods(self._law.batch(self.filled(1), truth))
            return
        if self.name == "reference":  # one view at a time: no size takes more memory than another
            return

        # A CPU is at its best with few. With recorded methods nothing is measured.
        grows = self._row.is_cuda and self._speed.methods is None and self._speed.microbatch_size is None

        def attempt(size: int) -> float:
            batch = self._law.batch(size, truth)
            engine.choose_methods(batch)
            if grows:
                return warm_seconds(lambda: engine.clipped_sum(coefficient, batch), self._row.device)
            engine.clipped_sum(coefficient, batch)  # whether memory holds it
            return 0.0

        compiles, engine.compiles = engine.compiles, False
        try:
            if self._speed.microbatch_size is None:
                most = fits_batch(self._batch_size)
                start = min(most, FIRST_ON_GPU) if grows else self.microbatch_size
                self.microbatch_size = find_microbatch_size(attempt, start, grows, most, self._batch_size)
            if grows:  # the last size that was tried may be another
                engine.choose_methods(self._law.batch(self.microbatch_size, truth))
            elif self._speed.microbatch_size is not None:
                attempt(self.microbatch_size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise MachineError(
                f"memory does not hold a microbatch of {self.microbatch_size} examples. Take a "
                "smaller microbatch_size, or leave it out."
            ) from None
        finally:
            engine.compiles = compiles

    def _hold(self, law: Law, engine: Engine, truth: Truth, coefficient: Coefficient) -> None:
        with engine.parameters_free():
            with engine.plainly(), engine.losses.trying():
                wrong = complaint(law, engine, truth)
            with engine.losses.noting():
                if wrong is None:
                    self._note_kinds(law, engine, truth, coefficient)
                if wrong is None:
                    # A compiled graph is that of whole microbatches; of others float32 takes more memory.
                    count = self.filled(1) if self._speed.compile else 2
                    coarse = complaint_of_speed(law, engine, truth, coefficient, count, self._speed.precision)
                    if coarse is not None:
                        raise InputError(f'engine "{self.name}" {coarse}. Take precision "float32", not compiled.')
        if wrong is not None:
            others = _SLOW if self._speed.engine in ("graph", "func") else ""
            raise InputError(f'engine "{self.name}" {wrong}. Take that out{others}.')

    def _note_kinds(self, law: Law, engine: Engine, truth: Truth, coefficient: Coefficient) -> None:
        """What the loss will be given in calls, it is given now, of made-up images."""
        with random_state_kept(law.row), stand_in(self._model, None, None), engine.plainly(), torch.no_grad():
            engine.clipped_sum(coefficient, law.kind_of_calls(truth))


def _kinds(targets: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """A loss may be another function of two targets than of one, and draw random numbers for them."""
    return tuple((target.shape[1:], target.dtype, target.device) for target in targets)


def _shape(views: torch.Tensor) -> tuple[Any, ...]:
    return views.shape[2:], views.dtype, views.device
