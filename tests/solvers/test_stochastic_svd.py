"""KernelSVD from mini-batches of explicit features, against the SVD of the whole kernel matrix in float64."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from kernel_attention.solvers import KernelSVD
from kernel_attention.solvers.primal_kernel_svd import FrequentDirections
from reference.subspaces import angles, two_samples, unit_columns

S = 5


def assert_agrees(found, values, left, right, must_have_gaps=True):
    """Values within 1 %; directions within 1 degree for every s whose gap exceeds 10 %."""
    torch.testing.assert_close(found.singular_values_, values[:S], rtol=0.01, atol=0)
    split = [s for s in range(1, S + 1) if 1 - values[s] / values[s - 1] > 0.1]
    assert split or not must_have_gaps
    for s in split:
        for vectors, theirs in (
            (found.left_singular_vectors_, left), (found.right_singular_vectors_, right)
        ):  # fmt: skip
            assert angles(unit_columns(vectors[:, :s]), theirs[:, :s]).max() < 1.0


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_stochastic_agrees_with_the_svd_on_random_data(decay, seed):
    torch.manual_seed(seed)
    X, Z = two_samples(500, 400, 60, 60)
    X = X * torch.arange(1, 61) ** -decay
    Z = X[:400] @ torch.randn(60, 60, dtype=torch.float64) / 8 + 0.3 * Z
    left, values, right = torch.linalg.svd(X @ Z.T, full_matrices=False)
    found = KernelSVD(S, solver="primal_stochastic", batch_size=64, random_state=0).fit(X, Z)
    assert_agrees(found, values, left, right.T, must_have_gaps=decay == 1)


@pytest.mark.parametrize("seed", range(3))
def test_small_directions_are_as_true_as_the_first(seed):
    """Twelve singular values over three decades, each a gap of 45 % below the one before, and a floor."""
    torch.manual_seed(seed)
    left, right = (unit_columns(part) for part in two_samples(400, 300, 80, 80))
    values = torch.full((80,), 0.55**12, dtype=torch.float64)
    values[:12] = 0.55 ** torch.arange(12, dtype=torch.float64)
    X, Z = left * values, right @ unit_columns(torch.randn(80, 80, dtype=torch.float64))
    turn = torch.linalg.lstsq(right, Z).solution
    found = KernelSVD(12, solver="primal_stochastic", n_oversamples=4, random_state=seed).fit(X @ turn, Z)
    torch.testing.assert_close(found.singular_values_, values[:12], rtol=0.01, atol=0)
    for s in range(1, 13):
        assert angles(unit_columns(found.left_singular_vectors_[:, :s]), left[:, :s]).max() < 1.0
        assert angles(unit_columns(found.right_singular_vectors_[:, :s]), right[:, :s]).max() < 1.0


_OUTSIDE = Path(os.environ.get("KERNEL_ATTENTION_DATA") or Path(__file__).parents[3] / "shared" / "data")


def _training_series(name):
    """Series (n_i, c) of the training split."""
    if name == "JapaneseVowels":
        series, _ = pytest.importorskip("aeon.datasets").load_japanese_vowels(split="train")
        return [np.asarray(x).T for x in series]
    if not (_OUTSIDE / "uea" / f"{name}.zip").is_file():
        pytest.skip(f"no uea/{name}.zip in {_OUTSIDE} (set KERNEL_ATTENTION_DATA to the folder of real data)")
    return pytest.importorskip("kernel_attention_lab.data").load_time_series(name, _OUTSIDE).train.sequences


@pytest.mark.parametrize(
    "name",
    [
        "JapaneseVowels",
        pytest.param("SelfRegulationSCP1", marks=pytest.mark.slow),
        pytest.param("LSST", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("feature_map", ["cosine", "identity"])
def test_stochastic_agrees_with_the_svd_on_time_series(name, feature_map):
    """X: windows of a series; Z: the windows that follow them, through a projection of their own."""
    series = _training_series(name)[:40]
    width = 6
    windows = [torch.from_numpy(np.asarray(x, np.float64)).unfold(0, width, 3).flatten(1) for x in series]
    X = torch.cat([part[:-1] for part in windows])[:600]
    Z = torch.cat([part[1:] for part in windows])[:600]
    X, Z = (part - part.mean(0) for part in (X, Z))
    Z = Z @ torch.randn(Z.size(1), Z.size(1), dtype=torch.float64)
    found = KernelSVD(
        S, solver="primal_stochastic", feature_map=feature_map, batch_size=128, random_state=0
    ).fit(X, Z)
    phi_x, phi_z = (
        (part / part.norm(dim=1, keepdim=True) if feature_map == "cosine" else part) for part in (X, Z)
    )
    left, values, right = torch.linalg.svd(phi_x @ phi_z.T, full_matrices=False)
    assert_agrees(found, values, left, right.T)


def test_mini_batches_are_all_that_the_feature_map_sees():
    seen = []

    def feature_map(x):
        seen.append(len(x))
        return x.cos()

    X, Z = two_samples(100, 90)
    by_parts = KernelSVD(
        3, solver="primal_stochastic", feature_map=feature_map, batch_size=16, random_state=0
    ).fit(X, Z)
    assert max(seen) == 16
    whole = KernelSVD(3, solver="primal", feature_map=feature_map).fit(X, Z)
    torch.testing.assert_close(by_parts.singular_values_, whole.singular_values_)


def test_leading_directions_of_the_samples_need_not_be_those_of_the_kernel():
    """X is large where Z is small and the other way round: the sketches alone would miss the kernel."""
    scale = torch.full((200,), 0.01, dtype=torch.float64)
    scale[:60] = 1.0
    X, Z = two_samples(500, 400, 200, 200)
    X, Z = X * scale, Z * scale.flip(0)
    exact = torch.linalg.svdvals(X @ Z.T)[:3]
    found = KernelSVD(3, solver="primal_stochastic", n_oversamples=5, random_state=0).fit(X, Z)
    torch.testing.assert_close(found.singular_values_, exact, rtol=0.01, atol=0)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_kernel_of_fewer_directions_than_were_asked_for(rank):
    X, Z = two_samples()
    Z = Z[:, :rank] @ torch.randn(rank, Z.size(1), dtype=torch.float64)
    found = KernelSVD(4, solver="primal_stochastic", random_state=0).fit(X, Z)
    exact = torch.linalg.svdvals(X @ Z.T)[:4]
    torch.testing.assert_close(found.singular_values_, exact, rtol=1e-10, atol=1e-6 * max(exact[0].item(), 1))
    assert found.w_e_.shape == (7, 4)
    assert abs(found.objective_) <= 1e-10 * exact.sum()


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
@pytest.mark.parametrize("repeats", [1, 6])
def test_one_direction_in_all_the_features(offset, repeats):
    """Features that all but agree: a basis of them is singular to working precision."""
    for seed in range(10):
        torch.manual_seed(seed)
        X, Z = two_samples(6, 5, 6, 6)
        X, Z = (part[: 6 // repeats].repeat(repeats, 1) + offset for part in (X, Z))
        found = KernelSVD(3, solver="primal_stochastic", random_state=0).fit(X, Z)
        exact = torch.linalg.svdvals(X @ Z.T)[:3]
        # Values are known to 1e-6 of the first, the root of the rounding of sums of squares.
        torch.testing.assert_close(found.singular_values_, exact, rtol=0, atol=1e-6 * exact[0].item())


def test_too_few_epochs_say_so():
    X, Z = two_samples(300, 300, 100, 100)
    with pytest.warns(RuntimeWarning, match="2 epochs left a relative residual"):
        KernelSVD(S, solver="primal_stochastic", max_iter=2, n_oversamples=0, random_state=0).fit(X, Z)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_stream_is_exact_while_its_directions_fit_the_sketch(dtype):
    X, Z = (part.to(dtype) for part in two_samples(120, 90))
    stream = KernelSVD(3, solver="primal_stochastic")
    for x, z in zip(X.split(40), Z.split(30), strict=True):
        stream.partial_fit(x, z)
    whole = KernelSVD(3, solver="primal").fit(X, Z)
    assert stream.n_iter_ == 3
    assert not hasattr(stream, "left_singular_vectors_")
    torch.testing.assert_close(stream.singular_values_, whole.singular_values_)
    e, r = stream.transform(X, Z)
    sign = (e * whole.left_scores_).sum(0).sign()
    tolerance = 1e-8 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(e, sign * whole.left_scores_, rtol=0, atol=tolerance)
    torch.testing.assert_close(r, sign * whole.right_scores_, rtol=0, atol=tolerance)


def drifting():
    """39 directions first, then one more that comes little by little and ends up as the largest."""
    late = torch.zeros(10_000, 80, dtype=torch.float64)
    late[:, 79] = 0.1
    return torch.cat([torch.eye(80, dtype=torch.float64)[:39], late])


def decaying():
    return torch.randn(700, 80, dtype=torch.float64) * torch.arange(1, 81) ** -0.5


@pytest.mark.parametrize("make", [decaying, drifting])
def test_the_bound_of_frequent_directions(make):
    rows = make()
    sketch = FrequentDirections(40)
    for batch in rows.split(33):
        sketch.update(batch)
    matrix = sketch.matrix()
    assert matrix.size(0) <= 40
    lost = torch.linalg.eigvalsh(rows.T @ rows - matrix.T @ matrix)
    energy = torch.linalg.svdvals(rows).square()
    assert lost.min() > -1e-9 * energy[0]
    assert lost.max() <= min(energy[k:].sum() / (8 - k) for k in range(8))
    assert lost.max() > 1e-3 * energy[0]  # the sketch did have to give something up
