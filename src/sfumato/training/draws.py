"""The random bits of every update: one noise never meets two sums, one sample of images never two
releases.

Whatever a run has done stands in its ledger, each line of which holds the hash of the line before.
So the sample of an update is derived from the ledger as it was before that update's line, and the
noise from the clipped sum besides, as deterministic signatures derive their nonces (RFC 6979).
Where two copies of a run compute anything differently, all that follows is drawn independently in
each.
"""

from collections.abc import Mapping

import numpy as np
import torch

from sfumato import randomness
from sfumato.accounting.mechanism import Mechanism
from sfumato.data.sampling import Shuffling, poisson_batch
from sfumato.data.views import Views
from sfumato.randomness import Stream, Streams
from sfumato.run_folder import entries as lines_of
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.tensor_mac import tensor_mac
from sfumato.training.step import Randomness, draw


class SumChanged(Exception):
    """A repeated update has another sum than the one that may have been released: it must not meet
    the same noise.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"update {step} does not repeat bit for bit")


class Draws:
    """Draws the randomness of one session's updates and puts them on the ledger.

    Attributes:
        session: Its number.
        num_updates: Of all sessions of the run, so far.
        num_first_releases: Of the release before all updates (step 0), likewise.

    Args:
        key: The run's.
        context: Digests of the recipe and of the data.
        ledger: Its last session line is this session's.
        is_public: Runs of one public seed share their randomness on purpose; they are not private.
        is_accounted: Whether updates are releases of clipped sums with noise. Those of ordinary
            training are not on the ledger: there is nothing to count.
    """

    def __init__(
        self, key: bytes, context: dict[str, str], ledger: Ledger, *, is_public: bool, is_accounted: bool
    ) -> None:
        session = lines_of.last_session(ledger.lines)
        self.session: int = session["session"]
        if is_public:
            self._streams = Streams(key, {}, {"number": self.session})
        else:
            environment = randomness.digest(session["environment"])
            self._streams = Streams(key, context, {"number": self.session, "environment": environment})
        self._ledger = ledger
        self._is_public, self._is_accounted = is_public, is_accounted
        self._shuffling = Shuffling(ledger.lines[0]["num_examples"], self._epoch_stream)
        self._sum_key = randomness.subkey(key, "sum") if is_accounted and not is_public else None
        self.num_updates = lines_of.num_updates(ledger.lines)
        self.num_first_releases = lines_of.num_first_releases(ledger.lines)
        steps = (line for line in ledger.lines if line["kind"] == "step")
        self._lines = {line["step"]: line for line in steps if line["session"] == self.session}

    def is_recorded(self, step: int) -> bool:
        """Whether the update is on the ledger in this session: then it is a repetition, and counts
        already.
        """
        return step in self._lines

    def initial_weights(self) -> np.ndarray:
        """One uniform word, shape (1,), uint64."""
        return self._streams.stream("initial weights").uint64(1)

    def of_step(self, step: int, mechanism: Mechanism, views: Views) -> Randomness:
        """The sample, the bits of its views and the key of what the model draws. The update before
        must have been recorded.
        """
        before = self._before(step)
        if mechanism.sampling == "poisson":
            indices = poisson_batch(mechanism, self._streams.stream("sampling", step, **before))
        else:  # an epoch's order belongs to many updates
            indices = self._shuffling.batch(mechanism.batch_size, step)
        view, model = (
            self._streams.stream(purpose, step, **before)
            for purpose in ("augmentation", "random numbers inside the model")
        )
        return draw(mechanism, indices, views, view, model)

    def record(self, step: int, grad_sum: Mapping[str, torch.Tensor]) -> Stream:
        """Puts an update on the ledger, before anything of it is released; a repeated one stands
        there already.

        Returns:
            The stream of its noise.

        Raises:
            SumChanged: If it stands there with another sum.
            MachineError: If the ledger cannot be written.
        """
        before, sum_mac = self._before(step), None
        if not self._is_accounted:
            return self._streams.stream("noise", step, **before)
        if self._sum_key is not None:
            # Step and history are in it, or equal sums (those of empty batches) would show in the
            # ledger.
            sum_mac = tensor_mac(self._sum_key, [self.session, step, before], grad_sum)
        if not self.is_recorded(step):
            self._lines[step] = self._ledger.append(lines_of.step_line(self.session, step, sum_mac))
            if step:
                self.num_updates += 1
            else:
                self.num_first_releases += 1
        if self._lines[step]["sum_mac"] != sum_mac:
            raise SumChanged(step)
        sealed = {} if sum_mac is None else {"sum_mac": sum_mac}
        return self._streams.stream("noise", step, **before, **sealed)

    def _epoch_stream(self, epoch: int) -> Stream:
        return self._streams.stream("shuffling", epoch)

    def _before(self, step: int) -> dict[str, str]:
        """The ledger's head before the line of that update."""
        if self._is_public:
            return {}
        return {"ledger": self._lines[step]["prev"] if step in self._lines else self._ledger.head}
