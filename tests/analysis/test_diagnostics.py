"""Diagnoses: what they are the means of, what padding and sampling do to them, and what they refuse."""

import math

import numpy as np
import pytest
import torch
from hosts.models_of_hosts import (
    BATCH,
    EMBED_DIM,
    LENGTH,
    LENGTHS,
    own_encoder,
    real_tokens,
    scatter,
    torch_encoder,
)

import kernel_attention as ka
from kernel_attention.analysis import capture, diagnose
from kernel_attention.analysis import layer_measures as measures
from kernel_attention.models import SequenceEncoder
from kernel_attention.series import SequenceSplit, make_loader
from kernel_attention.solvers import eigenvalue_ratios, projection_error, projection_loss


def encoder(*attention, seed=0, **sizes):
    torch.manual_seed(seed)
    sizes = {"embed_dim": 14, "num_heads": 2, "feedforward_dim": 17, **sizes}
    return scatter(
        SequenceEncoder(3, LENGTH, list(attention), num_layers=len(attention), **sizes), seed
    ).eval()


def batch():
    torch.manual_seed(1)
    return torch.randn(BATCH, LENGTH, 3), real_tokens()


def test_spectra_are_those_of_the_attention_matrices():
    model, (x, real) = own_encoder(), batch()
    report = diagnose(model, (x, real))
    for layer, attention in zip(report.layers, capture(model, (x, real)).values(), strict=True):
        shares, ranks = np.zeros((2, 64)), []
        for case in range(BATCH):
            values = np.linalg.svd(attention.matrix(case).numpy(), compute_uv=False)
            share = np.ones((2, 64))
            share[:, : values.shape[1]] = np.cumsum(values**2, 1) / np.sum(values**2, 1, keepdims=True)
            shares += share / BATCH
            p = values / values.sum(1, keepdims=True)
            ranks.append(np.exp(-np.sum(p * np.log(np.maximum(p, 1e-30)), 1)))
        np.testing.assert_allclose(layer.explained_variance, shares, rtol=1e-4)
        np.testing.assert_allclose(layer.effective_rank, np.stack(ranks), rtol=1e-4)
        assert layer.lengths == LENGTHS


@pytest.mark.parametrize(
    "name", ["softmax", "primal", "batch_norm", "rpc", "multilinear", "dual_multilinear"]
)
def test_padding_changes_nothing(name):
    """A padded batch is its sequences one by one."""
    options = {"primal": {"rank": 3, "eta": 0.1}, "multilinear": {"rank": 3}, "dual_multilinear": {"rank": 3}}
    model, (x, real) = encoder({name: options.get(name, {})}), batch()
    together = diagnose(model, (x, real))[0].values
    alone = [diagnose(model, x[case : case + 1, :length])[0].values for case, length in enumerate(LENGTHS)]
    assert {key for values in alone for key in values} == set(together)
    compared = 0
    for key, value in together.items():
        if key in ("effective_rank", "head_distance", "output_distance", "projection_error", "objective"):
            expected = torch.cat([values[key] for values in alone])
        elif key in ("singular_values", "explained_variance", "mode_explained_variance", "head_distances"):
            expected = torch.stack([values[key] for values in alone]).mean(0)
        else:
            continue
        compared += 1
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert compared >= 1


def test_kernel_pca_figures_are_the_solvers():
    model, (x, real) = own_encoder(), batch()
    layer = diagnose(model, (x, real), -1)[0]
    (attention,) = capture(model, (x, real), -1).values()
    ratios = []
    for case, length in enumerate(LENGTHS):
        q, k, v = attention.parts(case)
        torch.testing.assert_close(layer.projection_error[case], projection_error(q, k, v))
        if length > 2:
            ratios.append(eigenvalue_ratios(k, v).spread)
    torch.testing.assert_close(layer.gamma_spread, torch.stack(ratios))


