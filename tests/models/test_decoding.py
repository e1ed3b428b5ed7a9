"""Decoding token by token is the parallel form, in every mechanism; generation is its arg max or draws."""

from __future__ import annotations

import pytest
import torch
from models.test_causal import CAUSAL, LENGTH, VOCABULARY, small

from kernel_attention.errors import InputError
from kernel_attention.models.language.causal import draw_tokens, generate
from kernel_attention.models.language.decoding import DecodingState


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(2))


def tensors_of(value):
    """All tensors in a state."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, DecodingState):
        return tensors_of(value.layers)
    if hasattr(value, "__dict__"):
        value = list(vars(value).values())
    return (
        [tensor for item in value for tensor in tensors_of(item)] if isinstance(value, list | tuple) else []
    )


@pytest.mark.parametrize("name", CAUSAL)
def test_steps_give_the_logits_of_the_parallel_form(name, tokens):
    """From the first token, and after a prompt read at once."""
    model = small([name, "softmax"])
    with torch.no_grad():
        expected = model(tokens)
        state = model.initial_state(len(tokens))
        for position in range(LENGTH):
            logits, state = model.step(tokens[:, position], state)
            torch.testing.assert_close(logits, expected[:, position], rtol=0, atol=1e-12)
        logits, state = model.prefill(tokens[:, :4])
        torch.testing.assert_close(logits, expected[:, 3], rtol=0, atol=1e-12)
        logits, state = model.prefill(tokens[:, 4:7], state)
        torch.testing.assert_close(logits, expected[:, 6], rtol=0, atol=1e-12)
        logits, state = model.step(tokens[:, 7], state)
        torch.testing.assert_close(logits, expected[:, 7], rtol=0, atol=1e-12)
        assert state.position == 8


@pytest.mark.parametrize(
    "attention", ["primal", ["softmax", {"primal": {"data_dependent": False}}], "linear"]
)
def test_greedy_text_is_that_of_the_parallel_form(attention, tokens):
    """Each token is the arg max of the logits that one parallel pass over the whole text gives."""
    model = small(attention)
    prompt = tokens[:, :2]
    text = torch.cat([prompt, torch.stack(list(generate(model, prompt, LENGTH - 2)), dim=1)], dim=1)
    with torch.no_grad():
        assert torch.equal(model(text)[:, 1:-1].argmax(dim=-1), text[:, 2:])


def test_draws_are_seeded_and_follow_the_distribution():
    """Relative frequencies over many draws are softmax(logits / temperature) among the top k."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(20000, 1)
    drawn = draw_tokens(logits, 0.5, 3, torch.Generator().manual_seed(0))
    frequencies = drawn.bincount(minlength=4) / len(drawn)
    expected = torch.tensor([4.0, 2.0, 0.0, -torch.inf]).softmax(dim=0)
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0.012)  # 3.5 standard deviations
    assert torch.equal(drawn, draw_tokens(logits, 0.5, 3, torch.Generator().manual_seed(0)))
    assert draw_tokens(logits[:5], 0.0, None, None).tolist() == [0] * 5
    assert torch.equal(draw_tokens(logits, 2.0, 1, None), torch.zeros(20000, dtype=torch.long))


