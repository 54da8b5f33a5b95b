"""A folder that is read in no layout: what lies in it, and settings to paste that would read it. By names alone."""

import dataclasses
import glob
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from sfumato.data.catalogue import NAMED
from sfumato.data.listing import DICOM, PART_MEANT, Found, excluded, part_said, refuse_kind, words_of

_MOST_LINES = 12
_MOST_EDITIONS, _MOST_READINGS = 3, 5
_LONGEST_LINE, _TELLING = 2000, 12
_EDITED, _TAIL = re.compile(r"IMG_E(\d+)"), re.compile(r"[_\-. ]+(?=[A-Za-z])| (?=[(1-9)]+$)")
_COPY = re.compile(r"[_\- ]+(edited|copy|copie|copia|kopie)( ?\(?\d+\)?)?", re.IGNORECASE)
"""What systems and phones put behind the name of a picture that they copied or edited."""
_NUMBER = re.compile(r" (\([1-9]\)|[2-9])")
"""The same; but pictures of one name that are fetched one after another are numbered so as well."""
_NUMBERED = set(
    "part fold image images img picture photo batch split patient subject person case study series scan".split()
)
"""Words of folders that differ by a number and are hardly classes."""
_MASKS = {"image", "images", "img", "mask", "masks"}
"""Words of folders that hold several files of one picture."""


@dataclasses.dataclass
class Folder:
    """A folder's own images, by the stems of their names, and the folders in it that hold some."""

    own: set[str] = dataclasses.field(default_factory=set)
    inner: dict[str, "Folder"] = dataclasses.field(default_factory=dict)

    @property
    def depths(self) -> set[int]:
        """How many folders deep images lie."""
        own = {0} if self.own else set[int]()
        return own.union(*({1 + depth for depth in folder.depths} for folder in self.inner.values()))


@dataclasses.dataclass(frozen=True)
class Reading:
    """A way to read a folder.

    Attributes:
        layout: What each folder above an image is: "{class}", "{part}", "{group}", "*" or a name.
        root: The folder to name instead, relative to it.
        exclude: Patterns of what is left out, below that root.
        given: Under which condition, in words; "": none.
    """

    layout: tuple[str, ...]
    root: str = ""
    exclude: tuple[str, ...] = ()
    given: str = ""

    def is_plain(self, tree: Folder) -> bool:
        """Whether it needs no key."""
        for step in PurePosixPath(self.root).parts:
            tree = tree.inner[step]
        parts = [name for name in tree.inner if not excluded(f"{name}/", self.exclude)]
        are_known = all(name.casefold() in PART_MEANT for name in parts)
        return self.layout == ("{class}",) or (self.layout == ("{part}", "{class}") and are_known)

    def below(self, name: str) -> "Reading":
        """The same, of the folder that holds that one."""
        return dataclasses.replace(self, root=str(PurePosixPath(name, self.root)))


def tree_of(names: Iterable[str]) -> Folder:
    """The folders of images that have these names."""
    tree = Folder()
    for name in names:
        *above, file = name.split("/")
        folder = tree
        for step in above:
            folder = folder.inner.setdefault(step, Folder())
        folder.own.add(file.rpartition(".")[0])
    return tree


def readings(folder: Folder) -> list[Reading]:
    """Ways to read a folder, the likeliest first; none where nothing in names tells classes."""
    inner = folder.inner
    if len(inner) == 1:
        ((name, only),) = inner.items()
        return [reading.below(name) for reading in readings(only)]
    parts = {name: part for name in inner if (part := part_said(name))}
    classes = [name for name in inner if inner[name].own]
    if "train" in parts.values():
        return list(_in_parts(inner, parts))
    if len(classes) > 1 and not are_numbered(classes):
        outside = [f"{name}/{deeper}" for name in classes for deeper in inner[name].inner]
        outside += [name for name in inner if name not in classes]
        return [Reading(("{class}",), exclude=tuple(f"{glob.escape(folder)}/*" for folder in outside))]
    return ([] if classes else list(_of_folders(folder))) or _below(inner)


