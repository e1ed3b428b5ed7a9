"""What a host computes is found out before it is replaced, whatever its weights and its names."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import kernel_attention as ka

HEADS, WIDTH, LENGTH = 2, 14, 11


class Plain(nn.Module):
    """Attention as timm writes it; the others change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.mix(q, k, v).transpose(1, 2).flatten(2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weights(q, k) @ v

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT * q.size(-1) ** -0.5).softmax(-1)


class Causal(Plain):
    def weights(self, q, k):
        hidden = torch.ones(q.size(2), q.size(2)).triu(1).bool()
        return (q @ k.mT * q.size(-1) ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1)


class Window(Plain):
    def weights(self, q, k):
        near = torch.ones(q.size(2), q.size(2)).tril(2).triu(-2).bool()
        return (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~near, -torch.inf).softmax(-1)


class Places(Plain):
    """The table is zero in a new model, and not in a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(HEADS, 64, 64))

    def weights(self, q, k):
        size = q.size(2)
        return (q @ k.mT * q.size(-1) ** -0.5 + self.table[:, :size, :size]).softmax(-1)


class Tables(Places):
    """Tables of a fixed length, as in a window."""

    window_size = (4, 4)

    def weights(self, q, k):
        return (q @ k.mT * q.size(-1) ** -0.5 + self.table[:, :16, :16]).softmax(-1)


class Scale(Plain):
    def weights(self, q, k):
        return (q @ k.mT).softmax(-1)


class Temperature(Plain):
    """One in a new model."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def weights(self, q, k):
        return (q @ k.mT * self.temperature * q.size(-1) ** -0.5).softmax(-1)


class Cosine(Plain):
    def weights(self, q, k):
        return (normalize(q, dim=-1) @ normalize(k, dim=-1).mT).softmax(-1)


class TalkingHeads(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Linear(HEADS, HEADS)

    def weights(self, q, k):
        return self.talk(super().weights(q, k).transpose(1, 3)).transpose(1, 3)


class Gated(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(HEADS, 1, 1))

    def mix(self, q, k, v):
        return super().mix(q, k, v) * self.gate


class Residual(Plain):
    def mix(self, q, k, v):
        return super().mix(q, k, v) + v


class Channels(Plain):
    """DaViT's: the weights are between the channels of a head."""

    def mix(self, q, k, v):
        return ((q * q.size(2) ** -0.5).mT @ k).softmax(-1).matmul(v.mT).mT


class CrossCovariance(Plain):
    """XCiT's."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def mix(self, q, k, v):
        weights = (normalize(q.mT, dim=-1) @ normalize(k.mT, dim=-1).mT * self.temperature).softmax(-1)
        return (weights @ v.mT).mT


class ClassToken(Plain):
    """One token is attended for, and the others stay."""

    def forward(self, x):
        return torch.cat([super().forward(x)[:, :1], x[:, 1:]], 1)


class Pooled(Plain):
    def forward(self, x):
        return super().forward(x).mean(1)


class Grid(Plain):
    def forward(self, x):
        _, height, width, _ = x.shape
        return super().forward(x.flatten(1, 2)).unflatten(1, (height, width))


class Size(Plain):
    def forward(self, x, size):
        assert len(size) == 2
        return super().forward(x)


class Lost(Plain):
    def forward(self, x):
        raise KeyError("position")


PLACES = "another attention: it depends on the places of the tokens"
MEANS = "another attention: its outputs are not weighted means of its values"
WEIGHTS = "another attention: its weights are another function of queries and keys"


@pytest.mark.parametrize(
    ("kind", "differs"),
    [
        (Plain, None),
        (Causal, None),
        (Window, PLACES),
        (Places, PLACES),
        (Tables, PLACES),
        (Scale, WEIGHTS),
        (Temperature, WEIGHTS),
        (Cosine, WEIGHTS),
        (TalkingHeads, MEANS),
        (Gated, MEANS),
        (Residual, MEANS),
        (Lost, "not compared with softmax attention: called alone, it says \"'position'\""),
    ],
)
def test_a_difference_is_in_the_report(kind, differs):
    (record,) = ka.replace_attention(nn.ModuleDict({"a": kind()}), {"all": "softmax"})
    assert record.differs == differs
    assert (f"  differs: {differs}" in str(record).splitlines()) == (differs is not None)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Channels, "Channels does not attend over tokens"),
        (CrossCovariance, "CrossCovariance does not attend over tokens"),
        (ClassToken, "ClassToken does not attend over tokens"),
        (Pooled, r"Pooled makes a tensor \(1, 14\) of \(1, 7, 14\), expected the same shape"),
        (Grid, r"Grid reads tensors of 4 dimensions, expected \(B, N, 14\)"),
        (Size, "Size needs size, which no layer here can use"),
    ],
)
def test_a_host_that_is_no_attention_over_tokens_is_refused(kind, message):
    model = nn.ModuleDict({"a": Plain(), "b": kind()})
    before = str(model)
    with pytest.raises(ka.InputError, match=f"^layers: b: {message}"):
        ka.replace_attention(model, {"all": "primal"}, rank=3)
    assert str(model) == before
    ka.replace_attention(model, {"a": "softmax"})


class Busy(Plain):
    """It counts its calls, and draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        self.calls += 1
        return self.drop(super().forward(x)) + 0 * torch.randn(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_comparison_leaves_no_trace(dtype):
    from kernel_attention.hosts.comparing import compare

    host = Busy().to(dtype)
    seen = []
    for module in (host, host.qkv):
        module.register_forward_hook(lambda *_: seen.append("called"))
        module.register_forward_pre_hook(lambda *_: seen.append("called"))
    state, drawn = copy.deepcopy(host.state_dict()), torch.get_rng_state()
    assert compare(host, (nn.ModuleDict({"a": host}),), HEADS, None).differs is None
    assert not seen
    assert host.training
    assert all(torch.equal(value, state[name]) for name, value in host.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_host_without_memory_is_not_compared():
    with torch.device("meta"):
        model = nn.ModuleDict({"a": Plain()})
    (record,) = ka.replace_attention(model, {0: "softmax"})
    assert record.differs == "not compared with softmax attention: its weights are on the device meta"
    assert all(parameter.is_meta for parameter in model.parameters())
    single = nn.ModuleDict({"a": nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True)})
    (record,) = ka.replace_attention(single, {0: "softmax"})
    assert record.dropped == ("bias_k", "bias_v")
    assert record.differs == MEANS


@pytest.mark.parametrize(
    ("name", "place", "differs"),
    [
        ("davit_tiny", 0, None),
        ("davit_tiny", 1, "refused"),
        ("swin_tiny_patch4_window7_224", 0, PLACES),
        ("edgenext_xx_small", 0, "refused"),
        ("xcit_nano_12_p16_224", -1, "refused"),
    ],
)
def test_models_of_timm(timm, name, place, differs):
    """Windows and channels of DaViT, places of Swin, covariances of EdgeNeXt and XCiT."""
    model = timm.create_model(name)
    if differs == "refused":
        with pytest.raises(ka.InputError, match="does not attend over tokens"):
            ka.replace_attention(model, {place: "softmax"})
    else:
        assert ka.replace_attention(model, {place: "softmax"})[0].differs == differs
