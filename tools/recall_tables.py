"""The table and the figure of associative recall over pairs and rank, from the suite ``recall``."""

from __future__ import annotations

from pathlib import Path

import torch
from ability_tables import drawn
from generated import NOTHING, table
from robustness_tables import cell

from kernel_attention.core.decoding import state_bytes
from kernel_attention.core.layer import AttentionLayer
from kernel_attention_lab.reproduction import Cell, Places, Suite, read_suite
from kernel_attention_lab.reproduction.findings import measurements, suite_records
from kernel_attention_lab.results import require_same_config
from kernel_attention_lab.training.position_experiment import PositionExperiment
from kernel_attention_lab.training.position_recipe import PositionRecipe

PAGE = Path("docs/concepts/low-rank-attention.md")
FIGURE = Path("docs/figures/recall.svg")
MARK = "recall"


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the page's region by its mark, and the figure's file."""
    suite, places = read_suite("recall"), Places(root / "runs", root / "results")
    records = [
        record
        for columns in suite_records(suite, places).values()
        for seeds in columns.values()
        for record in seeds.values()
    ]
    if not records:
        return {MARK: NOTHING}, {}
    require_same_config(records, apart_from=("attention", "num_heads", "train_at", "test_at", "steps"))
    titles = {column: column.replace("_", " ") for column in suite.columns}
    points = {row: found for row, found in measurements(suite, places).items() if found}
    lines = []
    for row, found in points.items():
        seeds = max(map(len, found.values()))
        shown = (cell(found.get(column, {}), seeds) for column in titles)
        lines.append([f"`{row}`", f"{state_size(suite, row):,}", str(seeds), *shown])
    seconds = [record.budget["seconds"] for record in records]
    machines = " and ".join(sorted({record.machine for record in records}))
    text = [
        "",
        f"{len(records)} models, {min(seconds):.0f} to {max(seconds):.0f} s of training each, {machines}.",
        "",
        f"![Accuracy over the number of pairs, a line for each row](../figures/{FIGURE.name})",
        "",
        *table(["row", "state", "seeds", *titles.values()], lines),
        "",
    ]
    return {MARK: text}, {FIGURE: drawn(points, titles, list(suite.rows))}


def state_size(suite: Suite, row: str) -> int:
    """The numbers that a layer of a row keeps for decoding after a whole sequence."""
    _, recipe = suite.recipe(Cell(row, next(iter(suite.columns)), suite.seeds[0]))
    assert isinstance(recipe, PositionRecipe)
    experiment = PositionExperiment(recipe)
    facts = experiment.facts()
    model = experiment.build_model(recipe, facts)
    layer = next(module for module in model.modules() if isinstance(module, AttentionLayer))
    prompt = torch.zeros(1, facts["max_len"], layer.embed_dim)
    return state_bytes(layer.read_prompt(prompt, None)) // prompt.element_size()
