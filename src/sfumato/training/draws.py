"""The random bits of every update: a sample, its views and the model's own, for that update alone."""

from sfumato.accounting.mechanism import Mechanism
from sfumato.data.sampling import Shuffling, poisson_batch
from sfumato.data.views import Views
from sfumato.randomness import Stream, Streams
from sfumato.training.step import Randomness, draw


class Draws:
    """Of one run.

    Guarantee: without a public seed every update has 256 fresh bits for its sample, views and dropout, and 256 others
    for its noise; nothing keeps them, so no two releases share any, whatever is repeated after a crash.

    Args:
        mechanism: The public numbers.
        views: How many views an image has.
        streams: Of the run.
    """

    def __init__(self, mechanism: Mechanism, views: Views, streams: Streams) -> None:
        self._mechanism, self._views, self._streams = mechanism, views, streams
        self._shuffling = Shuffling(mechanism.num_examples, lambda epoch: streams.stream("shuffling", epoch))

    def of_update(self, release: int) -> Randomness:
        """The sample of release number ``release``, the bits of its views and the key of what the model draws."""
        stream = self._streams.stream("sample", release)
        view, model = Stream(bytes(stream.bytes(32))), Stream(bytes(stream.bytes(32)))
        if self._mechanism.sampling == "poisson":
            indices = poisson_batch(self._mechanism, stream)
        else:  # an epoch's order belongs to many updates
            indices = self._shuffling.batch(self._mechanism.batch_size, release)
        return draw(self._mechanism, indices, self._views, view, model)

    def noise(self, release: int) -> Stream:
        """The stream of an update's noise: of the first release, number 0. Asked for once it is on the ledger."""
        return self._streams.stream("noise", release)
