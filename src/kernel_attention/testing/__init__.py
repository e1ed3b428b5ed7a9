"""The contract of every attention mechanism, as checks to run on ours or on yours.

    import kernel_attention as ka

    ka.testing.check_attention("mine")                            # a registered mechanism
    ka.testing.check_attention(lambda d, h: MyAttention(d, h))    # or any function that makes a layer

In a test suite each check is a test of its own:

    @pytest.mark.parametrize("check", ka.testing.CHECKS)
    def test_mine(check):
        ka.testing.check_attention("mine", only=[check])

The sizes are different primes, so that a swapped axis cannot pass. Padding has no influence whatever its
finite content; the caller must keep NaN and infinity out.
"""

from kernel_attention.testing import (  # noqa: F401
    launches,
    numerics,
    sequences,
    training,
    transforms,
)
from kernel_attention.testing.battery import (
    BATCH,
    CHECKS,
    CONTEXT,
    EMBED_DIM,
    HEAD_DIM,
    HEADS,
    LENGTH,
    LENGTHS,
    MAX_LEN,
    PROMPTS,
    Check,
    Subject,
    check_attention,
    checks_of,
    inputs,
    masks,
    objective,
    right_padding,
    subject,
)
from kernel_attention.testing.launches import LaunchCounter, Launches, count_launches, counting_launches
from kernel_attention.testing.sequences import decoded

__all__ = [
    "BATCH",
    "CHECKS",
    "CONTEXT",
    "EMBED_DIM",
    "HEADS",
    "HEAD_DIM",
    "LENGTH",
    "LENGTHS",
    "MAX_LEN",
    "PROMPTS",
    "Check",
    "LaunchCounter",
    "Launches",
    "Subject",
    "check_attention",
    "checks_of",
    "count_launches",
    "counting_launches",
    "decoded",
    "inputs",
    "masks",
    "objective",
    "right_padding",
    "subject",
]
