"""Parse the command line into the options of a command, with errors of one line.

The options are the fields of the classes in ``kernel_attention_lab.options``; ``train`` and
``sweep`` take the keys of the recipe's class too. argparse splits the words and writes the help. Values are
read and checked as those of a recipe are (``kernel_attention.fields``).
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, get_type_hints

from kernel_attention.errors import InputError, nearest, unknown
from kernel_attention.version import __version__
from kernel_attention_lab.options import COMMANDS, POSITIONAL, Command, Repeated
from kernel_attention_lab.plugins import load_plugins

if TYPE_CHECKING:
    from kernel_attention_lab.tasks.recipe import BaseRecipe

_INTEGERS = re.compile(r"-?\d+(,-?\d+)*,?")
_DESCRIPTION = "The kernel-machine view of self-attention as software: layers, functions, solvers, recipes."

_OPTION = re.compile(r"--?[^\W\d]")
_WITH_RESUME = ("resume", "data_root", "progress", "plugin", "workers")
_WITH_KEYS = ("train", "sweep")  # the commands whose options are also the recipe's keys


class Typed(NamedTuple):
    """A command, its options, and the recipe's keys among them, which ``train`` and ``sweep`` take."""

    command: str
    options: Any
    keys: dict[str, Any]


def parse(arguments: list[str]) -> Typed:
    """The command and its options.

    Raises:
        InputError: for an unknown command or option, and for a value that is not of the option's type.
        SystemExit: after ``--help`` or ``--version``.
    """
    first = 0  # --plugin may come before the command too
    while first < len(arguments) and arguments[first].partition("=")[0] == "--plugin":
        first += 1 if "=" in arguments[first] else 2
    plugins, words = arguments[:first], arguments[first:]
    command = words[0] if words else ""
    if command.startswith("-"):
        _main_parser().parse_args(words)
    if not command or command.startswith("-"):
        raise InputError(f"no command given (accepted: {', '.join(COMMANDS)}; see: kernel-attention --help)")
    if command not in COMMANDS:
        raise unknown("command", command, COMMANDS)
    recipe = None
    if command in _WITH_KEYS:
        load_plugins(_plugins(arguments))  # one may bring the recipe's task
        recipe = _recipe_class(words)
    return _Line(command, COMMANDS[command], recipe).read([*plugins, *words[1:]])