def test_both_forms_of_the_projection_loss_are_recorded_by_their_parts():
    """And the released form's figure of a layer is the log of one mean, over sequences, heads and queries."""
    model, (x, real) = own_encoder(), batch()
    layer = diagnose(model, (x, real), -1, quantities=["projection"])[0]
    (attention,) = capture(model, (x, real), -1).values()
    means, by_head = [], []
    for case in range(BATCH):
        parts = [part.double() for part in attention.parts(case)]
        raw, released = (projection_loss(*parts, form=form) for form in ("raw", "released"))
        torch.testing.assert_close(layer.projection_log_length[case], raw.log_length.float())
        torch.testing.assert_close(layer.projection_output[case], raw.output.float())
        torch.testing.assert_close(layer.released_log_length[case], released.log_length.float())
        torch.testing.assert_close(layer.released_output[case], released.output.float())
        means.append(released.error.mean())
        by_head.append(released.error)
    summary = layer.summary()
    # The parts are kept in single precision: an error of the logarithm is one of the loss.
    close = {"rel": 1e-6, "abs": 1e-5}
    assert summary["released_projection_error"] == pytest.approx(math.log(torch.stack(means).mean()), **close)
    expected = torch.stack(by_head).mean(0).log().tolist()
    assert layer.record()["by_head"]["released_projection_error"] == pytest.approx(expected, **close)
    lengths = layer.projection_log_length.double().exp().mean().log()
    assert summary["projection_log_length"] == pytest.approx(lengths.item(), **close)


def test_distances_of_heads_by_rows_and_as_matrices():
    """Known matrices: each query attends to one key, the heads to different ones."""
    eye, shifted = torch.eye(3), torch.eye(3).roll(1, 0)
    heads = torch.stack([eye, shifted, eye])
    by_row, whole = measures.head_distances(heads), measures.head_matrix_distances(heads)
    torch.testing.assert_close(by_row, math.sqrt(2) * torch.tensor([[0.0, 1, 0], [1, 0, 1], [0, 1, 0]]))
    torch.testing.assert_close(whole, math.sqrt(3) * by_row)
    pairs = measures.above_diagonal(torch.stack([whole, 2 * whole]))
    torch.testing.assert_close(pairs[0], math.sqrt(6) * torch.tensor([1.0, 0, 1]))
    torch.testing.assert_close(pairs[1], 2 * pairs[0])
    assert measures.above_diagonal(whole[:1, :1]).numel() == 0


def test_matrix_distances_are_frobenius_norms_of_attention_and_of_outputs():
    model, (x, real) = own_encoder(), batch()
    layer = diagnose(model, (x, real), -1, quantities=["distance"])[0]
    (attention,) = capture(model, (x, real), -1).values()
    norms: dict[str, list[float]] = {"matrix_distance": [], "output_matrix_distance": []}
    for case in range(BATCH):
        matrix, value = attention.matrix(case), attention.parts(case)[2]
        for key, heads in (("matrix_distance", matrix), ("output_matrix_distance", matrix @ value)):
            for i in range(len(heads)):
                for j in range(i + 1, len(heads)):
                    norms[key].append(float((heads[i] - heads[j]).square().sum().sqrt()))
                    found = float(layer.values[f"{key}s"][case, i, j])
                    assert found == pytest.approx(norms[key][-1], rel=1e-5)
    summary = layer.summary()
    for key, values in norms.items():
        assert summary[key] == pytest.approx(np.mean(values), rel=1e-5)
        assert summary[f"{key}_deviation"] == pytest.approx(np.std(values), rel=1e-4)
    by_head = layer.record()["by_head"]["matrix_distance"]
    assert by_head == pytest.approx([np.mean(norms["matrix_distance"])], rel=1e-5)


def test_causal_layers_have_no_gamma(transformers):
    sizes = {"n_embd": 14, "n_head": 2, "n_layer": 2, "vocab_size": 50, "n_positions": 40}
    model = scatter(transformers.GPT2Model(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)))
    tokens = {"input_ids": torch.randint(3, 50, (BATCH, LENGTH))}
    report = diagnose(model, tokens)
    assert list(report) == ["h.0.attn", "h.1.attn"]
    for layer in report.layers:
        assert "gamma_spread" not in layer.values
        assert layer.notes == ("gamma is left out: a causal layer has another kernel for every query",)
        assert layer.projection_error.shape == (BATCH, 2)
    shorter = diagnose(model, tokens, 0, max_tokens=5)[0]
    prefix = diagnose(model, {"input_ids": tokens["input_ids"][:, :5]}, 0)[0]
    torch.testing.assert_close(shorter.projection_error, prefix.projection_error, rtol=1e-4, atol=1e-5)
    assert "J_proj is that of the first 5 tokens" in shorter.notes


