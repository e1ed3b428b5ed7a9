"""timm: in-place replacement, and our layers as its ``attn_layer``."""

import copy
import pickle

import pytest
import torch
from hosts.models_of_hosts import largest_difference, scatter, small_options

import kernel_attention as ka

SIZE = 16  # 4 patches, and the class token


def create(timm, name="vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    options = {"img_size": SIZE, "patch_size": 8, "depth": 3, "embed_dim": 14, "num_heads": 2, **options}
    return scatter(timm.create_model(name, num_classes=5, **options))


def images():
    return torch.randn(3, 3, SIZE, SIZE)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
@pytest.mark.parametrize("options", [{}, {"qkv_bias": False}, {"proj_bias": False}], ids=str)
def test_softmax_with_carried_weights_is_the_same_function(timm, name, options):
    host = create(timm, name, **options).eval()
    x = images()
    expected = host(x)
    report = ka.replace_attention(host, {"all": "softmax"})
    assert len(report) == 3
    assert not any(record.dropped for record in report)
    assert largest_difference(host(x), expected) < 1e-5


@pytest.mark.parametrize("additive", [False, True])
def test_masks_keep_their_polarity(timm, additive):
    host = create(timm).eval()
    x = torch.randn(3, 7, 14)
    real = torch.arange(7)[None] < torch.tensor([7, 4, 1])[:, None]
    triangle = torch.ones(7, 7, dtype=torch.bool).tril()
    masks = [
        real[:, None, None, :],
        real[:, None, None, :] & real[:, None, :, None],  # NaFlexViT's: padded queries see nothing
        triangle,
        triangle[None].expand(2, 7, 7),
        real[:, None, None, :] & triangle,
    ]
    swapped = copy.deepcopy(host)
    ka.replace_attention(swapped, {0: "softmax"})
    for mask in masks:
        given = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if additive else mask
        valid = real if mask.dim() == 4 else torch.ones_like(real)
        y, expected = swapped.blocks[0](x, attn_mask=given), host.blocks[0](x, attn_mask=given)
        assert largest_difference(y, expected, valid) < 1e-5
    causal = [model.blocks[0](x, is_causal=True) for model in (swapped, host)]
    assert largest_difference(*causal) < 1e-5


@pytest.mark.parametrize("mechanism", ka.list_attention(), ids=lambda mechanism: mechanism.name)
def test_every_mechanism_trains_in_a_vision_transformer(timm, mechanism):
    """The token grid and the class token, which conv2d needs, come from the host."""
    model = create(timm, img_size=32)
    options = {key: value for key, value in small_options(mechanism).items() if key != "max_len"}
    (record,) = ka.replace_attention(model, {"last": {mechanism.name: options}})
    sizes = {"max_len": 17, "grid_size": (4, 4), "class_tokens": 1}
    assert all(record.options[key] == value for key, value in sizes.items() if key in mechanism.options)
    (model(torch.randn(2, 3, 32, 32)).square().mean() + ka.auxiliary_loss(model)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.blocks[-1].attn.parameters())
    assert model.eval()(torch.randn(2, 3, 32, 32)).isfinite().all()


def test_attn_layer_class_and_replacement_in_place_give_the_same_model(timm):
    made = create(
        timm, attn_layer=ka.timm_attention("primal", rank=3, max_len=5, eta=0.1), attn_drop_rate=0.1
    )
    changed = create(timm)
    ka.replace_attention(changed, {"all": "primal"}, rank=3, eta=0.1)
    changed.load_state_dict(made.state_dict())
    x = images()
    assert torch.equal(made.eval()(x), changed.eval()(x))
    assert changed.blocks[0].attn.attention.max_len == 5, "patches and the class token"
    made.train()(x).sum().backward()
    assert ka.auxiliary_loss(made) > 0
    assert torch.equal(pickle.loads(pickle.dumps(made)).eval()(x), made.eval()(x))
    assert torch.equal(copy.deepcopy(made)(x), made(x))


def test_attn_layer_class_passes_dropout_and_bias_on(timm):
    model = create(timm, attn_layer=ka.timm_attention("softmax"), attn_drop_rate=0.3, proj_drop_rate=0.2)
    attention = model.blocks[0].attn
    assert attention.attention.dropout == 0.3
    assert attention.proj_drop.p == 0.2
    bare = create(timm, attn_layer=ka.timm_attention("softmax"), qkv_bias=False, proj_bias=False)
    assert bare.blocks[0].attn.attention.q_proj.bias is None


def test_attn_layer_class_refuses_what_it_cannot_do(timm):
    with pytest.raises(ka.InputError, match="did you mean 'primal'"):
        ka.timm_attention("primol")
    with pytest.raises(ka.InputError, match="option of attention 'primal' 'ranks'"):
        create(timm, attn_layer=ka.timm_attention("primal", ranks=3))
    with pytest.raises(ka.InputError, match="qk_norm"):
        create(timm, attn_layer=ka.timm_attention("softmax"), qk_norm=True)


def test_what_the_host_has_and_we_have_not_is_reported(timm):
    beit = create(timm, "beit_base_patch16_224", depth=2)
    (record,) = ka.replace_attention(beit, {"last": "primal"}, rank=3)
    assert record.dropped == ("qkv.weight[v]", "v_bias", "relative_position_bias_table")
    assert "k_proj.bias" in record.new, "BEiT's keys have no bias"
    assert not beit.blocks[1].attn.attention.k_proj.bias.any()
    assert beit(images()).shape == (3, 5)
    cait = create(timm, "cait_xxs24_224", depth=2)
    (record,) = ka.replace_attention(cait, {0: "softmax"})
    assert record.dropped == ("proj_l.weight", "proj_l.bias", "proj_w.weight", "proj_w.bias")
    assert cait(images()).shape == (3, 5)


def test_call_arguments_without_a_meaning_here_are_refused(timm):
    eva = create(timm, "eva02_tiny_patch14_224", depth=1, embed_dim=16)
    ka.replace_attention(eva, {0: "softmax"})
    with pytest.raises(ka.InputError, match="rope"):
        eva(images())
    with pytest.raises(ka.InputError, match="holds no attention layer"):
        ka.replace_attention(timm.create_model("resnet10t", num_classes=2), {0: "softmax"})


def test_modes_types_and_frozen_weights_are_kept(timm):
    model = create(timm, attn_drop_rate=0.25, proj_drop_rate=0.125).double()
    model.blocks[1].attn.eval()
    model.blocks[1].attn.qkv.weight.requires_grad_(False)
    ka.replace_attention(model, {"all": "softmax"})
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())
    assert [module.training for module in model.blocks[0].attn.modules()] == [True] * 8
    assert not any(module.training for module in model.blocks[1].attn.modules())
    layer = model.blocks[1].attn.attention
    frozen = [name for name, parameter in layer.named_parameters() if not parameter.requires_grad]
    assert frozen == ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    assert layer.dropout == 0.25
    assert model.blocks[1].attn.proj_drop.p == 0.125


