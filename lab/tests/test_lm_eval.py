"""The harness lm-eval reads a language model of ours through its ``HFLM``. It needs `pip install lm-eval`."""

import json

import pytest
import torch

from kernel_attention_lab.data.texts.vocabulary import build_vocabulary

TEXT = "the cat sat on a dog ran . "
TASK = """
task: {kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
"""
KINDS = {
    "multiple_choice": "doc_to_text: '{{text}}'\ndoc_to_choice: choices\ndoc_to_target: gold\n",
    "loglikelihood_rolling": "doc_to_text: ''\ndoc_to_target: '{{text}}'\n",
    "generate_until": "doc_to_text: '{{text}}'\ndoc_to_target: cat\ngeneration_kwargs: {max_gen_toks: 4}\n",
}
METRICS = {
    "multiple_choice": "acc",
    "loglikelihood_rolling": "word_perplexity",
    "generate_until": "exact_match",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of a library that is in no extra
def test_lm_eval_gives_every_choice_the_probability_that_our_model_gives_it(tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from kernel_attention.hosts.hugging_face import KernelAttentionConfig, KernelAttentionForCausalLM
    from kernel_attention_lab.runs.export import make_tokenizer

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = ["the cat sat", "the dog ran", "a dog sat on the"]
    rows = [{"text": text, "choices": ["cat", "dog", "the"], "gold": 0} for text in texts]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for kind, fields in KINDS.items():
        task = TASK.format(kind=kind, data=tmp_path / "data.jsonl") + fields
        (tmp_path / f"{kind}.yaml").write_text(task + f"metric_list: [{{metric: {METRICS[kind]}}}]\n")
    vocabulary = build_vocabulary("word", TEXT * 4)
    tokenizer = make_tokenizer(vocabulary, 40)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokenizer("\n")["input_ids"])[0]
    torch.manual_seed(0)
    config = KernelAttentionConfig(
        attention="primal", vocabulary_size=vocabulary.size, max_len=40, embed_dim=16, num_heads=2,
        num_layers=1, feedforward_dim=16,
    )  # fmt: skip
    model = KernelAttentionForCausalLM(config).eval()
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu"),
        tasks=list(KINDS),
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = {sample["doc"]["text"]: sample for sample in found["samples"]["multiple_choice"]}
    for row in rows:
        whole = torch.tensor(tokenizer(row["text"])["input_ids"])
        choices = torch.tensor(tokenizer(" ".join(row["choices"]))["input_ids"])
        expected = model(whole[None]).logits[0, -1].log_softmax(dim=-1)[choices]
        given = torch.tensor([response[0] for response in samples[row["text"]]["filtered_resps"]])
        torch.testing.assert_close(given, expected.detach(), rtol=1e-5, atol=1e-5)
    # The rolling probability of the texts, word by word after the token that ends a line.
    total = 0.0
    for text in texts:
        numbers = torch.tensor(tokenizer("\n" + text)["input_ids"])
        logits = model(numbers[None, :-1]).logits[0].log_softmax(dim=-1)
        total += logits[torch.arange(len(numbers) - 1), numbers[1:]].sum().item()
    words = sum(len(text.split()) for text in texts)
    perplexity = found["results"]["loglikelihood_rolling"]["word_perplexity,none"]
    assert perplexity == pytest.approx(torch.tensor(-total / words).exp().item(), rel=1e-5)
    assert "exact_match,none" in found["results"]["generate_until"]
