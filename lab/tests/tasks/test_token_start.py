"""Classifiers of sentences that start with a language model's weights."""

from __future__ import annotations

import shutil

import pytest
import torch
from runs.small_runs import assert_same_outcome, stopped_at, train_arguments, trained_run
from tasks.text_data import LANGUAGE
from tasks.token_data import BAD, GOOD, OTHER, TOKENS, make_tokens
from torch.nn import functional as F

from kernel_attention.series.task import SequenceTask
from kernel_attention_lab.cli import main
from kernel_attention_lab.data.texts.vocabulary import vocabulary_from_state
from kernel_attention_lab.data.tokens.loading import words_of
from kernel_attention_lab.runs.saved import load_run
from kernel_attention_lab.runs.start import prepare
from kernel_attention_lab.tasks import make_recipe
from kernel_attention_lab.tasks.tokens import TokenExperiment

pytestmark = pytest.mark.usefixtures("brief")

TEXT = LANGUAGE | {
    "dataset": "reviews", "attention": "symmetric", "context": 12, "max_len": 24, "seeds": [0, 1]
}  # fmt: skip
SENTENCES = TOKENS | {"dataset": "sst2", "attention": "symmetric", "is_causal": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Sentences, and a text that has all of their words but ``tired`` and the comma."""
    root = make_tokens(tmp_path_factory.mktemp("tokens"))
    (root / "reviews").mkdir()
    words = [word for word in (*GOOD, *BAD, *OTHER) if word not in ("tired", ",")]
    line = " ".join([*words, "<unk>", "unheard"]) + "\n"
    for name in ("train", "valid", "test"):
        (root / "reviews" / f"{name}.txt").write_text(line * 20)
    return root


@pytest.fixture(scope="module")
def language_model(root, tmp_path_factory):
    return trained_run(tmp_path_factory.mktemp("language") / "run", TEXT, root)


def prepared(root, start, seed=0, **changes):
    """A new classifier with the weights of ``start``, and its experiment, in double precision."""
    experiment = TokenExperiment(make_recipe(SENTENCES | {"start_from": str(start)} | changes), root)
    torch.manual_seed(7)
    model = experiment.build_model(experiment.recipe, experiment.facts()).double()
    prepare(experiment, model, seed)
    return experiment, model.eval()


@pytest.mark.parametrize(
    ("norm_first", "positions", "experts"), [(True, "learnt", 0), (False, "fixed", 0), (True, "fixed", 3)]
)
def test_the_encoder_computes_what_the_language_model_does(norm_first, positions, experts, root, tmp_path):
    """On every sentence, with the words that the language model does not know as its ``<unk>``."""
    keys = {"norm_first": norm_first, "positions": positions, "experts": experts}
    start = trained_run(tmp_path / "run", TEXT | keys | {"seeds": [0]}, root)
    experiment, model = prepared(root, start, **keys)
    opened = load_run(start)
    language_model, vocabulary = (
        opened.model().double(),
        vocabulary_from_state(opened.facts["vocabulary_state"]),
    )
    lines = [line.split(" ", 1)[1] for line in (root / "sst/stsa.binary.test").read_text().splitlines()]
    assert any("tired" in line for line in lines)
    for case, line in enumerate(lines):
        (tokens,) = experiment.data.test.case(case)
        known = torch.from_numpy(vocabulary.encode(words_of(line)))
        with torch.no_grad():
            found = model.encoder(torch.from_numpy(tokens).long()[None], None, True)
            hidden = language_model.hidden(known[None])
            expected = F.gelu((language_model.norm if norm_first else model.encoder.norm)(hidden))
        torch.testing.assert_close(
            found, expected, rtol=0, atol=1e-6
        )  # the weights are single, one is divided


def test_every_seed_starts_from_its_own_and_others_from_the_first(root, language_model):
    for seed, source in ((0, 0), (1, 1), (2, 0)):
        _, model = prepared(root, language_model, seed)
        expected = load_run(language_model).model(source).state_dict()
        for name, value in model.encoder.state_dict().items():
            if name.startswith(("layers.", "norm.")):
                assert torch.equal(value, expected[name].double()), name


def test_the_pursuit_takes_the_weights_of_symmetric_attention(root, language_model, tmp_path):
    """RPC in the fine-tuning alone; with its own queries it needs those of softmax."""
    options = {"iterations": 2, "lam": 3.0}
    _, model = prepared(root, language_model, attention={"rpc": options})
    expected = load_run(language_model).model(0).state_dict()
    assert torch.equal(
        model.encoder.layers[1].attention.k_proj.weight, expected["layers.1.attention.q_proj.weight"].double()
    )
    softmax = trained_run(tmp_path / "softmax", TEXT | {"attention": "softmax", "seeds": [0]}, root)
    _, model = prepared(root, softmax, attention={"rpc": options | {"symmetric": False}})
    expected = load_run(softmax).model(0).state_dict()
    assert torch.equal(
        model.encoder.layers[0].attention.q_proj.weight, expected["layers.0.attention.q_proj.weight"].double()
    )


def test_a_run_stopped_at_any_step_ends_as_if_it_had_not(root, language_model, tmp_path, capsys):
    """A seed that has begun needs the language model no more, nor does the trained classifier."""
    start = shutil.copytree(language_model, tmp_path / "language")
    keys = SENTENCES | {"start_from": str(start)}
    reference = trained_run(tmp_path / "reference" / "run", keys, root)
    with stopped_at(SequenceTask, 6):
        assert main(train_arguments(tmp_path / "run", keys, root)) == 1
    assert "checkpoint after step 6)\n" in capsys.readouterr().err
    shutil.rmtree(start)
    assert main(["train", "--resume", str(tmp_path / "run"), "--progress", "false"]) == 0
    assert_same_outcome(tmp_path / "run", reference)
    assert main(["evaluate", str(tmp_path / "run"), "--output", str(tmp_path / "figures.json")]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": 4}, "embed_dim is 8 there and 4 here; both must be equal"),
        ({"norm_first": False}, "norm_first is True there and False here"),
        ({"experts": 2}, "experts is 0 there and 2 here"),
        ({"max_len": 25}, "it reads at most 24 tokens, the sequences here have up to 25"),
        (
            {"dataset": "lra/retrieval"},
            "its vocabulary is of kind word, that of dataset lra/retrieval is byte",
        ),
        ({"attention": "dual_multilinear"}, "cannot be a layer of a causal model"),
        ({"start_from": "{root}/nowhere"}, "nowhere: not a run folder (it has no config.yaml)"),
        ({"start_from": "{bytes}"}, "its vocabulary is of kind byte, that of dataset sst2 is word"),
        ({"start_from": "{sentences}"}, "it is of task tokens (accepted: language)"),
    ],
    ids=str,
)
def test_a_start_that_does_not_fit_is_refused_in_one_line(
    changes, message, root, language_model, tmp_path, capsys
):
    places = {"root": root, "bytes": tmp_path / "bytes", "sentences": tmp_path / "sentences"}
    if changes.get("start_from") == "{bytes}":
        trained_run(places["bytes"], TEXT | {"vocabulary": "byte", "seeds": [0]}, root)
    if changes.get("start_from") == "{sentences}":
        trained_run(places["sentences"], SENTENCES, root)
    changes = {
        key: value.format(**places) if isinstance(value, str) else value for key, value in changes.items()
    }
    capsys.readouterr()
    assert (
        main(
            train_arguments(tmp_path / "run", SENTENCES | {"start_from": str(language_model)} | changes, root)
        )
        == 2
    )
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
