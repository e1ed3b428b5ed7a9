"""Settings: dataclasses that recipes and command-line options fill, with one clear line for a wrong value.

A class of settings is a frozen dataclass. The annotation of a field says which values it accepts, and the
``Args`` of the docstring say what they mean. The settings of trainings, the laboratory's
recipes and the options of its commands are such classes.

The values are checked by pydantic. It compiles a validator from the annotation, bounds included, and gives
the same annotation as a JSON schema, from which the messages and the help texts are worded. So the accepted
values are written once, and no text of another library is parsed. OmegaConf and Hydra bring a file format and
a namespace of their own; jsonargparse and tyro own the parsing of the command line together with its
messages. The classes stay plain dataclasses, so that ``dataclasses.replace`` and ``asdict`` work on them.
"""

import dataclasses
import functools
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Annotated, Any, get_type_hints

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from kernel_attention.errors import InputError, nearest

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Part = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


def _different(values: list[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        raise ValueError("a value is given twice")
    return values


UNIQUE = (AfterValidator(_different), Field(json_schema_extra={"uniqueItems": True}))
"""The metadata of a list of different values, which may be empty."""

DIFFERENT = (*UNIQUE, Field(min_length=1))
"""The metadata of a list of one or more different values."""

_LONGEST = 80  # characters of a value in a message


def field_names(settings: type) -> list[str]:
    """The names of the fields of a class of settings."""
    return [entry.name for entry in dataclasses.fields(settings)]


def check_fields(settings: Any) -> None:
    """Convert every field of an instance to its type; InputError for the first wrong value."""
    for name in field_names(type(settings)):
        object.__setattr__(settings, name, checked(type(settings), name, getattr(settings, name)))


def checked(settings: type, name: str, value: Any, label: str | None = None) -> Any:
    """``value`` in the type of the field ``name``.

    Args:
        settings: a class of settings.
        name: one of its fields.
        value: the value given. NumPy's numbers and tuples become Python's numbers and lists.
        label: name and value in the message, by default ``name=value``.

    Raises:
        InputError: for a value that the field does not accept. The message says which values it accepts.
    """
    value = plain(value)
    try:
        return _validator(settings, name).validate_python(value, strict=True)
    except ValidationError:
        what = label or f"{name}={_shown(value)}"
    schema = field_schema(settings, name)
    near = nearest(value, schema["enum"], count=1) if "enum" in schema else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InputError(f"{what} must be {accepted(schema)}{hint}")


@functools.cache
def field_schema(settings: type, name: str) -> dict[str, Any]:
    """The JSON schema of the accepted values, without None, which stands for no value."""
    schema = _validator(settings, name).json_schema()
    alternatives = [entry for entry in schema.get("anyOf", ()) if entry.get("type") != "null"]
    return alternatives[0] if len(alternatives) == 1 else schema


def accepted(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    kind = schema.get("type", "a value")
    if kind == "array":
        words = _several(schema)
        return f"{words}, such as [0, 1, 2]" if schema["items"].get("type") == "integer" else words
    names = {
        "integer": "a whole number", "number": "a finite number", "boolean": "true or false",
        "string": "a name", "object": "a mapping",
    }  # fmt: skip
    return " ".join([names.get(kind, kind), *_bounds(schema)])


def plain(value: Any) -> Any:
    """NumPy's numbers as Python's, tuples as lists, through lists and mappings."""
    if isinstance(value, bool):  # Python counts them among the integers
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return value


def _several(schema: Mapping[str, Any]) -> str:
    words = ["one or more"] if schema.get("minItems") else []
    words += ["different"] if schema.get("uniqueItems") else []
    kinds = {"integer": "whole numbers", "object": "mappings"}
    words += [kinds.get(schema["items"].get("type", ""), "names")]
    if "enum" in schema["items"]:
        words += ["out of", ", ".join(schema["items"]["enum"])]
    return " ".join([*words, *_bounds(schema["items"])])


def _bounds(schema: Mapping[str, Any]) -> list[str]:
    if "minimum" in schema and "maximum" in schema:
        return [f"between {schema['minimum']:g} and {schema['maximum']}"]
    words = [f"of at least {schema['minimum']:g}"] if "minimum" in schema else []
    words += [f"above {schema['exclusiveMinimum']:g}"] if "exclusiveMinimum" in schema else []
    words += [f"below {schema['exclusiveMaximum']:g}"] if "exclusiveMaximum" in schema else []
    return [" and ".join(words)] if words else []


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


@functools.cache
def _hints(settings: type) -> dict[str, Any]:
    return get_type_hints(settings, include_extras=True)


@functools.cache
def _validator(settings: type, name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_hints(settings)[name])
