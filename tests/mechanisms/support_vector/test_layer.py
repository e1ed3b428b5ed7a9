"""Linear, sparse and support-vector layers: outputs and all gradients equal the loops of the papers'
formulas."""

from __future__ import annotations

import pytest
import torch

from kernel_attention import (
    InputError,
    LinearAttention,
    SparseAttention,
    SupportVectorAttention,
    create_attention,
)
from kernel_attention.mechanisms.support_vector.head_groups import default_factors
from reference.support_vector import support_vector_attention

# Different primes; 3 heads of width 2.
BATCH, LENGTH, WIDTH, HEADS, CONTEXT = 2, 7, 6, 3, 5

SPARSE = {"sparse": {"stride": 3, "impl": "dense"}}
BLOCKED = {"sparse": {"stride": 2, "impl": "blocked"}}
FIXED = {"sparse": {"pattern": "fixed", "stride": 3, "summary": 1, "impl": "blocked"}}
LINEAR, OF_SPARSE = {"kernel": "linear"}, {"kernel": "sparse"}
SIGNED = {**LINEAR, "normalize_rows": False}
F123 = {"factors": (1, 2, 3)}
BN, BN_2 = {"beta": 0.6}, {"beta": 0.7, "normalize": True, "eps": 0.1}
C, X, CX = "causal", "cross", "causal cross"
# name: (mechanism, its options, the oracle's options, forms beside the plain one)
CASES = {
    "linear": ("linear", {}, LINEAR, CX),
    "linear-relu": ("linear", {"feature_map": "relu"}, {**LINEAR, "feature_map": torch.relu}, CX),
    "linear-identity": ("linear", {"feature_map": "identity"}, {**SIGNED, "feature_map": lambda x: x}, CX),
    "linear-cosine": (
        "linear", {"feature_map": "cosine"}, {**SIGNED, "feature_map": lambda x: x / x.norm()}, CX,
    ),
    "sparse": ("sparse", {"stride": 3}, OF_SPARSE, CX),
    "sparse-blocked": ("sparse", {"stride": 3, "impl": "blocked"}, OF_SPARSE, C),
    "sparse-fixed": (
        "sparse", {"pattern": "fixed", "stride": 3, "summary": 2},
        {**OF_SPARSE, "pattern": ("fixed", 3, 2)}, C,
    ),
    "sparse-fixed-blocked": (
        "sparse", {"pattern": "fixed", "stride": 4, "summary": 2, "impl": "blocked"},
        {**OF_SPARSE, "pattern": ("fixed", 4, 2)}, C,
    ),
    "bn": ("batch_norm", BN, BN, CX),
    "bn-learnt": ("batch_norm", {**BN, "learn_beta": True}, {"beta": "learnt"}, CX),
    "bn-normalized": ("batch_norm", BN_2, BN_2, CX),
    "bn-linear": ("batch_norm", {**BN, **LINEAR}, {**BN, **LINEAR}, X),
    "bn-linear-normalized": ("batch_norm", {**BN_2, **LINEAR}, {**BN_2, **LINEAR}, X),
    "bn-sparse": ("batch_norm", {**BN, "kernel": SPARSE}, {**BN, **OF_SPARSE}, C),
    "bn-sparse-normalized": (
        "batch_norm", {**BN_2, "kernel": FIXED}, {**BN_2, **OF_SPARSE, "pattern": ("fixed", 3, 1)}, C,
    ),
    "sh": ("scaled_heads", F123, F123, CX),
    "sh-unsorted": ("scaled_heads", {"factors": (3, 1, 3)}, {"factors": (3, 1, 3)}, CX),
    "sh-long": ("scaled_heads", {"factors": 11}, {"factors": (11,) * 3}, CX),
    "sh-max": ("scaled_heads", {**F123, "pooling": "max"}, {**F123, "pooling": "max"}, CX),
    "sh-conv": ("scaled_heads", {**F123, "pooling": "conv"}, {**F123, "pooling": "conv"}, CX),
    "sh-linear": ("scaled_heads", {**F123, **LINEAR}, {**F123, **LINEAR}, CX),
    "sh-sparse": ("scaled_heads", {**F123, "kernel": SPARSE}, {**F123, **OF_SPARSE}, C),
    "sh-sparse-blocked": (
        "scaled_heads", {"factors": (1, 2, 2), "kernel": BLOCKED},
        {"factors": (1, 2, 2), **OF_SPARSE, "pattern": ("strided", 2, 1)}, C,
    ),
    "bn+sh": ("batch_norm_scaled_heads", {**F123, **BN}, {**F123, **BN}, CX),
    "bn+sh-normalized": ("batch_norm_scaled_heads", {**F123, **BN_2}, {**F123, **BN_2}, CX),
    "conv1d": ("conv1d", {}, {"conv": "shared"}, C),
    "conv1d-even": ("conv1d", {"kernel_size": 4, "conv_weights": "separate"}, {"conv": "separate"}, C),
    "conv1d-separable": ("conv1d", {"kernel_size": 3, "conv_weights": "separable"}, {"conv": "separable"}, C),
    "conv1d-linear": ("conv1d", LINEAR, {"conv": "shared", **LINEAR}, C),
}  # fmt: skip


