"""A training loop of one's own, counted and certified: `PrivateLoop`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from sfumato.accounting.accountants import EpsilonCurve
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.clipping.protocol import ClippedGrad
from sfumato.data.sampling import poisson_batch
from sfumato.errors import InputError, refusing
from sfumato.planning.claims import claims_of
from sfumato.randomness import Stream, new_key
from sfumato.run_folder import budget as budgets
from sfumato.run_folder import files, launch, ledger, record
from sfumato.run_folder.certificate import (
    COPIES,
    ENDS,
    OTHER_RUNS,
    OUTSIDE,
    PERSONS,
    RUNNING_TIME,
    SEVERAL_IMAGES,
    UNSEARCHED,
    counted,
)
from sfumato.run_folder.ledger import LEDGER_FILE, MOST_LOST, new_run_line
from sfumato.run_folder.record import LoopCertificate
from sfumato.training.noise import add_noise

_OF_THE_LOOP = (
    "what the loop did, which is its author's word: that each sum was that of the update's own sample, each example "
    "clipped alone, that nothing else of the images left it, and that it went on with the same images"
)
_BEGUN_AGAIN = "loops that were begun in other folders, and given up: each of them counts"


class Update:
    """One update of a `PrivateLoop`.

    Attributes:
        number: In the plan, from 1.
        indices: (realised batch,), int64, ascending: the examples drawn. Sensitive, and may be empty: an update all the
            same.
        key: 32 bytes of this update alone, for a model that draws random numbers (dropout): the ``key`` of `grad_fn`.
    """

    def __init__(self, loop: "PrivateLoop", number: int, indices: torch.Tensor, key: bytes) -> None:
        self._loop, self.number, self.indices, self.key = loop, number, indices, key

    def release(self, out: ClippedGrad) -> dict[str, torch.Tensor]:
        """Counts the update, and gives its gradient with noise.

        Args:
            out: Of `clipped_grad`, over `indices`.

        Returns:
            Parameter name -> noisy sum divided by the mechanism's batch_size: what an optimizer may see.

        Raises:
            InputError: If the sum is of another number of examples or another sensitivity, or was released before.
            MachineError: If it cannot be counted on disk; nothing was released then.
        """
        return self._loop._release(self, out)

    def apply(self, out: ClippedGrad, optimizer: torch.optim.Optimizer) -> None:
        """`release`, and a step of the optimizer, which moves the parameters that `clipped_grad` named."""
        _require_sum(out)
        parameters = dict(self._loop._model.named_parameters())
        if strange := out.grad_sum.keys() - parameters.keys():
            raise InputError(
                f"the loop's model has no parameter {min(strange)!r}, of which the sum has a gradient. Give the loop "
                "the model that grad_fn was made for."
            )
        private_grad = self.release(out)
        for name, value in private_grad.items():
            parameters[name].grad = value.to(parameters[name])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._loop._is_settled = True


def _require_sum(out: ClippedGrad) -> None:
    if not isinstance(out, ClippedGrad):
        raise InputError(f"a mean loss has no examples to clip: give what grad_fn returns, not {type(out).__name__}.")


class PrivateLoop:
    """Draws the samples and the noise of somebody's own loop, counts its releases on disk, and states what they cost.

    Guarantee: each update has a sample and noise of its own, from fresh bytes of the operating system, and is counted
    on disk before its noise is drawn; there are never more than the mechanism's num_steps, whose epsilon the
    certificate states. That each sum was made as `clipped_grad` makes it, of the update's own sample, is the author's
    word.

    A loop that died goes on from its newest checkpoint by the same lines: what was released since is lost to the model
    and stays counted. Checkpoints are written when the next update is asked for, every fiftieth of the plan or every
    five minutes, and by `close`.

    Example:
        >>> loop = sfumato.PrivateLoop("runs/mine", mechanism, clipping_norm=1.0, delta=1e-5,
        ...                            state={"model": model, "optimizer": optimizer})  # doctest: +SKIP
        >>> for update in loop:  # doctest: +SKIP
        ...     out = grad_fn(images[update.indices], labels[update.indices])
        ...     update.apply(out, optimizer)
        >>> loop.certificate.epsilon  # doctest: +SKIP

    Args:
        folder: New or empty, or that of the same loop before. Its folder owner/ is for you alone.
        mechanism: The whole plan.
        clipping_norm: C of `clipped_grad`, stated in the certificate.
        delta: In (0, 1).
        accountant: "pld" (tighter) or "rdp".
        state: By name, what a checkpoint keeps: objects with ``state_dict`` and ``load_state_dict``, "model" among
            them. Loaded at once where the loop goes on.
        max_lost: The share of the plan that crashes may cost the model.
        budget: The file of a budget that the plan is reserved in, as `sfumato.train` takes it: at each start.

    Raises:
        InputError: If no epsilon is known for the mechanism, the plan does not fit the budget, the folder holds
            something else, or another process works in it.
        MachineError: If it cannot be written, or more was lost than allowed.
    """

    def __init__(
        self,
        folder: str | Path,
        mechanism: Mechanism,
        *,
        clipping_norm: float,
        delta: float,
        accountant: Accountant = "pld",
        state: Mapping[str, Any],
        max_lost: float = MOST_LOST,
        budget: str | Path | None = None,
    ) -> None:
        self.folder, self.mechanism, self._clipping_norm = Path(folder), mechanism, float(clipping_norm)
        if not isinstance(state.get("model"), torch.nn.Module):
            raise InputError('state names what a checkpoint keeps: give {"model": model, "optimizer": optimizer}.')
        self._state, self._model = dict(state), state["model"]
        self._claims = claims_of(mechanism, float(delta), accountant)  # refused before anything is written
        self._curve = EpsilonCurve(mechanism, float(delta), accountant)
        self._budget = None if budget is None else Path(budget)
        reserving = None if self._budget is None else budgets.read(self._budget)
        line = new_run_line(
            mechanism,
            unit="person" if mechanism.images_per_unit > 1 else "image",
            clipping_norm=self._clipping_norm,
            delta=float(delta),
            recipe_sha256=None,
            budget=None if reserving is None else reserving.stated.budget_id,
        )
        if not (self.folder / LEDGER_FILE).exists():
            launch.refuse_other_files(self.folder)
            if reserving is not None:  # before anything is written
                reserving.require([line])
        files.refuse_links(self.folder)
        files.make_folders(self.folder)
        self._started = launch.start(self.folder, line)
        self._ledger = self._started.ledger
        self._pending: Update | None = None
        self._step, self._is_settled = 0, True  # the model has what was released
        with self._ledger.closed_on_error():
            self._begin(line, max_lost)

    def _begin(self, line: ledger.RunLine, max_lost: float) -> None:
        found = self._started.checkpoint
        if found is None:
            self._started.take_over()
            if self._ledger.is_new:
                self._ledger.begin(line)
            self._started.reserve(self._budget)
            self._save()
            return
        if found.state.keys() != self._state.keys():
            raise InputError(
                f"the checkpoint keeps {', '.join(sorted(found.state))}, and state names "
                f"{', '.join(sorted(self._state))}. Give what was given when the loop began."
            )
        for name, value in self._state.items():
            what = f"{name} does not take what the checkpoint keeps of it"
            remedy = "Give it as it was."
            if not self._ledger.lines.num_releases:
                remedy = f"Nothing was released: remove the folder {self.folder}, and begin again."
            with refusing(what, remedy, RuntimeError, ValueError, KeyError):
                value.load_state_dict(found.state[name])
        self._step = found.step
        self._ledger.refuse_lost(self._step, max_lost)
        self._started.take_over()
        self._started.reserve(self._budget)
        self._write("running")

    def __iter__(self) -> Iterator[Update]:
        """The updates that the plan has left. One that an exception left unreleased is handed out first."""
        while (handed_out := self._pending or self._next()) is not None:
            yield handed_out
            if self._pending is handed_out:
                raise InputError(
                    f"update {handed_out.number} was drawn and not released: to pass over samples costs more than is "
                    "stated. Call its apply or release, for an empty sample too."
                )
        if self._ledger.is_open:
            self._write("complete")
            self._started.checkpoints.remove_room()
            self._ledger.close()

    def _next(self) -> Update | None:
        self._is_settled = True  # whoever asks for the next one has applied the last
        if self._ledger.is_open and self._started.is_due():
            self._save()
        if self._ledger.lines.num_releases < self.mechanism.num_steps:
            stream = Stream(new_key())
            key = bytes(stream.bytes(32))
            indices = torch.from_numpy(poisson_batch(self.mechanism, stream))
            self._pending = Update(self, self._ledger.lines.num_releases + 1, indices, key)
        return self._pending

    def _release(self, update: Update, out: ClippedGrad) -> dict[str, torch.Tensor]:
        _require_sum(out)
        if update is not self._pending:
            raise InputError(f"update {update.number} was released before, or is of another loop.")
        if len(out.grad_norms) != len(update.indices):
            raise InputError(
                f"the sum is of {len(out.grad_norms)} examples, and the update's sample has {len(update.indices)}. "
                "Give the sum over update.indices."
            )
        if out.clipping_norm != self._clipping_norm or out.sensitivity not in (1.0, self._clipping_norm):
            raise InputError(
                f"the sum was clipped to {out.clipping_norm:g}, and this loop states {self._clipping_norm:g}. Make "
                "grad_fn and loop with one clipping_norm."
            )
        self._pending, self._is_settled = None, False
        self._started.append(self._step + 1)  # on disk before any noise is drawn
        noisy = add_noise(out.grad_sum, self.mechanism.noise_multiplier * out.sensitivity, Stream(new_key()))
        self._step += 1
        return {name: value / self.mechanism.batch_size for name, value in noisy.items()}

    def _save(self) -> None:
        self._started.save({name: value.state_dict() for name, value in self._state.items()}, self._step, {})
        self._write("running")

    @property
    def certificate(self) -> LoopCertificate:
        """What is claimed: the epsilon of the whole plan, however much of it was released."""
        return record.read(self.folder / record.CERTIFICATE_FILE, LoopCertificate)

    def _write(self, status: Literal["running", "complete"]) -> None:
        lines = self._ledger.lines
        several = SEVERAL_IMAGES if self.mechanism.images_per_unit == 1 else PERSONS
        others = OTHER_RUNS if self._started.reserved is None else OUTSIDE
        usual = [COPIES, ENDS, UNSEARCHED, several, others, RUNNING_TIME]
        written = LoopCertificate(
            **dict(self._claims),
            status=status,
            **counted(lines, self._step, self._curve.at(lines.num_releases), ledger.sha256_of(self._ledger.path)),
            budget=self._started.reserved,
            not_covered=[_OF_THE_LOOP, _BEGUN_AGAIN, *usual],
        )
        self._started.refuse_other()
        record.write(self.folder / record.CERTIFICATE_FILE, written)

    def close(self) -> None:
        """Frees the folder, with a checkpoint of what was released: `state` is to be as the next update needs it."""
        if self._ledger.is_open and not self._started.is_saved:
            self._save()
        self._started.close()

    def __enter__(self) -> "PrivateLoop":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """`close`; where an exception may have come between a release and its use, without a checkpoint."""
        if kind is None or self._is_settled:
            self.close()
        self._started.close()