class _Line:
    """The words after a command, and the classes of settings whose fields they fill."""

    def __init__(self, command: str, options: type[Command], recipe: type[BaseRecipe] | None) -> None:
        self.command = command
        self.options = options
        self.see = f"see: kernel-attention {command} --help"
        self.owners: dict[str, type] = {entry.name: options for entry in dataclasses.fields(options)}
        if recipe is not None:
            # The recipe's key `plugins` is the option --plugin.
            keys = [entry.name for entry in dataclasses.fields(recipe) if entry.name != "plugins"]
            self.owners |= dict.fromkeys(keys, recipe)

    def read(self, words: list[str]) -> Typed:
        """The options in the words."""
        end = words.index("--") if "--" in words else len(words)
        typed = {_with_underscores(word): word for word in words[:end]}
        words, after = [_with_underscores(word) for word in words[:end]], words[end + 1 :]
        if {"-h", "--help"} & set(words):
            self.parser(for_help=True).print_help()
            raise SystemExit(0)
        found, rest = self.parser().parse_known_args(_join_numbers(words, self.takers_of_numbers()))
        strange = [typed[word].partition("=")[0] for word in rest if _OPTION.match(word)]
        if hasattr(found, "resume"):
            refused = [f"--{name}" for name in vars(found) if name not in _WITH_RESUME] + strange
            if refused:
                raise InputError(
                    f"--resume continues as the folder says, and cannot take {', '.join(refused)}"
                )
        if strange:
            raise self.unknown_option(strange[0])
        texts = vars(found) | self.positionals([*rest, *after])
        values = {name: self.value(name, text) for name, text in texts.items()}
        own = {name: value for name, value in values.items() if self.owners[name] is self.options}
        keys = {name: value for name, value in values.items() if name not in own}
        return Typed(self.command, self.options(**own), keys)

    def value(self, name: str, text: str | list[str]) -> Any:
        """The value of a field, converted to its type."""
        from kernel_attention.fields import checked, field_schema
        from kernel_attention_lab.plain_yaml import parse_yaml

        owner, label = self.owners[name], name if self.is_positional(name) else f"--{name}"
        if isinstance(text, str):
            return from_text(owner, name, text, f"{label} {text!r}")
        is_words = field_schema(owner, name)["items"].get("type") == "string"
        entries = text if is_words else [parse_yaml(entry, f"{label} {entry!r}") for entry in text]
        return checked(owner, name, entries, f"{label} {' '.join(map(repr, text))}")

    def parser(self, for_help: bool = False) -> argparse.ArgumentParser:
        """The parser of the options.

        Positional fields appear in the help text alone, because argparse would assign the words before it has
        seen all options.
        """
        parser = _Parser(
            usage=f"kernel-attention {self.options.usage}",
            description=" ".join((self.options.__doc__ or "").partition("Args:")[0].split()),
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            add_help=for_help,
        )
        parser.see = self.see
        helps = {owner: field_helps(owner) for owner in set(self.owners.values())}
        for name, owner in self.owners.items():
            text = helps[owner].get(name, "").rstrip(".").replace("``", "")
            text = f"{text}{'' if '(default' in text else _default_text(owner, name)}".replace("%", "%%")
            if not self.is_positional(name):
                parser.add_argument(f"--{name}", help=text, **_form(owner, name))
            elif for_help:
                parser.add_argument(name, help=text)
        return parser

    def is_positional(self, name: str) -> bool:
        """Return whether the field's value is given without its name."""
        return POSITIONAL in _metadata(self.owners[name], name)

    def positionals(self, words: list[str]) -> dict[str, Any]:
        """The positional words, by the field they fill."""
        from kernel_attention.fields import field_schema

        texts: dict[str, Any] = {}
        missing = []
        for entry in dataclasses.fields(self.options):
            if not self.is_positional(entry.name):
                continue
            if words and field_schema(self.owners[entry.name], entry.name).get("type") == "array":
                texts[entry.name], words = words, []
            elif words:
                texts[entry.name], *words = words
            elif entry.default is entry.default_factory is dataclasses.MISSING:
                missing.append(entry.name)
        if words:
            raise InputError(f"unrecognized arguments: {' '.join(words)} ({self.see})")
        if missing:
            raise InputError(f"the following arguments are required: {', '.join(missing)} ({self.see})")
        return texts

    def takers_of_numbers(self) -> set[str]:
        """The options that take several whole numbers."""
        from kernel_attention.fields import field_schema

        schemas = {f"--{name}": field_schema(owner, name) for name, owner in self.owners.items()}
        return {name for name, schema in schemas.items() if schema.get("items", {}).get("type") == "integer"}

    def unknown_option(self, given: str) -> InputError:
        """The error for an option that the command does not have."""
        options = [f"--{name}" for name in self.owners if not self.is_positional(name)]
        near = nearest(given, options, count=2, cutoff=0.7)
        hint = f"; did you mean {' or '.join(near)}?" if near else self.hint_of_mechanisms(given)
        return InputError(f"{self.command} has no option {given}{hint} ({self.see})")

    def hint_of_mechanisms(self, given: str) -> str:
        """Where an option of mechanisms is written; empty where none has it."""
        if "attention" not in self.owners:
            return ""
        from kernel_attention.mechanisms import list_attention

        option = given.lstrip("-").partition("=")[0]
        names = [mechanism.name for mechanism in list_attention() if option in mechanism.options]
        if not names:
            return ""
        name = "primal" if "primal" in names else names[0]
        return f"; it is an option of {', '.join(names)}: --attention '{{{name}: {{{option}: ...}}}}'"


class _Parser(argparse.ArgumentParser):
    """argparse's parser with errors that this library prints."""

    see = "see: kernel-attention --help"

    def error(self, message: str) -> NoReturn:
        """Raise InputError where argparse would print a message and exit."""
        raise InputError(f"{message} ({self.see})")


def _main_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kernel-attention", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"kernel-attention {__version__}")
    plugin = "a module that registers mechanisms, imported first; may be given several times"
    parser.add_argument("--plugin", metavar="MODULE", action="append", help=plugin)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, options in COMMANDS.items():
        commands.add_parser(name, help=options.summary)
    return parser


