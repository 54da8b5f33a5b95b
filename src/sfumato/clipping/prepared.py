"""Before the first private image: an engine that passed the check, and how it computes. Made-up images
alone.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from sfumato.clipping.clip import Clip, convolutions, refuse_missing_tf32
from sfumato.clipping.closed_form import MICROBATCH_SIZE, ClosedFormEngine
from sfumato.clipping.engine_check import EngineCheck, Expected
from sfumato.clipping.func import FuncEngine
from sfumato.clipping.graph.autotune import warm_seconds
from sfumato.clipping.graph.engine import GraphEngine
from sfumato.clipping.microbatch import FIRST_ON_GPU, default_microbatch_size, find_microbatch_size, fits_batch
from sfumato.clipping.probe import random_state_kept, temporary_values
from sfumato.clipping.protocol import CLOSED_FORM, Batch, Engine, Loss, Speed
from sfumato.clipping.reference import ReferenceEngine
from sfumato.errors import InputError, MachineError, is_out_of_memory, refusing
from sfumato.models.layers import Classifier
from sfumato.torch_internals import set_own_threads

BUILDERS: dict[str, Callable[..., Engine]] = {
    CLOSED_FORM: ClosedFormEngine,
    "graph": GraphEngine,
    "func": FuncEngine,
    "reference": ReferenceEngine,
}


class Prepared:
    """What is settled for one model, loss and kind of images.

    Looks at shapes and types of what it is given, never at values.

    Attributes:
        engine: It agrees with plain autograd on single images (`sfumato.clipping.engine_check`).
        name: The engine's.
        refusal: Why no faster one takes the model; None if none is faster.
        num_workers: How many microbatches are computed at once.
        threads: In which they are, by one thread each; with one worker, to load one ahead.
        microbatch_size: The most examples of a microbatch.
        draw_dims: See `sfumato.clipping.protocol.Batch`.
        batch_size: Examples of a call, expected: a public number; None: not known.
        on_gpu: Whether images are on one.

    Args:
        batch: Its values are not used.

    Raises:
        InputError: If no engine takes the model.
        MachineError: If memory does not hold a microbatch.
    """

    engine: Engine
    name: str
    num_workers: int
    threads: ThreadPoolExecutor

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        speed: Speed,
        clip: Clip,
        batch: Batch,
        batch_size: int | None,
    ) -> None:
        refuse_missing_tf32(speed.precision, batch.inputs.device)
        self._model, self._loss_fn, self._speed, self._clip = model, loss_fn, speed, clip
        self.batch_size, self.on_gpu = batch_size, batch.inputs.is_cuda
        self._num_views = batch.inputs.shape[1]
        self._row = torch.zeros_like(batch.inputs[:1, 0])
        targets = tuple(target[:0, 0] for target in batch.targets)
        self._check = EngineCheck(model, loss_fn, self._row, targets, self._num_views)
        with convolutions("float32"):
            expected = self._check.expect()
            self.draw_dims = expected.batch.draw_dims
            refusals: list[str] = []
            for name in self._engines():
                self.name = name
                try:
                    self.engine = self._built(expected)
                    break
                except InputError as refusal:  # what keeps it from the fast engine keeps nothing from the general one
                    refusals.append(f'engine "{name}" {str(refusal).rstrip(". ")}')
            else:
                raise InputError("; and ".join(refusals) + ".")
        self.refusal = "; and ".join(refusals) or None
        self._state, self._kinds = _state(model), _kinds(batch)

    def is_of(self, model: nn.Module) -> bool:
        """Whether the model has the parameters, and modules the modes, that it had."""
        return self._state == _state(model)

    def takes(self, batch: Batch) -> bool:
        """Whether it was settled for views and targets of such shapes and types."""
        return self._kinds == _kinds(batch)

    @property
    def has_one_size(self) -> bool:
        """Whether all microbatches are of one size, filled up: kernels are planned, or compiled, for it."""
        return self.on_gpu or self._speed.compile

    def microbatches(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Divides rows, one at least: all workers have as many, but for one."""
        if self.has_one_size:
            return rows.split(self.microbatch_size)
        rounds = math.ceil(len(rows) / (self.microbatch_size * self.num_workers))
        return rows.tensor_split(min(len(rows), rounds * self.num_workers))

    def _engines(self) -> tuple[str, ...]:
        """The names to try, in order."""
        engines, asked = self._speed.engines, self._speed.engine
        is_closed = isinstance(self._model, Classifier) and asked == "auto" and len(engines) > 1
        return (CLOSED_FORM, *engines) if is_closed else engines

    def _size(self, written_out: int, expected: Expected) -> int:
        """What is asked for, or what memory holds: of the backward pass, the gradients at each weight too."""
        values_saved = 2 * self._num_views * expected.values_saved
        size = default_microbatch_size(written_out, values_saved, self.num_workers)
        return self._speed.microbatch_size or self._fitting(size)

    def _fitting(self, size: int) -> int:
        return min(size, fits_batch(self.batch_size) if self.has_one_size else max(8, self.batch_size or size))

    def _built(self, expected: Expected) -> Engine:
        """The engine of that name, checked.

        Raises:
            InputError: If it cannot take the model, or gives something else than single images do.
        """
        with refusing("fails on this model", "", Exception):  # engines raise whatever the model's code runs into
            engine = BUILDERS[self.name](self._model, self._loss_fn, self._row, self._speed)
            every = torch.get_num_threads()
            self.num_workers = (self._speed.workers or every) if engine.parallel and not self.on_gpu else 1
            own = every if self.num_workers == 1 else 1
            self.threads = ThreadPoolExecutor(
                self.num_workers, "microbatch", initializer=set_own_threads, initargs=(own,)
            )
            self.microbatch_size = self._size(0, expected)
            try:
                self._settle_and_check(engine, expected)
            except (MemoryError, RuntimeError) as error:
                if is_out_of_memory(error):
                    raise MachineError(
                        f"memory does not hold a microbatch of {self.microbatch_size} examples. Take a "
                        "smaller microbatch_size, or leave it out."
                    ) from None
                raise
        if self.name == CLOSED_FORM and self._speed.microbatch_size is None:  # nothing is written out
            self.microbatch_size = self._fitting(MICROBATCH_SIZE)
        return engine

    def _settle_and_check(self, engine: Engine, expected: Expected) -> None:
        if self.name != "reference":  # one view at a time: no size takes more memory than another
            self._choose(engine, expected)
        self._check.refuse(engine, expected)
        size = 2 if self.name == "reference" else self.microbatch_size
        precision, compiles = self._speed.precision, self._speed.compile
        self._check.refuse_in_run(engine, expected, self._clip, size, precision, compiles)

    def _choose(self, engine: Engine, expected: Expected) -> None:
        """Settles how the engine computes, and on a GPU the microbatch's size. A CPU is at its best with few."""
        # With recorded methods nothing is measured.
        grows = self._row.is_cuda and self._speed.methods is None and self._speed.microbatch_size is None

        def attempt(size: int) -> float:
            batch = expected.microbatch(size, self._num_views, self._row)
            engine.choose_methods(batch)
            return warm_seconds(lambda: engine.clipped_sum(self._clip, engine.evaluate(), batch), self._row.device)

        def chosen() -> None:
            with convolutions(self._speed.precision):
                if grows:
                    most = fits_batch(self.batch_size)
                    start = min(most, FIRST_ON_GPU)
                    self.microbatch_size = find_microbatch_size(attempt, start, most, self.batch_size)
                engine.choose_methods(expected.microbatch(self.microbatch_size, self._num_views, self._row))
            if not grows:
                self.microbatch_size = self._size(engine.written_out, expected)

        with random_state_kept(self._row), temporary_values(self._model, None, expected.seed):
            self.threads.submit(chosen).result()  # where microbatches will be computed


def _state(model: nn.Module) -> list[Any]:
    found: list[Any] = []
    for module in model.modules():
        found.append(module.training)
        for parameter in module._parameters.values():
            found.append((id(parameter), parameter is not None and parameter.requires_grad))
    return found


def _kinds(batch: Batch) -> list[Any]:
    found: list[Any] = []
    for tensor in (batch.inputs, *batch.targets):
        found.append((tensor.shape[1:], tensor.dtype, tensor.device))
    return found