def are_numbered(names: Sequence[str]) -> bool:
    """Whether folders are parts, folds or people by their names, which differ by a number alone."""
    words = {" ".join(words_of(name)) for name in names}
    return len(words) == 1 and bool(_NUMBERED & set(words.pop().split())) and all(name[-1].isdigit() for name in names)


def _below(inner: dict[str, Folder]) -> list[Reading]:
    """Of folders each by itself, one to be taken."""
    return [
        dataclasses.replace(reading.below(name), given=f"for {name}/ alone")
        for name, each in inner.items()
        for reading in readings(each)[:1]
    ]


def _in_parts(inner: dict[str, Folder], parts: dict[str, str]) -> Iterator[Reading]:
    """Parts that hold classes, perhaps in folders of their own; what has no classes is left out."""
    found = {name: reading for name in parts for reading in readings(inner[name])[:1]}
    layouts = {
        name: (*["*"] * len(PurePosixPath(reading.root).parts), *reading.layout) for name, reading in found.items()
    }
    train = next((layouts[name] for name, part in parts.items() if part == "train" and name in layouts), None)
    if train is None:
        return
    kept = [name for name in layouts if layouts[name] == train]
    exclude = [f"{glob.escape(name)}/*" for name in inner if name not in kept]
    roots = {name: glob.escape(str(PurePosixPath(name, found[name].root))) for name in kept}
    exclude += [f"{root}/{pattern}" for name, root in roots.items() for pattern in found[name].exclude]
    given = "" if found[kept[0]].root else found[kept[0]].given
    yield Reading(("{part}", *train), exclude=tuple(exclude), given=given)


def _of_folders(folder: Folder) -> Iterator[Reading]:
    """Of folders that hold folders, all equally deep."""
    inner, (depth, *others) = folder.inner, sorted(folder.depths)
    if others or depth < 2:
        return
    held = [set(each.inner) for each in inner.values()]
    shared, every = set.intersection(*held), set[str]().union(*held)
    of_outer, of_inner = f"if {listed(inner)} are the classes", f"if {listed(every)} are the classes"
    beside = [each.own for each in next(iter(inner.values())).inner.values()]
    kinds = {word for name in shared for word in words_of(name)}
    are_classes = not are_numbered(list(inner))
    outer = [Reading(("{class}", *["*"] * (depth - 1)), given=of_outer)] if are_classes else []
    if len(every) == 1:
        yield from outer
    elif 2 * len(shared) < len(every):
        yield Reading((*["*"] * (depth - 1), "{class}"), given=of_inner)
        yield from outer
    elif (
        depth == 2 and kinds & _MASKS and 2 * len(set.intersection(*beside)) > min(map(len, beside))
    ):  # images, and masks of them
        for name in sorted(shared):
            rest = tuple(f"*/{glob.escape(other)}/*" for other in sorted(every - {name}))
            yield Reading(("{class}", name), exclude=rest, given=f"if the pictures lie in {name}/")
    else:
        is_numbers = all(name.isdigit() for name in inner)
        yield from _below(inner) if len(inner) <= _MOST_EDITIONS and not is_numbers else ()
        people = f"{of_inner}, and {listed(inner)} whose images"
        yield Reading(("{group}", "{class}", *["*"] * (depth - 2)), given=people)
        yield from outer


