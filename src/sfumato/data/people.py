"""People as examples: each with all images of theirs that count."""

import torch

from sfumato.data.examples import Examples


class People:
    """One example for each person (`Examples.groups`), in the order in which they first appear.

    An example is the person's images, up to K, each with its label and its weight 1/n, n the number of the person's
    images: their weighted sum is the mean. The places that are left hold the first image again, with a weight of zero.

    Attributes:
        readable: (N,), torch.bool: False for a person of whom no image counts.

    Args:
        images: With groups; those that are not readable do not count.
        limit: K, the most images of a person that count: of more the first do.
    """

    def __init__(self, images: Examples, limit: int) -> None:
        assert images.groups is not None
        self._images, self._limit = images, limit
        places: dict[str, list[int]] = {}
        for index, (group, counts) in enumerate(zip(images.groups, images.readable.tolist(), strict=True)):
            own = places.setdefault(group, [])
            if counts and len(own) < limit:
                own.append(index)
        self._counts = torch.tensor([len(own) for own in places.values()], dtype=torch.int64)
        # (N, K): the first image again where there are no more; image 0 for nobody's.
        self._places = torch.tensor([[*own, *[own[0] if own else 0] * (limit - len(own))] for own in places.values()])
        self.readable = self._counts > 0

    def __len__(self) -> int:
        return len(self._counts)

    def together(self, people: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Images (m, K, *shape), labels (m, K), and weights (m, K).

        Args:
            people: (m,), int64.
        """
        places, counts = self._places[people], self._counts[people][:, None]
        images = self._images.batch(places.flatten(), device)
        weights = (torch.arange(self._limit) < counts) / counts.clamp(min=1)
        return images.view(*places.shape, *images.shape[1:]), self._images.labels[places].to(device), weights.to(device)


class Together:
    """In the place of `sfumato.data.views.Views`: the images of each person, as they are."""

    def with_labels(
        self, examples: People, indices: torch.Tensor, view_bits: object, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """`People.together`; no views are drawn."""
        return examples.together(indices, device)