def _plugins(words: list[str]) -> list[str]:
    """The modules after ``--plugin``."""
    alone = [word for before, word in pairwise(words) if before == "--plugin"]
    return alone + [word.partition("=")[2] for word in words if word.startswith("--plugin=")]


def _recipe_class(words: list[str]) -> type[BaseRecipe]:
    """The class of the recipe given to ``train`` or ``sweep``; the recipe's keys are options."""
    from kernel_attention_lab.runs.recipe_files import is_recipe, read_recipe
    from kernel_attention_lab.tasks.recipe import DEFAULT_TASK
    from kernel_attention_lab.tasks.registry import settings_class

    names = []
    for before, word in pairwise(words):
        is_value = before.startswith("--") and before != "--" and "=" not in before
        if is_value or word.startswith("-") or _INTEGERS.fullmatch(word):
            continue
        names.append(word)
        if is_recipe(word):
            break
    return settings_class(read_recipe(names[-1])[1].get("task", DEFAULT_TASK) if names else DEFAULT_TASK)


def _with_underscores(word: str) -> str:
    """Write ``--data-root`` as ``--data_root``."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _join_numbers(words: list[str], takers: Collection[str]) -> list[str]:
    """Write ``--seeds 0 1 2``, ``--seeds 0,1,2`` and ``--seeds=0,1,2`` as ``--seeds=[0,1,2]``."""
    joined: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        name, _, inline = word.partition("=")
        values = [inline] if inline else []
        if name in takers and (not inline or _INTEGERS.fullmatch(inline)):
            while index < len(words) and _INTEGERS.fullmatch(words[index]):
                values.append(words[index])
                index += 1
            word = f"{name}=[{','.join(value.strip(',') for value in values)}]" if values else word
        joined.append(word)
    return joined


def _form(settings: type, name: str) -> dict[str, Any]:
    """The number of words that the option takes, and their name in the help."""
    from kernel_attention.fields import field_schema

    for entry in _metadata(settings, name):
        if isinstance(entry, Repeated):
            return {"action": "append", "metavar": entry.metavar}
    schema = field_schema(settings, name)
    words = {"integer": "INT", "number": "FLOAT", "string": "TEXT"}
    if "enum" in schema:
        return {"metavar": f"{{{','.join(schema['enum'])}}}"}
    if schema.get("type") == "boolean":  # the option alone means true
        return {"nargs": "?", "const": "true", "metavar": "{true,false}"}
    if schema.get("type") != "array":
        return {"metavar": words.get(schema.get("type", ""), "SPEC")}
    if schema["items"]["type"] == "string":
        return {"nargs": "+", "metavar": "TEXT"}
    return {"metavar": "INT,INT,..." if schema["items"]["type"] == "integer" else "SPEC"}


def _default_text(settings: type, name: str) -> str:
    entry = next(entry for entry in dataclasses.fields(settings) if entry.name == name)
    value = entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
    if value is dataclasses.MISSING or value is None or value == []:
        return ""
    return f" (default: {str(value).lower() if isinstance(value, bool) else value})"


def from_text(settings: type, name: str, text: str, label: str) -> Any:
    """The value of the field ``name`` from the text of an option: a string unchanged, all else as YAML."""
    from kernel_attention.fields import checked, field_schema
    from kernel_attention_lab.plain_yaml import parse_yaml

    value = text if field_schema(settings, name).get("type") == "string" else parse_yaml(text, label)
    return checked(settings, name, value, label)


def _metadata(settings: type, name: str) -> tuple[Any, ...]:
    """The metadata in the ``Annotated`` of the field."""
    return getattr(get_type_hints(settings, include_extras=True)[name], "__metadata__", ())


def field_helps(settings: type) -> dict[str, str]:
    """The meaning of every field, from the ``Args`` of the class and of its bases."""
    helps: dict[str, str] = {}
    for base in reversed(settings.__mro__):
        helps |= _documented(base.__doc__ or "")
    return helps


def _documented(docstring: str) -> dict[str, str]:
    """{name: text} of the section ``Args`` of a docstring."""
    lines = iter(docstring.splitlines())
    helps: dict[str, str] = {}
    name, indent = "", 0
    for line in lines:
        if line.strip() == "Args:":
            break
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            break
        indent = indent or depth
        if depth == indent:
            name, _, text = line.strip().partition(": ")
            helps[name] = text
        else:
            helps[name] += f" {line.strip()}"
    return helps