def remedies(root: Path, found: Found, otherwise: str, *, has_layout: bool) -> str:
    """What would make a folder readable, in words to paste; `otherwise` where names tell no classes. `has_layout`:
    `data.layout` is given, so that one must take its place.
    """
    if not found.images:
        return _of_no_image(root, found.others)
    said = []
    tree = tree_of(file.name for file in found.images)
    for reading in readings(tree)[:_MOST_READINGS]:
        above = f"{reading.root}/" if reading.root else ""
        others = [name.removeprefix(above) for name in found.others if name.startswith(above)]
        exclude = [*reading.exclude, *patterns(others, reading.exclude)]
        words = ["--data-root", shlex.quote(str(root / reading.root))] if reading.root else []
        if has_layout or not reading.is_plain(tree):
            words += ["--set", shlex.quote(f'data.layout="{"/".join(reading.layout)}"')]
            words += ["--set", "data.group_by=group"] if "{group}" in reading.layout else []
        words += [leaving_out(exclude, found, above)] if exclude or (above and found.exclude) else []
        said.append(f"{reading.given}: {' '.join(words)}" if reading.given else " ".join(words))
    if any(said):
        return f"Take {'; or '.join(each for each in said if each)}"
    if otherwise:
        return otherwise
    tables = [name for name in found.others if name.endswith((".csv", ".tsv"))]
    seen = "".join(f"; {name} has {', '.join(_columns(root / name))}" for name in tables[:2])
    beside = patterns(found.others)
    leaving = f", and leave the other files out: {leaving_out(beside, found)}" if beside else ""
    return (
        f"Names tell no classes: write labels.csv with the columns file, label (and group, for people){seen}{leaving}"
    )


def _of_no_image(root: Path, others: Sequence[str]) -> str:
    """What to say of a folder without an image."""
    archives = sorted({str((root / name).parent) for name in others if name.endswith((".tar", ".parquet"))})
    if archives:
        flat = f"Archives are read where they lie flat in one folder: --data-root {shlex.quote(archives[0])}"
        more = f"; parts by their names, as train-000000.tar (here they lie in {len(archives)} folders)"
        return flat + more if archives[1:] else flat
    dicom = [name for name in others if PurePosixPath(name).suffix.lower() in DICOM]
    if dicom:
        refuse_kind(root / dicom[0])
    held = {PurePosixPath(name).name for name in others}
    sets = [name for name, named in NAMED.items() if {PurePosixPath(file).name for file in named.files or "-"} <= held]
    if sets:
        wanted = " or ".join(NAMED[name].files[0] for name in sets)
        return f"A named set reads such files: --set data.name={' or '.join(sets)}, --data-root the folder of {wanted}"
    return "Arrays and tables of pixels are not read: write PNG files into one folder for each class"


def leaving_out(exclude: Sequence[str], found: Found, above: str = "") -> str:
    """The words to paste; patterns that are given already stand in them too, since they take their place. `above`: the
    words are for a folder of this path, and those that name nothing there are not repeated.
    """
    left_out = [name for name in found.left_out if name.startswith(above)]
    given = [pattern for pattern in found.exclude if any(excluded(name, [pattern]) for name in left_out)]
    patterns = [*(pattern.removeprefix(above).removeprefix(glob.escape(above)) for pattern in given), *exclude]
    return f"--set {shlex.quote(f'data.exclude={json.dumps(patterns, ensure_ascii=False)}')}"


def _columns(table: Path) -> list[str]:
    """The first line's, of a table."""
    with open(table, encoding="utf-8-sig", errors="replace") as file:
        return [cell.strip(' "') for cell in file.readline(_LONGEST_LINE).strip().split(",")][:_MOST_LINES]


def patterns(names: Sequence[str], known: Sequence[str] = ()) -> list[str]:
    """Patterns that leave these files out: by their kinds, or by their names where they have none."""
    left = [name for name in names if not excluded(name, known)]
    suffixes = {name: glob.escape(PurePosixPath(name).suffix) for name in left}
    return sorted({f"*{suffix}" if suffix else glob.escape(name) for name, suffix in suffixes.items()})


def patterns_of_names(names: Iterable[str], others: Sequence[str]) -> list[str]:
    """A few patterns that leave these files out and keep the others, `*` for each number; none where there are none."""
    files = {glob.escape(name.rpartition("/")[2]) for name in names}
    found = sorted({re.sub("[0-9]+", "*", file) for file in files})
    is_apart = others and not any(excluded(name, found) for name in others)
    return found if is_apart and len(found) <= _MOST_LINES else []