def test_objective_is_that_of_the_training_forward():
    model, (x, real) = encoder({"primal": {"rank": 3, "eta": 0.1}}), batch()
    found = diagnose(model, (x, real), quantities=["objective"])[0].objective
    layer = model.layers[0].attention
    assert layer.objective is None, "the layer's own objective is that of its own last training forward"
    (attention,) = capture(model, (x, real)).values()
    layer.train()
    for case in range(BATCH):
        layer(attention.x[case : case + 1], attention_mask=real[case : case + 1])
        torch.testing.assert_close(found[case], layer.objective.detach())
    assert "objective" not in diagnose(encoder({"primal": {"rank": 3}}), (x, real))[0].values


def test_order_two_is_the_attention_matrix():
    """The kernel tensor of order 2 is a matrix: both modes have its singular values."""
    model, (x, real) = encoder({"dual_multilinear": {"order": 2, "rank": 3}}), batch()
    modes = diagnose(model, (x, real))[0].mode_singular_values
    (attention,) = capture(model, (x, real)).values()
    expected = torch.zeros(2, 64)
    for case in range(BATCH):
        q, k = (part[case][:, real[case]] for part in (attention.queries, attention.keys))
        values = torch.linalg.svdvals((q @ k.mT / math.sqrt(q.size(-1))).softmax(-1))
        expected[:, : values.size(-1)] += values / values[:, :1] / BATCH
    torch.testing.assert_close(modes, expected.expand(2, -1, -1), rtol=1e-3, atol=1e-4)


def test_the_summary_of_the_modes_has_their_ranks_and_the_values_that_explain_90_percent():
    layer = diagnose(encoder({"dual_multilinear": {"rank": 3}}), batch())[0]
    summary, shares = layer.summary(), layer.mode_explained_variance
    assert summary["mode_rank"] == pytest.approx(float(layer.mode_rank.mean()))
    reached = [int((curve >= 0.9).nonzero()[0]) + 1 for curve in shares.flatten(0, -2)]
    assert summary["mode_values_for_90_percent"] == pytest.approx(sum(reached) / len(reached))


@pytest.mark.parametrize("name", ["softmax", "batch_norm"])
def test_long_sequences_are_sampled_and_say_so(name):
    model, x = encoder(name), batch()[0]
    layer = diagnose(model, x, max_tokens=4, quantities=["spectrum"])[0]
    assert layer.notes == ("of 11 queries 4 evenly spaced ones were measured",)
    (attention,) = capture(model, x).values()
    rows = [attention.matrix(case)[:, [0, 3, 6, 10]] for case in range(BATCH)]
    expected = torch.stack([torch.linalg.svdvals(matrix) for matrix in rows])
    torch.testing.assert_close(
        layer.singular_values[:, :4], (expected / expected[..., :1]).mean(0), rtol=1e-4, atol=1e-5
    )


def test_projection_of_sampled_queries():
    """All keys, some queries; gamma, which needs the Gram matrix of all keys, is left out."""
    model, x = own_encoder(), batch()[0]
    layer = diagnose(model, x, -1, max_tokens=4, quantities=["projection"])[0]
    (attention,) = capture(model, x, -1).values()
    for case in range(BATCH):
        q, k, v = attention.parts(case)
        torch.testing.assert_close(layer.projection_error[case], projection_error(q[:, [0, 3, 6, 10]], k, v))
    forms = {f"{form}_{part}" for form in ("projection", "released") for part in ("log_length", "output")}
    assert set(layer.values) == {"projection_error", *forms}
    assert "gamma is left out: more than 4 tokens" in layer.notes


def test_a_record_has_the_figures_of_the_arrays():
    layer = diagnose(own_encoder(), batch())[1]
    record = layer.record()
    by_head = record["by_head"]
    np.testing.assert_allclose(by_head["effective_rank"], layer.effective_rank.numpy().mean(0), rtol=1e-6)
    np.testing.assert_allclose(by_head["projection_error"], np.median(layer.projection_error, 0), rtol=1e-6)
    np.testing.assert_allclose(by_head["head_distance"], [layer.head_distances[0, 1]], rtol=1e-6)
    np.testing.assert_allclose(
        record["explained_variance"], layer.explained_variance.numpy().mean(0), rtol=1e-6
    )
    summary = record["summary"]
    assert summary["gamma_cosine"] == pytest.approx(np.median(layer.gamma_cosine.abs()), rel=1e-2)
    assert summary["effective_rank"] == pytest.approx(layer.effective_rank.mean().item())
    reached = [np.argmax(curve >= 0.9) + 1 for curve in layer.explained_variance.numpy()]
    assert summary["values_for_90_percent"] == np.mean(reached)
    assert record["tokens"] == [1, 11]
    assert record["sequences"] == BATCH


