"""A command whose options are settings, generated from their declaration."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from kvpool.cli.base import set_parameters, write_panels

if TYPE_CHECKING:
    from kvpool.config import Setting

PANELS = ("", "Tiers below memory", "The cluster", "Limits", "The HTTP gateway")
"""In the order of the help."""


class SettingsCommand(TyperCommand):
    """Its function finds the given settings in `ctx.obj`, as text, by name.

    struct: where the settings are declared, MODULE:NAME. The options are created on first use, so that other
    commands do not wait for them.
    """

    struct: str
    _params: list[Any]
    _settings: tuple[str, ...] = ()

    @property
    def params(self) -> list[Any]:
        """One list; the base class appends to it."""
        if not self._settings:
            made = _options(self.struct)
            self._settings = tuple(option.name for option in made)
            self._params.extend(made)
        return self._params

    @params.setter
    def params(self, own: list[Any]) -> None:
        self._params = own

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """A part for each panel."""
        lines = ((each, each.get_help_record(ctx)) for each in self.get_params(ctx))
        write_panels(formatter, "Options", (each for each in lines if each[1] is not None))

    def invoke(self, ctx: Any) -> Any:
        """The function itself, without the settings among its arguments."""
        given = {name: ctx.params.pop(name) for name in self._settings}
        # A setting that was not given is None, or empty if it may be repeated.
        ctx.obj = {name: value for name, value in given.items() if value not in (None, (), [])}
        return super().invoke(ctx)


class ServeCommand(SettingsCommand):
    """`kvpool serve`, with an option for each setting of a daemon."""

    struct = "kvpool.config:DaemonConfig"


class RouterCommand(SettingsCommand):
    """`kvpool router`, with an option for each setting of a router."""

    struct = "kvpool.router.config:RouterConfig"


def _options(struct: str) -> list[Any]:
    """The options that typer would create for a function with a parameter per setting."""
    from kvpool.config import settings_of

    module, _, name = struct.partition(":")
    declared = settings_of(getattr(import_module(module), name))
    found = [each for each in declared.values() if each.option]
    parameters: dict[str, tuple[Any, Any]] = {}
    for each in sorted(found, key=lambda each: PANELS.index(each.panel)):
        option = typer.Option(
            f"{each.option}/--no-{each.option.removeprefix('--')}"
            if each.is_switch
            else each.option,
            help=_help(each),
            metavar=None if each.is_switch else each.metavar,
            rich_help_panel=each.panel or None,
        )
        value: Any = bool if each.is_switch else list[str] if each.is_list else str
        parameters[each.name] = Annotated[value | None, option], None

    def takes_settings() -> None:
        pass

    set_parameters(takes_settings, parameters)
    made = typer.Typer(add_completion=False)
    made.command()(takes_settings)
    return list(typer.main.get_command(made).params)


def _help(setting: Setting) -> str:
    text = f"{setting.help}; may be repeated." if setting.is_list else f"{setting.help}."
    default = setting.shown.replace("`", "")
    return text if default in {"none", "false"} else f"{text} Default: {default}."