def build(name: str, options: dict) -> SupportVectorAttention:
    """The layer, every parameter moved off its initial value: zeros would hide errors."""
    torch.manual_seed(1)
    layer = create_attention(name, WIDTH, HEADS, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def assert_equals_the_loops(layer, oracle, x, *, mask=None, context=None, is_causal=False):
    weights = dict(layer.named_parameters())
    oracle = {**oracle, "beta": layer.beta if oracle.get("beta") == "learnt" else oracle.get("beta", 0.0)}
    leaves = [leaf.clone().requires_grad_() for leaf in (x, *([] if context is None else [context]))]
    call = {"context": None if context is None else leaves[1], "is_causal": is_causal}
    y = layer(leaves[0], attention_mask=mask, **call)
    expected = support_vector_attention(leaves[0], weights, mask, num_heads=HEADS, **oracle, **call)
    if mask is not None and context is None:
        y, expected = y[mask], expected[mask]
    torch.testing.assert_close(y, expected)
    towards = torch.randn_like(y)
    wanted = [*leaves, *weights.values()]
    gradients = torch.autograd.grad((y * towards).sum(), wanted, allow_unused=True)
    references = torch.autograd.grad((expected * towards).sum(), wanted, allow_unused=True)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if reference is None else reference)


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_the_loops(case):
    name, options, oracle, forms = CASES[case]
    layer = build(name, options)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    holes = torch.tensor([[1, 0, 1, 1, 0, 1, 1], [0, 0, 1, 0, 1, 1, 0]], dtype=torch.bool)
    assert_equals_the_loops(layer, oracle, x)
    assert_equals_the_loops(layer, oracle, x, mask=holes)
    if "causal" in forms:
        assert_equals_the_loops(layer, oracle, x, is_causal=True)
        assert_equals_the_loops(layer, oracle, x, mask=holes, is_causal=True)
    if "cross" in forms:
        context = torch.randn(BATCH, CONTEXT, WIDTH, dtype=torch.float64)
        mask = torch.arange(CONTEXT)[None] < torch.tensor([[5], [3]])
        assert_equals_the_loops(layer, oracle, x, context=context)
        assert_equals_the_loops(layer, oracle, x, context=context, mask=mask)


@pytest.mark.parametrize("weights", ["shared", "separate", "separable"])
@pytest.mark.parametrize(("size", "grid", "class_tokens"), [(2, (2, 3), 1), (3, (3, 2), 0), (4, (2, 2), 2)])
def test_conv2d_equals_the_loops(weights, size, grid, class_tokens):
    layer = build(
        "conv2d",
        {"grid_size": grid, "class_tokens": class_tokens, "kernel_size": size, "conv_weights": weights},
    )
    x = torch.randn(BATCH, class_tokens + grid[0] * grid[1], WIDTH, dtype=torch.float64)
    assert_equals_the_loops(layer, {"conv": weights, "grid": grid, "class_tokens": class_tokens}, x)


