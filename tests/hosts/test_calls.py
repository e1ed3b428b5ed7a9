"""Cross-attention is recognised by how its owner calls it, whatever the names."""

import pytest
import torch
from torch import nn

import kernel_attention as ka
from kernel_attention.hosts.sites import find_sites, reads_other_tokens


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(14, 2, batch_first=True)
        self.norm = nn.LayerNorm(14)
        self.probe = nn.Parameter(torch.randn(1, 1, 14))


class Same(Owner):
    def forward(self, x):
        return self.mix(x, x, x)[0]


class Chain(Owner):
    def forward(self, x, places):
        q = k = x + places
        return self.mix(q, k, value=x)[0]


class Renamed(Owner):
    def forward(self, x):
        query, key = x, x
        return x + self.mix(query, key, key, need_weights=False)[0]


class InAnotherMethod(Same):
    def forward(self, x):
        return self._block(self.norm(x))

    def _block(self, x):
        y, _ = self.mix(query=x, key=x, value=x)
        return y


class Probe(Owner):
    def forward(self, x):
        probe = self.probe.expand(len(x), -1, -1)
        return self.mix(probe, x, x)[0]


class Memory(Owner):
    def forward(self, x, memory):
        return self.mix(x, memory, memory)[0]


class Before(Owner):
    """``key`` was the tokens before they became other ones."""

    def forward(self, x):
        key = x
        x = self.norm(x)
        return self.mix(x, key, key)[0]


class Named(Owner):
    def forward(self, x, context):
        return self.mix(query=x, value=context, key=context)[0]


class Unseen(Owner):
    def forward(self, *inputs):
        return self.mix(*inputs)[0]


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        (Same, False), (Chain, False), (Renamed, False), (InAnotherMethod, False),
        (Probe, True), (Memory, True), (Before, True), (Named, True), (Unseen, None),
    ],
)  # fmt: skip
def test_the_owners_call_says_whether_it_is_cross_attention(owner, expected):
    assert reads_other_tokens(owner, "mix") is expected
    for path in ("plain", "cross_encoder", "cross_attn"):
        (site,) = find_sites(nn.ModuleDict({path: owner()}))
        assert site.cross is (expected if expected is not None else path != "plain")


def test_a_class_without_source_is_recognised_by_names():
    namespace = {"Owner": Owner}
    exec("class Made(Owner):\n    def forward(self, x, y):\n        return self.mix(x, y, y)[0]", namespace)
    assert reads_other_tokens(namespace["Made"], "mix") is None


def test_a_probe_is_replaced_by_name_only():
    model = nn.ModuleDict({"block": Same(), "head": Probe()}).eval()
    x = torch.randn(3, 5, 14)
    expected = model["head"](x)
    assert [record.path for record in ka.replace_attention(model, {"all": "softmax"})] == ["block.mix"]
    (record,) = ka.replace_attention(model, {"head.mix": "softmax"})
    assert record.layer is None
    torch.testing.assert_close(model["head"](x), expected)
