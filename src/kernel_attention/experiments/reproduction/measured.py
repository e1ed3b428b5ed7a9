"""What a suite's records say."""

from __future__ import annotations

from kernel_attention.experiments.reproduction.run import Places
from kernel_attention.experiments.reproduction.suite import Suite
from kernel_attention.experiments.results import Measurement, read_record


def measurements(suite: Suite, places: Places) -> dict[str, dict[str, dict[int, Measurement]]]:
    """The suite's metric by row, column and seed, as far as there are records.

    Raises:
        InputError: for a damaged record.
    """
    found: dict[str, dict[str, dict[int, Measurement]]] = {row: {} for row in suite.rows}
    for cell in suite.cells():
        path = places.record(suite, cell)
        if path.is_file():
            value = read_record(path).figures["evaluation"].get(suite.metric)
            if value is not None:
                found[cell.row].setdefault(cell.column, {})[cell.seed] = Measurement(float(value))
    return found