def test_a_window_is_served_and_a_shifted_window_is_refused(timm):
    """A shifted window hides some of its tokens from others, which no mask over the keys can say."""
    sizes = {
        "img_size": 16,
        "patch_size": 2,
        "embed_dim": 12,
        "depths": (2,),
        "num_heads": (3,),
        "window_size": 4,
    }
    model = timm.models.swin_transformer.SwinTransformer(**sizes).eval()
    images = torch.randn(2, 3, 16, 16)
    (record,) = ka.replace_attention(model, {0: "softmax"})
    assert record.dropped == ("relative_position_bias_table",)
    assert model(images).isfinite().all()
    ka.replace_attention(model, {1: "softmax"})
    with pytest.raises(ka.InputError, match="the host passes mask, which this attention cannot use"):
        model(images)


class Hosted(torch.nn.Module):
    """An attention with a signature of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads = torch.nn.Linear(14, 42), torch.nn.Linear(14, 14), 2

    def forward(self, x, size=None, is_causal=False, attn_mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 7)).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal
        )
        return self.proj(out.transpose(1, 2).flatten(2))


def test_arguments_by_position_are_those_of_the_hosts_signature():
    host = torch.nn.ModuleDict({"a": Hosted()})
    swapped, x = copy.deepcopy(host), torch.randn(3, 5, 14)
    ka.replace_attention(swapped, {0: "softmax"})
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    for call in ((), (None,), (None, True), (None, False, mask), (False, False, mask.float().log())):
        assert largest_difference(swapped["a"](x, *call), host["a"](x, *call)) < 1e-6, call
    refused = {
        "the host passes size, which this attention cannot use": ([2, 3],),
        "5 arguments by position, expected at most 4": (None, None, None, None),
        r"attn_mask=\[5, 5\] must be a tensor": (None, False, [5, 5]),
        r"attn_mask has shape \(1, 1, 1, 5, 5\), expected": (None, False, mask[None, None, None]),
        "the mask has dtype torch.int64": (None, False, mask.long()),
    }
    for message, call in refused.items():
        with pytest.raises(ka.InputError, match=message):
            swapped["a"](x, *call)
    with pytest.raises(ka.InputError, match="passes attn_mask twice, by position and by name"):
        swapped["a"](x, None, False, mask, attn_mask=mask)
    for other in (mask[:4, :4], mask.expand(2, 1, 5, 5), mask[:, :3]):  # of other tokens, of another batch
        with pytest.raises(ka.InputError):
            swapped["a"](x, attn_mask=other)
    assert largest_difference(copy.deepcopy(swapped)["a"](x, None, True), host["a"](x, None, True)) < 1e-6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mvitv2_tiny", "MultiScaleAttention needs feat_size"),
        ("twins_svt_small", "LocallyGroupedAttn needs size"),
        ("coat_tiny", "FactorAttnConvRelPosEnc needs size"),
        ("nest_tiny", "Attention reads tensors of 4 dimensions"),
    ],
)
def test_a_host_that_needs_more_than_tokens_is_refused_at_once(timm, name, message):
    model = timm.create_model(name)
    before = str(model)
    with pytest.raises(ka.InputError, match=message):
        ka.replace_attention(model, {"last": "softmax"})
    assert str(model) == before
