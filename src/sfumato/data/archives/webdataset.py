"""The images of a tar shard as WebDataset writes it.

An example is an image with what shares its name: `0001.jpg` with `0001.cls` (a class's number or name) or `0001.json`
(its "label", and "group" where it has one); without these, the folder that it lies in names its class.
"""

import collections
import contextlib
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from sfumato.data.archives.example import Example, as_text, part_of_folders
from sfumato.data.archives.tar import DAMAGED, Member, members, next_member, plain_name
from sfumato.data.listing import EXTENSIONS, PART_MEANT, is_left_out, is_note, is_table
from sfumato.errors import InputError

_LABELS = (".cls", ".json")
"""What says the label of the image that it lies beside."""
_BESIDE = (".txt", ".npy", ".npz", ".pyd", ".pkl", ".pickle", ".pth", ".pt", ".xml", ".yaml", ".yml", ".html")
"""Kinds of members that are no image and may stand beside one; they are passed over, and counted."""


def examples_of_tar(path: Path, report: Callable[[str], None]) -> Iterator[Example]:
    """Members that share a name up to its first dot lie one after another (WebDataset)."""
    described = _described_keys(path)
    key, held, ended, seen = "", list[Member](), set[str](), set[str]()
    beside = collections.Counter[str]()
    for member in members(path, report):
        if member is None:  # the archive is cut short here: what the last example lacks is lost
            yield from _at_cut(path, held, bool(described))
            return
        folders = member.name.split("/")[:-1]
        if member.name.rpartition("/")[2].startswith(".") or "__MACOSX" in folders:
            continue
        if any(folder.startswith(".") and folder not in (".", "..") for folder in folders):
            continue
        if member.name in seen:
            raise InputError(f"{path}: {member.name} is there a second time. Keep one.")
        seen.add(member.name)
        suffix = _suffix_of(member.name)
        if suffix not in (*EXTENSIONS, *_LABELS):
            _refuse_unknown(path, member.name, suffix)
            beside[suffix] += 1
            continue
        own = _key(member.name)
        if held and own != key:
            yield from _examples(path, held)
            ended.add(key)
            held = []
        if own in ended and own in described:
            raise InputError(f"{path}: what is named {own} does not lie together. Write it by WebDataset's tools.")
        if own not in described:  # an image by itself; one after another, or all might be held at once
            yield from _examples(path, held)
            held = []
        key = own
        held.append(member)
    yield from _examples(path, held)
    if beside:
        kinds = ", ".join(f"{count} of {kind or 'notes'}" for kind, count in sorted(beside.items()))
        report(f"passed over in {path}: members that are no image: {kinds}")


def _refuse_unknown(path: Path, name: str, suffix: str) -> None:
    """Of a member that is no image and no label: whether it may be left out."""
    last = name.rpartition("/")[2]
    if is_table(last):
        raise InputError(f"{path}: {name} is a table of labels, which is not read in an archive. Unpack the archive.")
    if suffix not in _BESIDE and not is_note(last) and not is_left_out(last):
        raise InputError(
            f"{path}: {name} is of no known kind of image ({', '.join(EXTENSIONS)}). Convert it, or take it out."
        )


def _key(name: str) -> str:
    """What the members of one example share."""
    above, _, last = name.rpartition("/")
    return f"{above}/{last.partition('.')[0]}".lstrip("/")


def _stem(name: str) -> str:
    """A name without what tells its kind."""
    above, dot, kind = name.rpartition(".")
    return above if dot and "/" not in kind else name


def _described_keys(path: Path) -> set[str]:
    """The keys beside whose images labels lie."""
    found = set()
    with contextlib.suppress(tarfile.TarError, *DAMAGED), tarfile.open(path, "r:*") as tar:
        while (member := next_member(tar)) is not None:
            if member.name.lower().endswith(_LABELS):
                found.add(_key(plain_name(member)))
    return found


def _at_cut(path: Path, held: list[Member], has_labels: bool) -> Iterator[Example]:
    """The last example of an archive that is cut, if its label is known: an image at the cut counts."""
    whole = [member for member in held if member.is_whole or not member.name.lower().endswith(_LABELS)]
    images = [member for member in whole if _suffix_of(member.name) in EXTENSIONS]
    if len(whole) == len(held) and images and (len(whole) > len(images) or not has_labels):
        yield from _examples(path, whole)


def _examples(path: Path, held: Sequence[Member]) -> Iterator[Example]:
    """The images among members of one key, each with the labels of its own name and of the key."""
    images = [member for member in held if _suffix_of(member.name) in EXTENSIONS]
    labels = [member for member in held if member.name.lower().endswith(_LABELS)]
    stems = collections.Counter(_stem(image.name) for image in images)
    of_stem = collections.defaultdict[str, list[Member]](list)
    for label in labels:
        of_stem[_stem(label.name)].append(label)
    shared = [label for label in labels if not stems[_stem(label.name)]]
    for label in shared if not images else ():
        if not label.name.lower().endswith(".json") or "label" in _described(f"{path}: {label.name}", label.content):
            raise InputError(
                f"{path}: {label.name} has no image of a known kind ({', '.join(EXTENSIONS)}) beside it. Convert it."
            )
    for label in labels:
        if (stems[_stem(label.name)] or len(images)) > 1:
            stem = _stem(label.name) if stems[_stem(label.name)] else None
            whose = [image.name for image in images if stem in (None, _stem(image.name))]
            raise InputError(
                f"{path}: {label.name} has {len(whose)} images ({', '.join(whose[:3])}). Keep one of each example."
            )
    for image in images:
        yield _example(path, image, [*of_stem[_stem(image.name)], *shared])


def _example(path: Path, image: Member, labels: Sequence[Member]) -> Example:
    where = f"{path}: {image.name}"
    stated, groups = list[str](), list[str]()
    for member in labels:
        if member.name.lower().endswith(".cls"):
            stated.append(as_text(where, "label", member.content.decode("utf-8-sig", "replace")))
            continue
        described = _described(f"{path}: {member.name}", member.content)
        stated += [as_text(where, "label", described["label"])] if "label" in described else []
        groups += [as_text(where, "group", described["group"])] if "group" in described else []
    for what, found in (("labels", stated), ("groups", groups)):
        if len(set(found)) > 1:
            raise InputError(f"{where} has two {what}, {' and '.join(map(repr, found))}. Keep one.")
    above = [part for part in PurePosixPath(image.name).parts if part not in ("/", "..")][:-1]
    if not stated and not above:
        raise InputError(f'{where} has no label. Add a .cls, a "label" in a .json, or a folder of its class.')
    label = stated[0] if stated else as_text(where, "label", above.pop())
    part = part_of_folders(where, above)
    if not stated and label.casefold() in PART_MEANT and not part:
        raise InputError(f"{where} lies in {label}/, which is a part or a class. Put it into a folder of its class.")
    group = groups[0] if groups else ""
    return Example(image.content, _stem(image.name), _suffix_of(image.name), label, group, part)


def _suffix_of(name: str) -> str:
    return name.removeprefix(_stem(name)).lower()


def _described(where: str, content: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = next((name for name in ("label", "group") if names.count(name) > 1), None)
        if twice is not None:
            raise InputError(f'{where} gives "{twice}" twice. Keep one.')
        return dict(pairs)

    try:
        found = json.loads(content, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} is no JSON. Correct it.") from None
    return found if isinstance(found, dict) else {}
