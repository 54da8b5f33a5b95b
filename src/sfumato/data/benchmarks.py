"""Public benchmark images from the files that their authors published."""

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Literal

import torch

from sfumato.config import DataConfig
from sfumato.data import imagenet
from sfumato.data.catalogue import ARCHIVES, NAMED, Facts, missing, public_facts
from sfumato.data.decoding import decode_cached, report_unreadable
from sfumato.data.examples import Dataset, check_proportions
from sfumato.data.images import ImageSet, Scale, normalisation
from sfumato.data.layouts import hold_out
from sfumato.data.listing import ImageFile, find_images
from sfumato.data.store import Report, Rows
from sfumato.errors import InputError, refusing

_ORIGINAL = "Put the original file there."


class NamedListing:
    """A public data set, of which all numbers are known before an image is read.

    Attributes:
        facts: Its public numbers.

    Args:
        config: The recipe's `data` section.
        data_root: The folder that holds the sets; None: `config.path`, else the variable SFUMATO_DATA.
        report: Takes lines for the user.

    Raises:
        InputError: If the recipe contradicts the data set.
    """

    def __init__(self, config: DataConfig, data_root: Path | None, report: Report) -> None:
        self._config, self._named, self._report = config, NAMED[config.name], report
        self._title = f"data set {config.name}"
        root = data_root or config.path or os.environ.get("SFUMATO_DATA")
        self._root = Path(root) if root else None
        self._scale = self._normalisation()
        facts = public_facts(config)  # refuses more images than there are, before a file is read
        assert facts is not None
        self.facts: Facts = facts
        self.classes = self._named.classes

    def report_first(self) -> None:
        """Says nothing: what is cut off images of a named set is published."""

    def judged_by(self, on_test: bool) -> tuple[Literal["valid", "test"], int]:
        """The part that accuracies are measured on, and how many images it has."""
        config, named = self._config, self._named
        if config.split == "train" and not on_test and (named.num_valid or config.held_out != "test"):
            if not named.num_valid:
                raise InputError(f"{self._title} has no validation images: take --set data.held_out=test.")
            return "valid", named.num_valid
        return "test", named.num_test

    def load(self, on_test: bool = False) -> Dataset:
        """The images; with `on_test` the test images are held out, whatever the split.

        Raises:
            InputError: If a file is missing, damaged or of other images, or there are no such images.
        """
        config, named = self._config, self._named
        everything = self._read()
        if config.name == "digits":
            train, held_out = hold_out("digits test", len(everything), named.num_test)
        else:
            train, held_out = list(range(named.num_train)), list(range(named.num_train, len(everything)))
        held_out_name, _ = self.judged_by(on_test)
        if held_out_name == "valid":
            _, valid = hold_out(f"{config.name} valid", len(train), named.num_valid)
            held_out = [train[i] for i in valid]
        # In one order for both splits: as many images as "train" has are those of "train".
        portion, _ = hold_out(f"{config.name} valid", len(train), len(train) - self.facts.num_examples)
        kept = everything.subset([train[i] for i in portion])
        return Dataset(config.name, named.classes, kept, everything.subset(held_out), held_out_name)

    def _read(self) -> ImageSet:
        """All images, the training part first."""
        name, root = self._config.name, self._root
        if name == "digits":
            return self._images(*_digits())
        lacks = missing(name, root)
        if root is None or lacks is not None:
            lies = " lies in no known folder" if root is None else f": {lacks} is missing"
            where = "Name the folder that holds it by --data-root or the variable SFUMATO_DATA."
            raise InputError(f"{self._title}{lies}. {where}")
        if self._named.folders:
            return self._of_folders(root / self._named.folders[0])
        if name == "imagenet32":
            rows = imagenet.small_images(name, self._named, root, self._report)
            images, labels = (torch.from_numpy(rows.columns[column]) for column in ("values", "labels"))
            return self._images(images, labels, rows)
        return self._images(*(self._of_idx(root) if "idx3" in self._named.files[0] else self._of_torchvision(root)))

    def _images(self, images: torch.Tensor, labels: torch.Tensor, rows: Rows | None = None) -> ImageSet:
        """Of the pixels (N, C, H, W), uint8, and labels (N,), int64, that its files hold."""
        named = self._named
        expected = (named.num_train + named.num_test, *named.shape)
        if images.shape != expected or labels.shape != expected[:1]:
            raise InputError(f"{self._title}: its files hold {tuple(images.shape)}, not {expected}. {_ORIGINAL}")
        seen = self._config.image_size or named.shape[1]
        size = self._config.stored_size(seen)
        return ImageSet(
            images,
            labels,
            torch.ones(len(labels), dtype=torch.bool),
            *self._scale,
            max_value=named.max_value,
            image_size=None if size == named.shape[1] else size,
            crop=seen if size > seen else None,
            store=rows,
        )

    def _of_idx(self, root: Path) -> tuple[torch.Tensor, torch.Tensor]:
        # torchvision's own class would prefer other files beside these, pickles of which nothing is known
        from torchvision.datasets.mnist import read_image_file, read_label_file

        found = []
        for file in self._named.files:
            read = read_image_file if "idx3" in file else read_label_file
            kinds = (AssertionError, RuntimeError, ValueError, TypeError, LookupError)
            with refusing(f"{self._title}: {root / file} is damaged", _ORIGINAL, *kinds):
                found.append(read(str(root / file)))
        return torch.cat(found[::2])[:, None], torch.cat(found[1::2]).long()

    def _of_torchvision(self, root: Path) -> tuple[torch.Tensor, torch.Tensor]:
        """CIFAR-10, CIFAR-100 and SVHN, whose files are compared with their published checksums."""
        from torchvision import datasets

        name = self._config.name
        # NumPy warns about the pickles of CIFAR.
        with refusing(f"{self._title} in {root} is damaged", _ORIGINAL, RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name == "svhn":
                parts = [datasets.SVHN(str(root), split=split) for split in ("train", "test")]
            else:
                kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
                parts = [kind(str(root), train=train) for train in (True, False)]
        images = torch.cat([torch.as_tensor(part.data) for part in parts])
        labels = [torch.as_tensor(part.labels if name == "svhn" else part.targets).long() for part in parts]
        return images if name == "svhn" else images.permute(0, 3, 1, 2).contiguous(), torch.cat(labels)

    def _of_folders(self, home: Path) -> ImageSet:
        """Of folders `<part>/<class>/*`, or of ImageNet's archives in their place: decoded once to files that
        are mapped.
        """
        named, files, known = self._named, list[ImageFile](), list[str]()
        for part, count in zip(named.folders[1:], (named.num_train, named.num_test), strict=True):
            place = home / part
            if place.is_dir():
                found = [dataclasses.replace(file, label=file.name.rpartition("/")[0]) for file in find_images(place)]
                found = [dataclasses.replace(file, label=file.label.partition("/")[0]) for file in found]
            else:
                place, found = home / ARCHIVES[part], imagenet.images_of(home, part)
            classes = sorted({file.label for file in found} - {""})
            if (len(found), len(classes)) != (count, len(named.classes)) or any(not file.label for file in found):
                held, expected = f"{len(found)} images in {len(classes)} folders", f"{count} in {len(named.classes)}"
                remedy = "Put the official archive there, or its images in one folder a class."
                raise InputError(f"{self._title}: {place} holds {held}, not {expected}. {remedy}")
            known = known or classes
            if classes != known:
                other = next(label for label in classes if label not in known)
                where = f"{home / part} has a folder {other}/, which {home / named.folders[1]} has not"
                raise InputError(f"{self._title}: {where}. Give both parts the same names of classes.")
            files += [dataclasses.replace(file, name=f"{part}/{file.name}") for file in found]
        seen, channels = self._config.image_size or named.shape[1], named.shape[0]
        size = self._config.stored_size(seen)
        resize = self._config.resize
        decoded = decode_cached(home, files, image_size=size, channels=channels, resize=resize, report=self._report)
        report_unreadable(map(str, files), decoded.reasons, self._report)
        places = {label: place for place, label in enumerate(known)}
        return decoded.seen(seen, self._scale, torch.tensor([places[file.label] for file in files]))

    def _normalisation(self) -> Scale:
        """Of a recipe that agrees with the data set: what only a folder lets one choose may be stated, not changed."""
        config, named = self._config, self._named
        own = named.shape[0]
        for key, given, truth in (
            ("classes", config.classes, list(named.classes)),
            ("channels", config.channels, 3 if config.channels == 3 else own),
            ("group_by", config.group_by, None),
            ("layout", config.layout, None),
            ("exclude", config.exclude or None, None),
        ):
            if given is not None and given != truth:
                own_one = "which has none" if truth is None else f"where it is {truth!r}"
                raise InputError(f"data.{key} = {given!r} does not fit {self._title}, {own_one}. Take the key out.")
        check_proportions(config, len(named.classes))
        channels = config.channels or own
        repeat = channels // own  # grey images as colour
        return normalisation(config.mean, config.std, channels, default=(named.mean * repeat, named.std * repeat))


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.from_numpy(found.images).to(torch.uint8)[:, None], torch.from_numpy(found.target).to(torch.int64)