def shared_names(files: Iterable[tuple[str, str]]) -> tuple[str, str, int] | None:
    """Two classes of which most files of the smaller one are named as in the other, and how many; numbers alone, which
    every class may count, are no names. Of pairs of a class and a file's name.
    """
    classes: dict[str, set[str]] = {}  # of each name
    for label, name in files:
        stem = name.rpartition("/")[2].rpartition(".")[0]
        if len(stem) >= _TELLING:
            classes.setdefault(stem, set()).add(label)
    sizes = Counter(label for labels in classes.values() for label in labels)
    few = (sorted(labels) for labels in classes.values() if len(labels) <= _MOST_EDITIONS)  # more: they count alike
    shared = Counter(pair for labels in few for pair in itertools.combinations(labels, 2))
    for (one, other), count in shared.most_common():
        if 2 * count > min(sizes[one], sizes[other]):
            return one, other, count
    return None


def taken_twice(names: Iterable[str]) -> tuple[str, str, list[str], bool] | None:
    """Two files of one picture by their names, patterns that leave all such ones out, and whether that is sure: `a.png`
    beside `a.jpg`, `IMG_E1` beside `IMG_1`, `a - Copy` or `a-edited` beside `a`, or one ending (`a_mask`, `a_flip`) of
    a tenth of a folder's files. Unsure is `a (1)` or `a 2` beside `a`.
    """
    folders: dict[str, dict[str, str]] = {}
    suffixes, tails, pairs = Counter[str](), Counter[str](), dict[str, tuple[str, str]]()
    for name in names:
        folder, _, file = name.rpartition("/")
        stem, suffix = file.rpartition(".")[::2]
        stems = folders.setdefault(folder, {})
        other = stems.setdefault(stem, name)
        if other != name and other.rpartition(".")[2].casefold() != suffix.casefold():
            pairs["same"] = (other, name)
        suffixes[suffix] += 1
    if "same" in pairs:
        rarer = min((name.rpartition(".")[2] for name in pairs["same"]), key=suffixes.__getitem__)
        return (*pairs["same"], [f"*.{rarer}"], True)
    for stems in folders.values():
        for stem, name in stems.items():
            edited = _EDITED.fullmatch(stem)
            cuts = [(stem[: cut.start()], stem[cut.start() :]) for cut in _TAIL.finditer(stem)]
            for base, tail in [*cuts, *([(f"IMG_{edited[1]}", "IMG_E")] if edited else [])]:
                if base in stems:
                    tails[tail] += not _NUMBER.fullmatch(tail)
                    pairs.setdefault(tail, (stems[base], name))
    copies, numbers = (sorted(filter(kind.fullmatch, pairs)) for kind in (_COPY, _NUMBER))
    for tail, count in tails.most_common(0 if copies else 1):
        if count >= max(2, sum(map(len, folders.values())) // 10):
            return (*pairs[tail], ["IMG_E*" if tail == "IMG_E" else f"*{tail}{'*' if len(tail) > 4 else '.*'}"], True)
    for tail in (copies or numbers)[:1]:
        return (*pairs[tail], [f"*{tail}.*" for tail in copies or numbers], bool(copies))
    return None


def shown(root: Path, found: Found) -> Iterator[str]:
    """A few lines: which folders hold how many images, and which other files lie beside."""
    counts = Counter(file.name.rpartition("/")[0] for file in found.images)
    for folder, count in sorted(counts.items())[:_MOST_LINES]:
        yield f"  {root / folder}: {count} image{'s' if count > 1 else ''}"
    if len(counts) > _MOST_LINES:
        yield f"  ... and {len(counts) - _MOST_LINES} more folders"
    if found.others:
        yield f"  beside them: {listed(found.others)}"


def listed(names: Iterable[str]) -> str:
    """Three of them, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
