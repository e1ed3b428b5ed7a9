"""The options of every command, as classes of settings (``kernel_attention.fields``).

The docstring of a class is the description in the command's help, and its ``Args`` are the help of the
options. A field marked ``POSITIONAL`` is given without its name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

POSITIONAL = "positional"


@dataclass(frozen=True)
class Repeated:
    """The option may be given several times, each with one value, which the help calls ``metavar``."""

    metavar: str


Name = Annotated[str, POSITIONAL]
OptionalName = Annotated[str | None, POSITIONAL]


@dataclass(frozen=True, kw_only=True)
class Command:
    """The options that every command has.

    Args:
        plugin: a module that registers mechanisms, imported first; may be given several times.
    """

    usage: ClassVar[str]
    summary: ClassVar[str]

    plugin: Annotated[list[str], Repeated("MODULE")] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Train(Command):
    """Train a recipe, given by the name of a shipped one or as a YAML file. Options replace the recipe's
    values. The defaults below apply where neither gives a value.

    Args:
        recipe: name (see: kernel-attention list recipes) or YAML file; FILE/NAME where it holds a family.
        output: run folder (default: runs/RECIPE-ATTENTION-TIME).
        data_root: folder with data sets (default: $KERNEL_ATTENTION_DATA).
        resume: continue this run folder; takes no recipe and none of its keys.
        progress: show a progress bar.
    """

    usage = "train RECIPE [options] | train --resume RUN"
    summary = "train a recipe and report on it"

    recipe: OptionalName = None
    output: str | None = None
    data_root: str | None = None
    resume: str | None = None
    progress: bool = True


@dataclass(frozen=True, kw_only=True)
class TableCommand(Command):
    """The options of commands that read series from tables.

    Args:
        layout: of a table: long, a step a row; wide, a case a row; auto takes long where time_column is
            given.
        case_column: column of a table that names the case.
        time_column: column of a long table that orders the steps of a case.
        target_column: column of a table with the label or the value to predict (default: target).
        channel_columns: columns of the channels in a long table, or the names before the steps in a wide
            one (default: all other columns).
    """

    layout: Literal["auto", "long", "wide"] | None = None
    case_column: str | None = None
    time_column: str | None = None
    target_column: str | None = None
    channel_columns: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Init(TableCommand):
    """Write a recipe for own series, a text to be read and changed. With a file of labelled series (.csv,
    .tsv, .parquet, .npz or .ts), the file is read as training would read it, and the recipe has sizes for it.
    With --recipe, write a copy of that recipe: all its keys, below the comments that explain it.

    Args:
        dataset: the file of labelled series.
        recipe: copy this recipe (see: kernel-attention list recipes); takes no file of series and no option
            about one.
        output: the recipe; a file that exists is not replaced.
        data_root: folder with data sets (default: $KERNEL_ATTENTION_DATA).
        test_file: file of the test split (default: a fifth of the cases).
        target_type: whether the targets are classes or values; auto takes values where all are numbers and
            one is not whole.
        missing: what to do with missing values; auto refuses them unless a .ts file declares them
            (default: auto).
    """

    usage = "init [FILE] [options] | init --recipe RECIPE [--output FILE]"
    summary = "write a recipe for own series, or a copy of one"

    dataset: OptionalName = None
    recipe: str | None = None
    output: str = "recipe.yaml"
    data_root: str | None = None
    test_file: str | None = None
    target_type: Literal["auto", "class", "value"] | None = None
    missing: Literal["auto", "interpolate", "error"] | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluate(Command):
    """Measure every seed of a run on the test split of its data set, or on a file; a policy in its
    environment. The options --stride to --swap_rate are for language models, --severities and
    --corrupted_cases for segmentations, --split for both, and those after it for policies. Their defaults are
    the values in the run's recipe.

    Args:
        run: run folder.
        file: labelled data in a file format of the task; for a run on images class folders, or an archive of
            them.
        data_root: folder with data sets (default: $KERNEL_ATTENTION_DATA).
        output: write the figures to this .json or .csv file.
        split: train, validation or test alone.
        stride: tokens by which the window moves; 1 predicts every token from a full context.
        evaluation_tokens: number of tokens to evaluate, from the first; 0 is all.
        swap_rate: fraction of the words that the word swap replaces.
        severities: also measure 15 corruptions of the test images at these severities, of 1 to 5.
        corrupted_cases: number of test images that are corrupted, evenly spaced; 0 is all.
        target_returns: the returns that a policy is asked for, such as '[3600, 1800]'.
        evaluation_episodes: number of episodes of each of them.
        evaluation_seed: seed of the first episode.
        memory: sliding or recurrent.
        evaluation_context: steps of the sliding memory; 0 is those of training.
    """

    usage = "evaluate RUN [FILE] [options]"
    summary = "measure a trained run on held-out or new data"

    run: Name
    file: OptionalName = None
    data_root: str | None = None
    output: str | None = None
    split: str | None = None
    stride: int | None = None
    evaluation_tokens: int | None = None
    swap_rate: float | None = None
    severities: list[int] | None = None
    corrupted_cases: int | None = None
    target_returns: list[float] | None = None
    evaluation_episodes: int | None = None
    evaluation_seed: int | None = None
    memory: Literal["sliding", "recurrent"] | None = None
    evaluation_context: int | None = None


@dataclass(frozen=True, kw_only=True)
class Predict(TableCommand):
    """Predict new cases with a trained run: series of a .ts, .npy, .npz, .csv, .tsv or .parquet file, lines
    of text, or images. Options about the columns of a table are for a file that Python saved; a run folder
    knows its columns.

    Args:
        run: run folder, or a file that AttentionClassifier.save or AttentionRegressor.save wrote.
        file: series; arrays are (cases, channels, time) as in aeon, tables as in training; for a run on texts
            a text file; for a run on images an image, or a folder or an archive of them.
        seed: seed of the model (default: the first of the run).
        output: write to this .csv or .json file (default: CSV, to the screen).
    """

    usage = "predict RUN FILE [options]"
    summary = "predict new cases with a trained run, or with a classifier that Python saved"

    run: Name
    file: Name
    seed: int | None = None
    output: str | None = None


@dataclass(frozen=True, kw_only=True)
class Explain(TableCommand):
    """Explain the prediction for one series: which steps of which channels it rests on, by integrated
    gradients, as a table and a picture. The options about the columns of a table are as for predict.

    Args:
        run: run folder on time series, or a file that AttentionClassifier.save or AttentionRegressor.save
            wrote.
        file: series, as for predict.
        case: the case, by its name in the file, or by its number from 0 (default: the first).
        output: the picture, .svg, .png or .pdf.
        nodes: gradients along the way; more are more exact.
        seed: seed of the model (default: the first of the run).
    """

    usage = "explain RUN FILE [options]"
    summary = "what the prediction for a series rests on, with a picture"

    run: Name
    file: Name
    case: str | None = None
    output: str = "explanation.svg"
    nodes: int = 64
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Generate(Command):
    """Continue a text with a language model, one token at a time.

    Args:
        run: run folder of a recipe of task language.
        prompt: beginning of the text.
        tokens: number of tokens to generate.
        temperature: 0 takes the most likely token.
        top_k: draw among this number of most likely tokens.
        seed: seed of the draws.
        model_seed: seed of the model (default: the first of the run).
    """

    usage = "generate RUN --prompt TEXT [options]"
    summary = "continue a text with a trained language model"

    run: Name
    prompt: str | None = None
    tokens: int = 50
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0
    model_seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Play(Command):
    """Play one episode of a trained policy and write its pictures, seed-K/episode.gif, into the run and its
    report. MuJoCo's environments are drawn by EGL or OSMesa where there is no screen.

    Args:
        run: run folder of a recipe of task decisions.
        seed: seed of the model (default: the first of the run).
        episode_seed: seed of the first state.
        target: the return that is asked for (default: the first of the recipe).
        memory: sliding or recurrent (default: that of the recipe).
        frames: the most pictures, evenly spaced over the episode.
        side: pixels of a side of a picture.
        output: write to this folder instead of the run.
    """

    usage = "play RUN [options]"
    summary = "play an episode of a trained policy, with pictures"

    run: Name
    seed: int | None = None
    episode_seed: int = 0
    target: float | None = None
    memory: Literal["sliding", "recurrent"] | None = None
    frames: int = 60
    side: int = 240
    output: str | None = None


@dataclass(frozen=True, kw_only=True)
class Analyze(Command):
    """Measure the attention of every seed on test sequences: spectra, head distances, kernel-PCA figures, J,
    maps. The results go next to the seed's weights and into the run's report.

    Args:
        run: run folder.
        layers: all, first, last-2, indices or names; several as 0,-1.
        cases: number of test sequences.
        over_training: also measure the weights kept during training (recipe key keep_weights_every).
        output: write figures and pictures to this folder instead of the run.
        data_root: folder with data sets (default: $KERNEL_ATTENTION_DATA).
    """

    usage = "analyze RUN [options]"
    summary = "diagnose the attention of a trained run"

    run: Name
    layers: str = "all"
    cases: int = 16
    over_training: bool = False
    output: str | None = None
    data_root: str | None = None


@dataclass(frozen=True, kw_only=True)
class Attack(Command):
    """Attack a trained run of images and measure its accuracy on the attacked images. Every attack is written
    to seed-K/robustness.json when it is done, and is not run again. Plans and attacks: docs/robustness.md.

    Args:
        run: run folder of a recipe of task images; with the plans uncertainty and ensemble, of texts too.
        plan: table, autoattack, curves, paper, masking, corruptions, out_of_distribution, uncertainty,
            ensemble (of all trained seeds); several are run in turn (default: table).
        attacks: attacks by name instead of a plan: clean, fgsm, pgd, sld, noise, square, spsa, cw,
            autoattack.
        protocol: of attacks by name: pixel (pixels in [0, 1], true labels), or paper (the kernel-PCA paper's
            released code: normalised inputs, not clipped, the model's own classes) (default: pixel).
        eps: radius, such as 1/255, of attacks by name; several give a curve (default: 1/255).
        cases: number of test images of every attack (default: that of the plan).
        transfer: run folder; FGSM and PGD against its model are tried on this one too.
        seed: seed of the model (default: every trained one).
        attack_seed: seed of the attacks' random draws.
        batch_size: number of images attacked together.
        again: run attacks again that are in the file.
        quick: a few images and steps, to see that everything runs.
        output: write to this folder instead of the run.
        data_root: folder with data sets (default: $KERNEL_ATTENTION_DATA).
    """

    usage = "attack RUN [options]"
    summary = "attack a trained run of images"

    run: Name
    plan: list[str] = field(default_factory=list)
    attacks: list[str] = field(default_factory=list)
    protocol: str | None = None
    eps: list[str] = field(default_factory=list)
    cases: int | None = None
    transfer: str | None = None
    seed: int | None = None
    attack_seed: int = 0
    batch_size: int = 64
    again: bool = False
    quick: bool = False
    output: str | None = None
    data_root: str | None = None


@dataclass(frozen=True, kw_only=True)
class Bench(Command):
    """Measure attention layers in interleaved rounds. Sizes take several values; every combination is
    measured. Suites: docs/performance.md.

    Args:
        attention: contenders (see: kernel-attention list contenders): names, '{primal: {rank: 30}}', or
            '[sdpa, primal]' for an encoder (default: every mechanism, or the suite's own).
        suite: name of a plan; other options replace its values.
        length: tokens of a sequence.
        embed_dim: model width.
        num_heads: attention heads.
        batch_size: sequences.
        threads: CPU threads of PyTorch.
        dtype: float32, bfloat16, float16.
        device: cpu, cuda.
        causal: whether the layers are causal.
        passes: forward (inference), step (training).
        rounds: number of timed rounds.
        warmup: passes before the first timed one.
        seed: seed of the order of the contenders.
        memory: measure peak memory, in a process for each contender.
        flops: count operations.
        against: a git revision of this checkout. Both are timed in interleaved rounds, and what got slower
            beyond the noise is named; the exit code is then 1. No memory, no operations.
        output: folder (default: runs/bench-SUITE-TIME).
        record: a further file for the record, without the orders of the rounds; refused for a checkout with
            uncommitted changes, whose revision would name other code.
    """

    usage = "bench [attention ...] [--suite NAME] [options]"
    summary = "time and memory of attention layers, next to other implementations"

    attention: Annotated[list[Any], POSITIONAL] = field(default_factory=list)
    suite: str | None = None
    length: list[int] | None = None
    embed_dim: list[int] | None = None
    num_heads: list[int] | None = None
    batch_size: list[int] | None = None
    threads: list[int] | None = None
    dtype: list[str] | None = None
    device: list[str] | None = None
    causal: bool | None = None
    passes: list[str] | None = None
    rounds: int | None = None
    warmup: int = 1
    seed: int = 0
    memory: bool | None = None
    flops: bool | None = None
    against: str | None = None
    output: str | None = None
    record: str | None = None


@dataclass(frozen=True, kw_only=True)
class Record(Command):
    """Write a record of every finished seed of a run: one small JSON file with the recipe, what the training
    took, and every figure measured so far. Tables are made from records. A record that is there with other
    content is not replaced.

    Args:
        run: run folder.
        to: folder of the records; one folder holds the records of one table.
        label: row of the table (default: the mechanism's name); the runs of a label differ in their seeds
            alone.
        revision: git's name of the code that trained the run, where the run does not say.
    """

    usage = "record RUN --to FOLDER [--label NAME]"
    summary = "keep the figures of a run as small files that tables are made from"

    run: Name
    to: str | None = None
    label: str | None = None
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class Reproduce(Command):
    """Run what a suite lacks and compare it with what its paper reported. A suite is a table of a paper:
    rows, recipes and seeds. Each training leaves a record, so the command can be stopped and given again, and
    several of them can work on one suite at a time. A page beside the runs has the comparison.

    Args:
        suite: name (see: kernel-attention list suites) or YAML file; FILE/NAME where it holds a family.
        rows: rows to run (default: all).
        columns: columns to run (default: all).
        seeds: seeds to run (default: those of the suite).
        protocol: holdout, paper, thesis-1 or thesis-3 in the place of the suite's; its runs and records have
            folders of their own (default: the suite's).
        workers: processes that share the cells; the cores are divided among them.
        results: folder of the records; the suite has a folder of its own in it.
        runs: folder of the run folders; the suite has a folder of its own in it.
        data_root: folder with data sets (default: $KERNEL_ATTENTION_DATA).
        dry_run: run nothing; say what is missing, and what it will take as far as records tell.
    """

    usage = "reproduce SUITE [options]"
    summary = "run a paper's table and compare"

    suite: Name
    rows: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    protocol: str | None = None
    workers: int = 1
    results: str = "results"
    runs: str = "runs"
    data_root: str | None = None
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class Sweep(Command):
    """Train many points of a recipe and compare them on validation data. The recipe's keys are options too,
    the same for every point. The command can be stopped and given again, and any number of them can work on
    one folder at a time, on this machine and on others.

    Args:
        recipe: name (see: kernel-attention list recipes) or YAML file; FILE/NAME where it holds a family.
        grid: values of a key, such as learning_rate=0.001,0.01 or attention='[softmax, primal]'; may be given
            several times.
        range: range of a key for random and tpe: KEY=LOW,HIGH or KEY=LOW,HIGH,log or KEY=LOW,HIGH,STEP; may
            be given several times.
        space: YAML file with the key space, values and ranges below it.
        sampler: every combination of a grid, random points, or points chosen by TPE.
        points: number of points of random and tpe (default: 20).
        sampler_seed: seed of random and tpe.
        workers: number of processes on this machine.
        output: sweep folder (default: runs/sweep-RECIPE).
        resume: go on with this sweep folder; takes no recipe and none of its keys.
        data_root: folder with data sets (default: $KERNEL_ATTENTION_DATA).
    """

    usage = "sweep RECIPE --grid KEY=VALUES [options] | sweep --resume FOLDER"
    summary = "train many points of a recipe, and report on the best"

    recipe: OptionalName = None
    grid: Annotated[list[str], Repeated("KEY=VALUES")] = field(default_factory=list)
    range: Annotated[list[str], Repeated("KEY=LOW,HIGH")] = field(default_factory=list)
    space: str | None = None
    sampler: Literal["grid", "random", "tpe"] = "grid"
    points: int | None = None
    sampler_seed: int = 0
    workers: int = 1
    output: str | None = None
    resume: str | None = None
    data_root: str | None = None


@dataclass(frozen=True, kw_only=True)
class Export(Command):
    """Write the model of a trained run for another library. For Hugging Face transformers it is a folder that
    its Auto classes and pipelines read, with the tokenizer or the image processor. See docs/hugging-face.md.
    As a program of torch.export or ONNX it is one file that runs without this package. See docs/export.md.

    Args:
        run: run folder of a recipe of task language, tokens, images or time_series; for a program also a
            folder of transformers with a tokenizer, such as ``convert`` writes.
        path: new folder of the model, or new file of the program.
        to: hugging-face, torch or onnx.
        seed: seed of the model (default: the first of the run).
    """

    usage = "export RUN|MODEL PATH [--to hugging-face|torch|onnx]"
    summary = "write a trained model for Hugging Face transformers, torch.export or ONNX"

    run: Name
    path: Name
    to: str = "hugging-face"
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Convert(Command):
    """Replace the attention of a trained model of Hugging Face transformers, and train the new layers to do
    what the old ones did, on texts without labels. After an interruption the same command goes on. See
    docs/converting.md.

    Args:
        model: folder of the model and its tokenizer, or their name for from_pretrained.
        data: file of texts, one a line.
        output: new folder of the converted model, which from_pretrained opens after import
            kernel_attention.hosts.hugging_face.
        attention: the new mechanism, such as '{primal_values: {rank: 32}}' (default: linear with the
            features of hedgehog).
        layers: auto takes those that cost least, as long as the loss is within the tolerance; or all, first,
            last-2, indices or names, several as 0,-1.
        tolerance: of auto, the share of the variance of the model's outputs that may be lost.
        texts: number of lines that are read.
        batch_size: texts that are read together.
        max_length: tokens of a text at most.
        steps: of the training of each layer.
        learning_rate: of it.
        end_to_end: steps of the training of all new layers together.
        time_limit: seconds after which no step begins.
        seed: of new weights and of the order of the texts.
    """

    usage = "convert MODEL --data FILE --output DIR [options]"
    summary = "give a trained Hugging Face model other attention"

    model: Name
    data: str | None = None
    output: str | None = None
    attention: Any = field(default_factory=lambda: {"linear": {"feature_map": "hedgehog"}})
    layers: str = "auto"
    tolerance: float = 0.05
    texts: int = 1024
    batch_size: int = 32
    max_length: int = 256
    steps: int = 200
    learning_rate: float = 4e-3
    end_to_end: int = 0
    time_limit: float | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Compare(Command):
    """Put the figures of several runs into one table, and write a page with every seed and the curves. The
    first run is the one that the others are compared with, over the seeds that both have.

    Args:
        run: two or more run folders of the same headline figure.
        output: the page (default: runs/comparison.html).
        table: also write the table to this .csv or .json file.
    """

    usage = "compare RUN RUN ... [options]"
    summary = "several runs in one table and one page"

    run: Annotated[list[str], POSITIONAL] = field(default_factory=list)
    output: str = "runs/comparison.html"
    table: str | None = None


@dataclass(frozen=True, kw_only=True)
class List(Command):
    """List mechanisms, contenders, data sets, recipes and suites.

    Args:
        what: attention (or mechanisms), contenders, datasets, recipes or suites (default: all).
        format: table, or json for other programs.
        data_root: folder with data sets (default: $KERNEL_ATTENTION_DATA).
    """

    usage = "list [attention|contenders|datasets|recipes|suites] [options]"
    summary = "list mechanisms, contenders, data sets, recipes and suites"

    what: OptionalName = None
    format: Literal["table", "json"] = "table"
    data_root: str | None = None


_ALL = (
    Init, Train, Evaluate, Predict, Explain, Generate, Play, Analyze, Attack, Bench, Record, Reproduce, Sweep,
    Export, Convert, Compare, List,
)  # fmt: skip
COMMANDS: dict[str, type[Command]] = {command.__name__.lower(): command for command in _ALL}