def test_an_absent_patch_of_a_grid_counts_as_zero_and_is_not_attended_to():
    layer = build("conv2d", {"grid_size": (2, 3), "class_tokens": 1})
    x, mask = torch.randn(BATCH, 7, WIDTH, dtype=torch.float64), torch.ones(BATCH, 7, dtype=torch.bool)
    torch.testing.assert_close(layer(x, attention_mask=mask), layer(x))
    mask[0, 4] = False
    y = layer(x, attention_mask=mask)
    other = x.clone()
    other[0, 4] = 1e3
    torch.testing.assert_close(layer(other, attention_mask=mask)[mask], y[mask])


def test_the_convolution_leaves_the_class_token_alone():
    layer = build("conv2d", {"grid_size": (2, 3), "class_tokens": 1})
    x = torch.randn(1, 7, WIDTH, dtype=torch.float64)
    q, k = layer.q_proj(x), layer.k_proj(x)
    for before, after in zip((q, k), layer.convolution.after(q, k, None, False), strict=True):
        assert torch.equal(after[:, :1], before[:, :1])
        assert not torch.allclose(after[:, 1:], before[:, 1:])


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "scaled_heads", "batch_norm"])
def test_untrained_layers_start_where_their_theory_does(name):
    # A convolution at the identity, factors 1 and beta 0 are softmax attention.
    options = {
        "conv1d": {},
        "conv2d": {"grid_size": (2, 3), "class_tokens": 1},
        "scaled_heads": {"factors": 1},
        "batch_norm": {"beta": 0.0},
    }[name]
    layer = create_attention(name, WIDTH, HEADS, **options).double()
    softmax = create_attention("softmax", WIDTH, HEADS).double()
    softmax.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer(x), softmax(x))


def test_pooling_by_a_convolution_starts_as_average_pooling():
    conv = SupportVectorAttention(WIDTH, HEADS, factors=[1, 2, 3], pooling="conv").double()
    average = SupportVectorAttention(WIDTH, HEADS, factors=[1, 2, 3]).double()
    average.load_state_dict(conv.state_dict(), strict=False)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    for form in (False, True):
        torch.testing.assert_close(conv(x, is_causal=form), average(x, is_causal=form))


MATRICES = (
    "linear", "sparse", "sparse-fixed-blocked", "bn", "bn-linear", "bn+sh-normalized", "sh", "sh-linear",
    "sh-sparse-blocked", "conv1d",
)  # fmt: skip


@pytest.mark.parametrize("case", MATRICES)
def test_the_kernel_matrix_is_what_multiplies_the_values(case):
    name, options, _, _ = CASES[case]
    layer = build(name, options)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    holes = torch.tensor([[1, 0, 1, 1, 0, 1, 1], [0, 0, 1, 0, 1, 1, 0]], dtype=torch.bool)
    for mask in (None, holes):
        matrix = layer.kernel_matrix(x, attention_mask=mask)
        out = layer.out_proj(layer.merge_heads(matrix @ layer.split_heads(layer.v_proj(x))))
        y = layer(x, attention_mask=mask)
        real = slice(None) if mask is None else mask
        torch.testing.assert_close(out[real], y[real])
        if mask is not None:
            assert not matrix.transpose(1, 2)[~mask].any()
            assert not matrix.permute(0, 3, 1, 2)[~mask].any()


@pytest.mark.parametrize("pooling", ["max", "conv"])
def test_the_kernel_matrix_of_other_poolings_shares_a_blocks_weight_out(pooling):
    layer = build("scaled_heads", {"factors": 3, "pooling": pooling})
    matrix = layer.kernel_matrix(torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64))
    torch.testing.assert_close(matrix.sum(-1), torch.ones(BATCH, HEADS, LENGTH, dtype=torch.float64))
    torch.testing.assert_close(matrix[..., 0], matrix[..., 2])