@pytest.mark.slow
@pytest.mark.parametrize("data_dependent", [True, False])
def test_20000_tokens_in_constant_memory(data_dependent, peak_memory):
    """The text of the parallel form, and no more memory after 20,000 tokens than after 2,000."""
    from kernel_attention.models import CausalLanguageModel

    torch.manual_seed(0)
    count = 20000
    spec = {"primal": {"rank": 8, "data_dependent": data_dependent}}
    model = CausalLanguageModel(
        50, count + 1, spec, embed_dim=16, num_heads=2, num_layers=2, feedforward_dim=32, dropout=0.0
    )
    with torch.no_grad():  # far from a fixed point: a text that repeats one token would prove little
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        model.positions.normal_(std=2.0)
    model.double().eval()
    prompt = torch.tensor([[1, 2, 3]])
    text, early = prompt[0].tolist(), 0
    for number, token in enumerate(generate(model, prompt, count - 3)):
        text.append(int(token))
        if number == 2000:
            early = peak_memory()
    grown = peak_memory() - early
    assert grown < 2**22, f"{grown} bytes"
    assert len(set(text[-1000:])) > 5
    with torch.no_grad():
        expected = model(torch.tensor([text]))[0].argmax(dim=-1)
    assert expected[2:-1].tolist() == text[3:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": -1}, "count=-1"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"prompt": torch.zeros(1, 0, dtype=torch.long)}, r"prompt has shape \(1, 0\)"),
        ({"count": LENGTH}, "sequence length 12 exceeds max_len=11"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_token(options, message):
    arguments = {"prompt": torch.zeros(1, 2, dtype=torch.long), "count": 3} | options
    with pytest.raises(InputError, match=message):
        generate(small(), **arguments)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_padded_text_has_the_logits_that_it_has_alone(name, side, tokens):
    """In the parallel form, in a prompt, and in the steps after it; texts of 3, 8 and 5 tokens."""
    model, lengths, size = small([name, "softmax"]), (3, 8, 5), 8
    texts = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    padded = torch.zeros(3, size, dtype=torch.int64)
    real = torch.zeros(3, size, dtype=torch.bool)
    for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        place = slice(size - length, size) if side == "left" else slice(length)
        padded[row, place], real[row, place] = text, True
    with torch.no_grad():
        together = model(padded, real)
        last, state = model.prefill(padded, attention_mask=real)
        later = tokens[:, 8]
        after, state = model.step(later, state)
        assert state.position.tolist() == [4, 9, 6]
        for row, text in enumerate(texts):
            alone = model(torch.cat([text, later[row : row + 1]])[None])[0]
            torch.testing.assert_close(together[row][real[row]], alone[:-1], rtol=0, atol=1e-12)
            torch.testing.assert_close(last[row], alone[-2], rtol=0, atol=1e-12)
            torch.testing.assert_close(after[row], alone[-1], rtol=0, atol=1e-12)
        with pytest.raises(InputError, match="only the beginning of a text can be padded"):
            model.prefill(padded, state, real)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_prompt_that_is_read_has_the_gradients_of_the_parallel_form(name, tokens):
    model = small([name, "softmax"])
    weights = [p for p in model.parameters() if p.requires_grad]
    logits, state = model.prefill(tokens[:, :5])
    with torch.no_grad():
        model.step(tokens[:, 5], state)  # may write into the state, not into what the backward pass reads
    found = torch.autograd.grad(logits.square().sum(), weights, allow_unused=True)
    expected = torch.autograd.grad(model(tokens[:, :5])[:, -1].square().sum(), weights, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    assert not any(tensor.requires_grad for tensor in tensors_of(state))


@pytest.mark.parametrize("name", CAUSAL)
def test_a_backward_pass_through_later_tokens_is_an_error(name, tokens):
    """Part of the gradients would be missing: a step is computed without."""
    model = small([name, "softmax"])
    first, state = model.prefill(tokens[:, :4])
    step, state = model.step(tokens[:, 4], state)
    rest, _ = model.prefill(tokens[:, 5:7], state)
    for logits in (step, rest, first + step):
        with pytest.raises(InputError, match="read after a state have no gradients"):
            logits.sum().backward(retain_graph=True)
    model.requires_grad_(False)
    assert not model.step(tokens[:, 4], state)[0].requires_grad


def test_embedded_tokens_are_read_as_their_numbers_are(tokens):
    model = small("linear")
    with torch.no_grad():
        embedded = model.embedding(tokens)
        assert torch.equal(model(embedded), model(tokens))
        logits, state = model.prefill(embedded[:, :4])
        again, expected = model.prefill(tokens[:, :4])
        assert torch.equal(logits, again)
        assert torch.equal(
            model.prefill(embedded[:, 4:], state)[0], model.prefill(tokens[:, 4:], expected)[0]
        )
    for wrong in (embedded[..., 1:], embedded.long()):
        with pytest.raises(InputError, match="or embedded tokens"):
            model(wrong)


def test_hooks_of_a_layer_see_the_prompt(tokens):
    model, seen = small("softmax"), []
    model.layers[1].register_forward_hook(lambda _, inputs, output: seen.append(output.shape))
    model.prefill(tokens)
    assert seen == [(3, LENGTH, 6)]
