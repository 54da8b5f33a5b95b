"""People as examples: each with all images of theirs that count."""

import torch

from sfumato.data.examples import Examples


class People:
    """One example for each person (`Examples.groups`), in the order in which they first appear.

    An example is the person's images, up to K, each with what its loss needs behind it
    (`sfumato.evaluation.carried`): its class as one number for each class, whether it counts, and n,
    the number of the person's images. The places that are left hold the first image again, which does
    not count. A loss weighs images that count by K/n, so that the mean over K places is the mean over
    the person's own n images. What is carried are 0, 1 and n <= 256, which bfloat16 holds exactly.

    Attributes:
        readable: (N,), torch.bool: False for a person of whom no image counts.
        shape: Of one image with what stands behind it.

    Args:
        images: With groups; those that are not readable do not count.
        limit: K, the most images of a person that count: of more the first do.
        num_classes: Classes.
    """

    def __init__(self, images: Examples, limit: int, num_classes: int) -> None:
        assert images.groups is not None and limit <= 256
        self._images, self._limit, self._num_classes = images, limit, num_classes
        places: dict[str, list[int]] = {}
        for index, (group, counts) in enumerate(zip(images.groups, images.readable.tolist(), strict=True)):
            own = places.setdefault(group, [])
            if counts and len(own) < limit:
                own.append(index)
        self._counts = torch.tensor([len(own) for own in places.values()], dtype=torch.int64)
        # (N, K): the first image again where there are no more; image 0 for nobody's.
        self._places = torch.tensor([[*own, *[own[0] if own else 0] * (limit - len(own))] for own in places.values()])
        self.readable = self._counts > 0
        self.labels = torch.zeros(len(places), dtype=torch.int64)  # each image carries its own
        self.shape = carried_shape(images.shape, num_classes)

    def __len__(self) -> int:
        return len(self._counts)

    def together(self, people: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(m, K, *shape), and (m,) labels that nothing looks at.

        Args:
            people: (m,), int64.
        """
        places = self._places[people]
        images = self._images.batch(places.flatten(), device)
        labels = self._images.labels[places.flatten()].to(device)
        counts = self._counts[people][:, None].to(device)
        is_own = torch.arange(self._limit, device=device) < counts
        packed = carry(images, labels, is_own.flatten(), counts.expand_as(is_own).flatten(), self._num_classes)
        return packed.view(len(people), self._limit, *self.shape), self.labels[people].to(device)


class Together:
    """In the place of `sfumato.data.views.Views`: the images of each person, as they are."""

    def with_labels(
        self, examples: People, indices: torch.Tensor, view_bits: object, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`People.together`; no views are drawn."""
        return examples.together(indices, device)


def carried_shape(shape: tuple[int, ...], num_classes: int) -> tuple[int, ...]:
    """Of an image, or of features, with what is carried behind it."""
    if len(shape) == 1:
        return (shape[0] + num_classes + 2,)
    channels, height, width = shape
    return (channels + -(-(num_classes + 2) // (height * width)), height, width)


def carry(
    images: torch.Tensor, labels: torch.Tensor, is_own: torch.Tensor, counts: torch.Tensor, num_classes: int
) -> torch.Tensor:
    """(b, *carried_shape): images (b, C, H, W) or features (b, D); behind them classes, whether each
    counts, and how many images its person has.
    """
    classes = torch.nn.functional.one_hot(labels, num_classes)
    behind = torch.cat([classes, is_own[:, None], counts[:, None]], 1).to(images)
    if images.ndim == 2:
        return torch.cat([images, behind], 1)
    height, width = images.shape[2:]
    planes = -(-behind.shape[1] // (height * width))
    padded = images.new_zeros(len(images), planes * height * width)
    padded[:, : behind.shape[1]] = behind
    return torch.cat([images, padded.view(len(images), planes, height, width)], 1)
