"""How a setting is declared: once, as the annotation of a field of a msgspec struct.

The declaration yields the check of each value, from whatever source, the command line option with its
help, and the tables in the documents.

    memory: Annotated[Size, setting("DRAM of the default tenant. Allocated at the start.")] = 0.25

A *kind* (`kind`) describes the valid values and the error text for others; a *setting* (`setting`) its purpose.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from kvpool.errors import ConfigError

Parse = Callable[[object, str], object]
"""Converts a value as given, with the name of its source, for the type's check. Raises `ConfigError`."""


class Setting(NamedTuple):
    """The declaration of one setting.

    type: with its bounds, as `msgspec.convert` takes it. wanted: error text for invalid values. description: in
    Markdown; its first sentence is the help of the option. default: of the field; shown: as people write it.
    option: of the command line; empty: there is none. panel: of options in the help. secret: never shown.
    file_only: not available in the environment or on the command line.
    """

    name: str
    type: Any
    parse: Parse | None
    wanted: str
    description: str
    default: object
    shown: str
    option: str
    metavar: str
    panel: str
    secret: bool
    file_only: bool

    @property
    def is_switch(self) -> bool:
        return plain_type(self.type) is bool

    @property
    def is_list(self) -> bool:
        """Whether its option may be repeated."""
        return get_origin(plain_type(self.type)) in (tuple, Mapping)

    @property
    def help(self) -> str:
        """The first sentence of the description, without Markdown."""
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", self.description).replace("`", "")
        return text.split(". ")[0].removesuffix(".")

    def convert(self, value: object, where: str) -> Any:
        """The setting's value for a given input. where: names the source in messages. Raises `ConfigError`."""
        given = value
        if self.parse is not None:
            value = self.parse(value, where)
        elif isinstance(value, str) and plain_type(self.type) is float:
            value = _number(value)  # msgspec rejects ".5"
        try:
            return msgspec.convert(value, self.type, strict=False)
        except msgspec.ValidationError as error:
            if not self.wanted:  # a table, or several
                raise ConfigError(f"{where}{_in_words(str(error), self.type)}") from None
            shown = "" if self.secret else f" = {given!r}"
            raise ConfigError(f"{where}{shown}: {self.wanted}") from None


def kind(
    wanted: str = "", *, metavar: str = "", parse: Parse | None = None, **bounds: Any
) -> msgspec.Meta:
    """A kind of values. bounds: `msgspec.Meta`'s. wanted: default: derived from type and bounds."""
    return msgspec.Meta(extra={"wanted": wanted, "metavar": metavar, "parse": parse}, **bounds)


def setting(
    description: str,
    *,
    option: str | None = None,
    panel: str = "",
    default: str = "",
    secret: bool = False,
    file_only: bool = False,
    **bounds: Any,
) -> msgspec.Meta:
    """The purpose of a setting. option: default: its name; a secret has none. default: shown in place of the
    value. file_only: not available in the environment or on the command line.
    """
    extra = {
        "option": option,
        "panel": panel,
        "default": default,
        "secret": secret,
        "file_only": file_only,
    }
    return msgspec.Meta(description=description, extra=extra, **bounds)


def convert_setting(struct: type[msgspec.Struct], name: str, value: object, where: str) -> Any:
    """The value of one of this struct's settings for a given input. Raises `ConfigError`, for unknown names too."""
    known = settings_of(struct)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        meant = f"Did you mean {near[0]}?" if near else f"Known settings: {', '.join(known)}"
        raise ConfigError(f"{where}: no such setting. {meant}")
    return known[name].convert(value, where)


@cache
def settings_of(struct: type[msgspec.Struct]) -> Mapping[str, Setting]:
    """All settings of a struct, by name. A field without a `setting` is a constant, which tests may change."""
    hints = get_type_hints(struct, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        metas = [
            item for item in getattr(hint, "__metadata__", ()) if isinstance(item, msgspec.Meta)
        ]
        description = next((meta.description for meta in metas if meta.description), "")
        if not description:
            continue
        extra: dict[str, Any] = {}
        for meta in metas:
            extra |= {key: value for key, value in (meta.extra or {}).items() if value}
        default = field.default if field.default is not msgspec.NODEFAULT else None
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        secret = bool(extra.get("secret"))
        file_only = bool(extra.get("file_only"))
        option = f"--{field.name.replace('_', '-')}" if not (secret or file_only) else ""
        found[field.name] = Setting(
            name=field.name,
            type=hint,
            parse=extra.get("parse"),
            wanted=extra.get("wanted") or _wanted(plain_type(hint), metas),
            description=description,
            default=default,
            shown=extra.get("default") or _shown(default),
            option=extra.get("option", option),
            metavar=extra.get("metavar") or _metavar(plain_type(hint)),
            panel=extra.get("panel", ""),
            secret=secret,
            file_only=file_only,
        )
    return found


_PLACE = re.compile(r" - at `\$((?:\[[^\]]*\])*)\.?([^`]*)`$")


def _in_words(error: str, hint: Any) -> str:
    """msgspec's error of a table in a setting, without its notation for the place: `.role: ...`, with what is valid."""
    found = _PLACE.search(error)
    if found is None:
        return f": {error}"
    number = re.match(r"\[(\d+)\]", found[1])
    which = f" number {int(number[1]) + 1}" if number and number[1] != "0" else ""
    field = found[2]
    kind: Any = plain_type(hint)
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    valid = _literals(get_type_hints(kind).get(field)) if field and isinstance(kind, type) else ()
    wanted = f"; one of {', '.join(valid)}" if valid else ""
    place = f", {field}" if field else ""
    return f"{which}{place}: {error[: found.start()]}{wanted}"


def _literals(hint: Any) -> tuple[str, ...]:
    """The texts that a type allows, if it is a choice."""
    if get_origin(hint) is Literal:
        return tuple(str(each) for each in get_args(hint))
    return tuple(text for each in get_args(hint) for text in _literals(each))


def plain_type(hint: Any) -> Any:
    """The type without its annotations."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _wanted(plain: Any, metas: list[msgspec.Meta]) -> str:
    if plain is bool:
        return "true or false"
    if get_origin(plain) is Literal:
        return f"one of {', '.join(get_args(plain))}"
    bounds = {
        name: bound
        for meta in metas
        for name in ("ge", "le")
        if (bound := getattr(meta, name)) is not None
    }
    if plain is int and bounds:
        return f"a whole number from {bounds['ge']} to {bounds['le']}"
    return "a text" if plain is str else ""


def _metavar(plain: Any) -> str:
    if get_origin(plain) is Literal:
        return "|".join(get_args(plain))
    return {int: "N", float: "NUMBER"}.get(plain, "TEXT")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value or value == 0 else "none"


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text
