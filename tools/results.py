"""Write the tables and figures of the documentation that follow from the records in results/.

    make results                      # write the files
    python tools/results.py --check   # name those that are not what they should be; exit code 1

A page of results has its regions between marks. To add one, write a module with ``PAGE`` and ``texts`` as
``robustness_tables`` has them, and name it in ``PAGES``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import ability_tables
import control_tables
import decision_tables
import diagnostics_tables
import equal_time_tables
import gpu_tables
import performance_tables
import processor_tables
import readme_accuracy
import readme_robustness
import readme_speed
import recall_tables
import reproduction_tables
import result_tables
import robustness_tables
import segmentation_tables
import series_tables
import significance_tables
from generated import ROOT, between_marks, settle

PAGES = (
    ability_tables,
    control_tables,
    decision_tables,
    diagnostics_tables,
    equal_time_tables,
    gpu_tables,
    performance_tables,
    processor_tables,
    readme_accuracy,
    readme_robustness,
    readme_speed,
    recall_tables,
    reproduction_tables,
    result_tables,
    robustness_tables,
    segmentation_tables,
    series_tables,
    significance_tables,
)


def generated_texts(root: Path = ROOT) -> dict[Path, str]:
    """The text of every page and figure that the records give, by its path below ``root``."""
    found: dict[Path, str] = {}
    for module in PAGES:
        regions, figures = module.texts(root)
        text = found.get(module.PAGE) or (root / module.PAGE).read_text(encoding="utf-8")
        for mark, lines in regions.items():
            text = between_marks(text, mark, lines)
        found |= {module.PAGE: text, **figures}
    return found


def main(arguments: Sequence[str]) -> int:
    """Write the files, or check them; the exit code."""
    return settle(generated_texts(), arguments, "not what the records say (make results)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