def test_a_matrix_past_the_memory_limit():
    with pytest.raises(
        ka.InputError, match=r"self_attn: a matrix of 2 x 11 x 11 numbers takes 0.00 GiB, more"
    ):
        diagnose(torch_encoder(), torch.randn(BATCH, LENGTH, EMBED_DIM), memory_limit=1e-9)


@pytest.mark.parametrize("kind", ["batches", "generator", "mapping", "tuple"])
def test_cases_are_counted_over_batches(kind):
    model, x = torch_encoder(), torch.randn(BATCH, LENGTH, EMBED_DIM)
    batches = {
        "batches": [x[:2], x[2:4], x[4:]],
        "generator": (part for part in (x[:2], x[2:4], x[4:])),
        "mapping": {"src": x},
        "tuple": (x, None),
    }
    layer = diagnose(model, batches[kind], 0, cases=3, quantities=["distance"])[0]
    assert layer.head_distance.shape == (3,)
    expected = diagnose(model, x[:3], 0, quantities=["distance"])[0]
    torch.testing.assert_close(layer.head_distance, expected.head_distance)


def test_report(tmp_path):
    model, x = torch_encoder().train(), torch.randn(BATCH, LENGTH, EMBED_DIM)
    report = diagnose(model, x, [0, -1])
    assert model.training
    assert report["layers.2"] is report[-1] is report["layers.2.self_attn"]
    assert len(report) == 2
    assert report[0].attention_map.shape == (2, LENGTH, LENGTH)
    assert str(report).startswith("layers.0.self_attn (softmax): values_for_90_percent")
    report.save(tmp_path / "report.npz")
    with np.load(tmp_path / "report.npz", allow_pickle=False) as saved:
        assert set(saved.files) == set(report.arrays())
        np.testing.assert_array_equal(
            saved["layers.0.self_attn/effective_rank"], report["layers.0"].effective_rank
        )


def test_what_a_report_does_not_have(tmp_path):
    report = diagnose(torch_encoder(), torch.randn(BATCH, LENGTH, EMBED_DIM), quantities=["distance"])
    with pytest.raises(AttributeError, match=r"has no effective_rank \(it has: head_distances"):
        _ = report[0].effective_rank
    with pytest.raises(ka.InputError, match="layer 3 is out of range; the report has 3 layers"):
        _ = report[3]
    with pytest.raises(ka.InputError, match=r"unknown layer 'layers.3'.* did you mean"):
        _ = report["layers.3"]
    with pytest.raises(ka.InputError, match=r"layer 'layers' means layers.0.self_attn, layers.1"):
        _ = report["layers"]
    with pytest.raises(ka.InputError, match=r"must end in .npz"):
        report.save(tmp_path / "report.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantities": ["spectra"]}, "unknown quantity 'spectra'; did you mean 'spectrum'"),
        ({"cases": 0}, "cases=0 must be a whole number of at least 1"),
        ({"layers": 3}, "index 3 is out of range; the model has 3 attention layers"),
        ({"layers": []}, r"layers=\[\] names no layer"),
        ({"batches": []}, "batches: there is none"),
        ({"batches": 3}, "batches is a int"),
    ],
)
def test_bad_arguments(options, message):
    arguments = {"batches": torch.randn(BATCH, LENGTH, EMBED_DIM), **options}
    with pytest.raises(ka.InputError, match=message):
        diagnose(torch_encoder(), **arguments)


def test_batches_of_a_loader():
    """With their targets, which the model does not take."""
    split = SequenceSplit([np.ones((length, 3), np.float32) * length for length in LENGTHS], np.arange(BATCH))
    model = own_encoder()
    found = diagnose(model, make_loader(split, 2), quantities=["spectrum"])
    x = torch.tensor(LENGTHS)[:, None, None] * torch.ones(BATCH, LENGTH, 3) * real_tokens()[..., None]
    expected = diagnose(model, (x, real_tokens()), quantities=["spectrum"])
    torch.testing.assert_close(found[0].effective_rank, expected[0].effective_rank, rtol=1e-4, atol=1e-5)