@pytest.mark.parametrize(
    ("heads", "factors"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 1, 2)),
        (4, (1, 1, 2, 4)),
        (6, (1, 1, 1, 2, 2, 2)),
        (8, (1, 1, 2, 2, 4, 4, 8, 8)),
    ],
)
def test_default_factors_are_the_papers_where_it_has_them(heads, factors):
    assert default_factors(heads) == factors
    assert SupportVectorAttention(24 if 24 % heads == 0 else heads, heads).factors == factors


def test_pooled_heads_project_no_more_rows_than_they_have_keys():
    rows = []
    layer = SupportVectorAttention(64, 4, factors=[1, 2, 4, 8], beta=0.0)
    real = torch.nn.functional.linear

    def count(x, weight, bias=None):
        rows.append(x.size(1) * weight.size(0))
        return real(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", count)
        layer(torch.randn(1, 80, 64))
    # Queries and output in full; keys and values 1 + 1/2 + 1/4 + 1/8 of a quarter each.
    assert sum(rows) == 64 * 80 * (2 + 2 * (1 + 0.5 + 0.25 + 0.125) / 4)


def test_dropout_keeps_the_mean_of_a_causal_scaled_head():
    layer = build("scaled_heads", {"factors": 3, "dropout": 0.3})
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    many = layer(x.expand(20000, -1, -1), is_causal=True).mean(0)
    assert (many - layer.eval()(x, is_causal=True)[0]).abs().max() < 0.05


def refused(message: str, **options):
    with pytest.raises(InputError, match=message):
        SupportVectorAttention(WIDTH, HEADS, **options)


def test_bad_options_are_refused_with_what_is_accepted():
    refused(r"unknown kernel 'sofmax'; did you mean 'softmax'", kernel="sofmax")
    refused(
        r"kernel=\{'linear': \{\}, 'sparse': \{\}\} must be a name or", kernel={"linear": {}, "sparse": {}}
    )
    refused(
        r"unknown option of kernel 'softmax' 'stride' \(accepted: none\)", kernel={"softmax": {"stride": 2}}
    )
    refused(
        r"unknown option of kernel 'sparse' 'strde'; did you mean 'stride'", kernel={"sparse": {"strde": 2}}
    )
    refused(r"stride=0 must be a whole number of at least 1", kernel={"sparse": {"stride": 0}})
    refused(
        r"summary=4 must be a whole number from 1 to stride=3", kernel={"sparse": {"stride": 3, "summary": 4}}
    )
    refused(r"unknown pattern 'stride'; did you mean 'strided'", kernel={"sparse": {"pattern": "stride"}})
    refused(r"unknown impl 'fast'", kernel={"sparse": {"impl": "fast"}})
    refused(
        r"normalize=True with feature_map='cosine'",
        kernel={"linear": {"feature_map": "cosine", "normalize": True}},
    )
    refused(
        r"factors=\[1, 2\] must be a whole number of at least 1, or a list of one for each of num_heads=3",
        factors=[1, 2],
    )
    refused(r"factors=\[1, 2, 0\] must be", factors=[1, 2, 0])
    refused(r"unknown pooling 'mean'", pooling="mean")
    refused(r"eps=0 must be a positive number", eps=0)
    refused(r"convolution='1d' goes with beta=0, normalize=False and factors=1 only", convolution="1d")
    refused(r"unknown convolution '3d'", convolution="3d", beta=0, factors=1)
    refused(r"grid_size=None must be \(height, width\)", convolution="2d", beta=0, factors=1)
    refused(r"are for convolution='2d'", convolution="1d", beta=0, factors=1, grid_size=(2, 2))
    refused(r"unknown conv_weights 'own'", convolution="1d", beta=0, factors=1, conv_weights="own")
    refused(r"kernel_size=0 must be", convolution="1d", beta=0, factors=1, kernel_size=0)


def test_unsound_calls_are_refused():
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.raises(InputError, match=r"is_causal=True, but kernel='linear' with beta=1\.0"):
        create_attention("batch_norm", WIDTH, HEADS, kernel="linear")(x, is_causal=True)
    with pytest.raises(InputError, match="is_causal=True, but a convolution over a grid has no causal form"):
        create_attention("conv2d", WIDTH, HEADS, grid_size=(2, 3))(x, is_causal=True)
    with pytest.raises(
        InputError, match=r"sequence length 7 must be class_tokens=0 plus .* grid_size=\(2, 3\), 6"
    ):
        create_attention("conv2d", WIDTH, HEADS, grid_size=(2, 3))(x)
    with pytest.raises(InputError, match="impl='blocked' needs self-attention"):
        create_attention("sparse", WIDTH, HEADS, impl="blocked")(x, context=torch.randn(BATCH, 3, WIDTH))


def test_the_sparse_stride_follows_the_longest_sequence():
    assert SparseAttention(WIDTH, HEADS, max_len=900).kernel.pattern.stride == 30
    assert SparseAttention(WIDTH, HEADS).kernel.pattern.stride == 16
    assert SparseAttention(WIDTH, HEADS, max_len=900, stride=7).kernel.pattern.stride == 7


def test_random_features_belong_to_the_layer():
    layer = LinearAttention(WIDTH, HEADS, feature_map={"softmax_plus": {"num_features": 5, "seed": 3}})
    assert "kernel.feature_map.projection" in layer.state_dict()
    twin = LinearAttention(WIDTH, HEADS, feature_map={"softmax_plus": {"num_features": 5, "seed": 4}})
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(BATCH, LENGTH, WIDTH)
    assert torch.equal(twin(x), layer(x))
    before = layer(x)
    layer.kernel.feature_map.redraw()
    assert not torch.allclose(layer(x), before)
    layer.kernel.feature_map.redraw(3)
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("factors", [[1, 2, 2, 5], [3, 3, 1, 20]])
@pytest.mark.parametrize("name", ["scaled_heads", "batch_norm_scaled_heads"])
def test_pooling_projected_tokens_gives_what_projecting_pooled_ones_does(
    name, factors, padded, is_causal, monkeypatch
):
    torch.manual_seed(0)
    layer = create_attention(name, embed_dim=20, num_heads=4, factors=factors).double()
    mask = torch.arange(13)[None] < torch.tensor([13, 4, 1])[:, None] if padded else None
    real = torch.ones(3, 13, dtype=torch.bool) if mask is None else mask
    x = torch.randn(3, 13, 20, dtype=torch.float64, requires_grad=True)
    found = []
    for is_joint in (True, False):
        monkeypatch.setattr(type(layer), "is_joint", lambda *_, joint=is_joint: joint)
        y = layer(x, attention_mask=mask, is_causal=is_causal)[real]
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_the_joint_causal_form_is_as_exact_as_the_one_group_after_group(beta, dtype, monkeypatch):
    torch.manual_seed(0)
    layer = create_attention("batch_norm_scaled_heads", embed_dim=20, num_heads=4, beta=beta)
    x = torch.randn(2, 201, 20) + 3.0
    errors = []
    monkeypatch.setattr(type(layer), "is_joint", lambda *_: False)
    exact = layer.double()(x.double(), is_causal=True)
    for is_joint in (True, False):
        monkeypatch.setattr(type(layer), "is_joint", lambda *_, joint=is_joint: joint)
        y = layer.to(dtype)(x.to(dtype), is_causal=True)
        errors.append(torch.linalg.vector_norm(y - exact))
    assert errors[0] <= 1.5 * errors[1]


def test_the_joint_causal_form_can_be_differentiated_twice(monkeypatch):
    torch.manual_seed(0)
    layer = create_attention("batch_norm_scaled_heads", embed_dim=8, num_heads=4).double()
    x = torch.randn(1, 7, 8, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(type(layer), "is_joint", lambda *_: True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x, is_causal=True), x)
