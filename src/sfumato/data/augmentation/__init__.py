"""Views of images, for augmentation multiplicity and for tests with augmentation."""

from sfumato.data.augmentation.views import augment

__all__ = ["augment"]
