"""Hugging Face models that commit 4ea74c81 saved give the logits that they gave then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hugging_face"
READS = {
    "ImageClassification": ["pixel_values"],
    "TimeSeriesClassification": ["past_values", "attention_mask"],
}


@pytest.mark.parametrize(
    "kind",
    [
        "CausalLM",
        "SequenceClassification",
        "ImageClassification",
        "TimeSeriesClassification",
        "replaced_bert",
    ],
)
def test_a_model_of_an_earlier_release_gives_its_logits(transformers, monkeypatch, kind):
    """Up to the rounding of another CPU, which is that between float32 and float64, with a factor of 8."""
    import kernel_attention.hosts.hugging_face as own

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()
    name = "SequenceClassification" if kind == "replaced_bert" else kind
    loader = getattr(transformers, f"AutoModelFor{name}", None) or getattr(own, f"KernelAttentionFor{name}")
    model, report = loader.from_pretrained(FIXTURES / kind, output_loading_info=True)
    assert not any(report[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with safe_open(FIXTURES / "calls.safetensors", "pt") as file:
        call = {key: file.get_tensor(key) for key in READS.get(kind, ["input_ids", "attention_mask"])}
        expected, rounding = file.get_tensor(f"{kind} logits"), json.loads(file.metadata()["rounding"])[kind]
    with torch.no_grad():
        found = model.eval()(**call).logits
    assert (found - expected).abs().max().item() <= 8 * rounding
