"""A mechanism as CONTRIBUTING says one is added: the text of every file, by its path in a checkout."""

from __future__ import annotations

FILES = {
    "tests/reference/mine.py": '''
"""Attention with equal weights, one sum after the other."""

from __future__ import annotations

from torch import Tensor


def mean_attention(v: Tensor, attention_mask: Tensor, is_causal: bool) -> Tensor:
    """(B, h, N, p) -> (B, h, N, p): the mean of the real values that a token sees."""
    out = v.clone()
    for b in range(v.size(0)):
        for i in range(v.size(2)):
            seen = [j for j in range(v.size(2)) if attention_mask[b, j] and (j <= i or not is_causal)]
            out[b, :, i] = sum(v[b, :, j] for j in seen) / len(seen) if seen else 0.0
    return out
''',
    "src/kernel_attention/mechanisms/mine/__init__.py": '''
"""Attention with equal weights: every token gets the mean of the values."""

from kernel_attention.mechanisms.mine.functional import mean_attention
from kernel_attention.mechanisms.mine.layer import MeanAttention

__all__ = ["MeanAttention", "mean_attention"]
''',
    "src/kernel_attention/mechanisms/mine/functional.py": '''
"""Attention with equal weights."""

from __future__ import annotations

from torch import Tensor

from kernel_attention.tensors.statistics import running_mean


def mean_attention(v: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """The mean of the values over the real tokens that a token may see.

    Args:
        v: values, (B, h, N, p).
        attention_mask: (B, N), True = real token.
        is_causal: token i sees tokens 0..i only.

    Returns:
        (B, h, N, p).
    """
    if is_causal:
        return running_mean(v, attention_mask)
    if attention_mask is None:
        return v.mean(dim=2, keepdim=True).expand_as(v)
    mask = attention_mask[:, None, :, None]
    total = v.masked_fill(~mask, 0.0).sum(dim=2, keepdim=True)
    return (total / mask.sum(dim=2, keepdim=True).clamp_min(1)).expand_as(v)
''',
    "src/kernel_attention/mechanisms/mine/layer.py": '''
"""Attention with equal weights, as a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.registry import register_attention
from kernel_attention.mechanisms.mine.functional import mean_attention


@register_attention("mine", paper="none", equation="mean(v)", time="N p", memory="N p")
class MeanAttention(AttentionLayer):
    """Attention with equal weights.

    Args:
        embed_dim: model width d.
        num_heads: number of heads; divides d.
        bias: whether the projections have biases.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """The mean of the heads' values."""
        v = self.split_heads(self.v_proj(x))
        out = mean_attention(v, attention_mask=attention_mask, is_causal=is_causal)
        return self.out_proj(self.merge_heads(out))
''',
    "tests/mechanisms/mine/test_mine.py": '''
"""Attention with equal weights."""

from __future__ import annotations

import pytest
import torch

from kernel_attention.functional import mean_attention
from reference.mine import mean_attention as reference


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_function_equals_the_reference(is_causal):
    v = torch.randn(3, 2, 7, 5, dtype=torch.float64)
    mask = torch.rand(3, 7) < 0.7
    mask[:, 0] = True
    found = mean_attention(v, attention_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(found, reference(v, mask, is_causal))
''',
    "docs/mechanisms/mine.md": """
# Mean attention

Attention with equal weights: every token gets the mean of the values. The mechanism is called `mine`, its
layer `MeanAttention`.

```python
import torch
import kernel_attention as ka

y = ka.MeanAttention(embed_dim=64, num_heads=4)(torch.randn(2, 100, 64))
```
""",
}
"""{path: text}; a text begins with a line break."""
