"""Shared by all commands: the app, options, exit statuses, and the connection to this node's daemon."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer
from typer.core import TyperGroup

from kvpool import __version__
from kvpool.errors import (
    ClusterUnavailable,
    ConfigError,
    InvalidRequest,
    KvpoolError,
    NotAuthenticated,
    Unavailable,
)
from kvpool.extras import install
from kvpool.plain_text import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvpool.client import OperatorClient
    from kvpool.client.gateway import Operator

OPERATORS = "For operators"

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3
EXIT_NOT_ALLOWED = 4
EXIT_INTERRUPTED = 130
EXIT_STATUSES = {
    0: "success",
    EXIT_ERROR: "the command failed, or found a problem; the last line names it",
    EXIT_USAGE: "invalid command line: an option or argument is unknown or missing, such as --yes in a script",
    EXIT_NO_DAEMON: "no daemon answers on this machine, or no gateway at the URL in KVPOOL_GATEWAY",
    EXIT_NOT_ALLOWED: "the daemon, the gateway or the router refused access; its socket is another user's, or its "
    "certificate is not trusted",
    129: "ended by SIGHUP, when its terminal was closed",
    EXIT_INTERRUPTED: "interrupted with Ctrl-C",
    143: "ended by SIGTERM",
}


class Failed(KvpoolError):
    """The command did not do all that it was asked for, or found a problem. The exit status is 1."""


def write_panels(formatter: Any, usual: str, lines: Iterable[tuple[Any, Any]]) -> None:
    """Write the lines of a help's options or commands by panel, in the order of their first one."""
    found: dict[str, list[Any]] = {}
    for each, line in lines:
        panel = getattr(each, "rich_help_panel", None)
        found.setdefault(panel if isinstance(panel, str) and panel else usual, []).append(line)
    for panel, some in found.items():
        with formatter.section(panel):
            formatter.write_dl(some)


class Commands(TyperGroup):
    """Its help has a part for each panel. In plain lines: tables cut off what does not fit 80 columns."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        lines = [
            (command, (name, command.get_short_help_str(200)))
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None and not command.hidden
        ]
        write_panels(formatter, "Commands", lines)


class CommandsWithUsual(Commands):
    """One of its commands, `usual`, may be left out."""

    usual: ClassVar[str]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.commands, *ctx.help_option_names}:
            args = [self.usual, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="kvpool",
    cls=Commands,
    rich_markup_mode=None,
    help="A cluster-wide KV cache pool for LLM serving.",
    epilog="Exit status: "
    + "; ".join(
        f"{status} {meaning.partition(';')[0]}" for status, meaning in EXIT_STATUSES.items()
    )
    + ".",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def option(text: str, *names: str, **more: Any) -> Any:
    """An option of a command: its help, and its names where they do not follow from the parameter's."""
    return typer.Option(*names, help=text, **more)


def argument(text: str, **more: Any) -> Any:
    """An argument of a command, with its help."""
    return typer.Argument(help=text, **more)


def group(
    name: str,
    text: str,
    *,
    parent: typer.Typer | None = None,
    kind: type[TyperGroup] = Commands,
    panel: str | None = OPERATORS,
) -> typer.Typer:
    """A command that has commands, with its help."""
    made = typer.Typer(cls=kind, help=text, no_args_is_help=True)
    (parent or app).add_typer(made, name=name, rich_help_panel=panel)
    return made


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Around imports of what comes with an extra. Raises `ConfigError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what} needs {error.name}: {install(extra)}") from None


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, option("Print the version.", "--version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    del version  # printed by its callback


def gateway(socket: str | None) -> str:
    """The URL of the gateway that this command asks, from KVPOOL_GATEWAY; empty: this machine's daemon."""
    return "" if socket else os.environ.get("KVPOOL_GATEWAY", "")


def only_here(command: str, socket: str | None) -> None:
    """Before what reads or changes blocks of this machine's daemon: raises `InvalidRequest` for a gateway."""
    if gateway(socket):
        raise InvalidRequest(
            f"{command} works with this machine's daemon only, and KVPOOL_GATEWAY is set: unset it, or say --socket"
        )


TIMEOUT_S = 10.0  # for each request to the local daemon

# Passwords and tokens are not options: every user of a machine sees the arguments of its processes.
Socket = Annotated[str | None, option("Path of the control socket.", metavar="PATH")]
Tenant = Annotated[str, option("The tenant; its token is read from KVPOOL_TOKEN.")]
AsJson = Annotated[bool, option("Print everything as JSON.", "--json")]
AnyNode = Annotated[
    str, option("Ask this node of the cluster instead of the local one.", metavar="NAME")
]
OnNodes = Annotated[
    list[str] | None,
    option("On this node; may be repeated. Default: all nodes.", "--node", metavar="NAME"),
]
OnSomeNodes = Annotated[
    list[str] | None,
    option("On this node; may be repeated. Default: the local one.", "--node", metavar="NAME"),
]
OfNamespace = Annotated[
    str | None, option("Only in this namespace: its first hex digits.", metavar="DIGEST")
]
DryRun = Annotated[bool, option("Only count; change nothing.", "--dry-run")]
RouterUrl = Annotated[str, option("The router's URL.", envvar="KVPOOL_ROUTER", metavar="URL")]
ROUTER = "http://127.0.0.1:8080"
Yes = Annotated[
    bool,
    option("Do not ask for confirmation. Needed where there is no terminal to ask.", "--yes", "-y"),
]
Digest = Annotated[str, argument("A namespace: its first hex digits, 4 or more.", metavar="DIGEST")]
BlockKeys = Annotated[
    list[str] | None, argument("Block keys in prefix order, 32 hex digits each.", metavar="KEY...")
]
KeysFile = Annotated[
    Path | None,
    option("A file of block keys, one per line; - reads standard input.", metavar="FILE"),
]


def client_of(socket: str | None, tenant: str) -> Operator:
    """A client of the gateway in KVPOOL_GATEWAY, or else of this node's daemon. Credentials are in the environment."""
    if url := gateway(socket):
        from kvpool.client.gateway import GatewayClient

        if sys.stderr.isatty():
            complain(f"at {url}")
        return GatewayClient(url, tenant, os.environ)
    return daemon_client(socket, tenant)


def daemon_client(socket: str | None, tenant: str) -> OperatorClient:
    """A client of this node's daemon."""
    from kvpool.client import OperatorClient
    from kvpool.config import default_socket_path, secret_of

    socket = socket or default_socket_path()
    try:
        return OperatorClient(
            socket,
            tenant=tenant,
            token=secret_of("KVPOOL_TOKEN"),
            operator_token=secret_of("KVPOOL_OPERATOR_TOKEN") or "",
            timeout_s=TIMEOUT_S,
            connect=True,
        )
    except Unavailable:
        if os.path.exists(socket) and not os.access(socket, os.W_OK):
            raise NotAuthenticated(_not_ours(socket)) from None
        from kvpool.cli.render.starting import waiting

        if said := waiting(socket):
            raise Unavailable(f"{said}; `kvpool doctor` tells more") from None
        raise


def _not_ours(socket: str) -> str:
    import pwd

    uid = os.stat(socket).st_uid
    try:
        owner = pwd.getpwuid(uid).pw_name
    except KeyError:
        owner = f"uid {uid}"
    return (
        f"permission denied: the daemon at {socket} is {owner}'s. Ask to be in its group, with socket_mode 660 there; "
        f"or name your own daemon's socket (--socket, KVPOOL_SOCKET)"
    )


def node_names(client: Operator) -> dict[str, str]:
    """Names of the nodes by incarnation; operators only."""
    try:
        found = client.cluster()["nodes"]
    except NotAuthenticated:
        return {}
    return {record["incarnation"]: record["node"] for record in found}


def named_nodes(client: Operator, node: list[str] | None) -> list[str]:
    """The nodes given by the option, or all nodes of the cluster."""
    from kvpool.cli.asking import nodes_of

    return list(dict.fromkeys(node)) if node else nodes_of(client.cluster())


class Session:
    """The server that a command asks, the tenant that it asks for, and the form of its output. See `asks`."""

    def __init__(self, socket: str | None, tenant: str, *, as_json: bool) -> None:
        self.socket = socket
        self.tenant = tenant
        self.as_json = as_json
        self._open = ExitStack()

    @cached_property
    def client(self) -> Operator:
        """Connected on first use, and closed with the session."""
        client = client_of(self.socket, self.tenant)
        self._open.enter_context(client)
        return client

    def close(self) -> None:
        self._open.close()

    def resolve(self, text: str) -> bytes:
        """The digest of this tenant's namespace whose hex form begins with a text. Raises `InvalidRequest`."""
        from kvpool.cli.naming import full_digest, known_digests

        client = self.client
        return full_digest(text, known_digests(client.cluster(), client.stats(), self.tenant))

    def show(self, value: Any, shown: str | Iterable[RenderableType]) -> None:
        """Print a value as JSON where that is asked for, and otherwise as it is shown to people."""
        show(value, shown, as_json=self.as_json)


def set_parameters(function: Callable[..., Any], parameters: Mapping[str, tuple[Any, Any]]) -> None:
    """Make typer see these parameters, by name a type and a default, instead of those in the function's code."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    found = [
        inspect.Parameter(name, keyword, default=default, annotation=hint)
        for name, (hint, default) in parameters.items()
    ]
    setattr(function, "__signature__", inspect.Signature(found))  # noqa: B010
    function.__annotations__ = {name: hint for name, (hint, _) in parameters.items()}


def asks(
    group: typer.Typer = app, name: str | None = None, *, panel: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command that asks a daemon or a gateway, with the options --socket, --tenant and --json.

    Its argument `at` is the `Session` that these make.
    """

    def register(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        hints |= {"socket": Socket, "tenant": Tenant, "as_json": AsJson}
        own = inspect.signature(command).parameters.values()
        defaults = {each.name: each.default for each in own if each.name != "at"}
        defaults |= {"socket": None, "tenant": "default", "as_json": False}

        @wraps(command)
        def run(*, socket: str | None, tenant: str, as_json: bool, **given: Any) -> None:
            with closing(Session(socket, tenant, as_json=as_json)) as session:
                command(at=session, **given)

        set_parameters(run, {each: (hints[each], default) for each, default in defaults.items()})
        return group.command(name, rich_help_panel=panel)(run)

    return register


@contextmanager
def in_doubt(command: str) -> Iterator[None]:
    """A requested change that was not confirmed may have been made, or may still be made."""
    try:
        yield
    except (Unavailable, ClusterUnavailable) as error:
        raise type(error)(
            f"{error}. The command may still have taken effect: `kvpool {command}` shows "
            f"it; repeating it is safe"
        ) from None


def show(value: Any, shown: str | Iterable[RenderableType], *, as_json: bool) -> None:
    """Print a value as JSON, or what is shown of it to people: a line, or tables and texts."""
    if as_json:
        print_json(value)
    elif isinstance(shown, str):
        print(shown)
    else:
        from kvpool.cli.render.text import print_parts

        print_parts(shown)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    import json

    import msgspec

    print(json.dumps(msgspec.to_builtins(value), indent=2))


def exit_status(error: KvpoolError) -> int:
    """The exit status of a command that raised this error."""
    match error:
        case NotAuthenticated():
            return EXIT_NOT_ALLOWED
        case Unavailable():
            return EXIT_NO_DAEMON
        case _:
            return EXIT_ERROR


@contextmanager
def in_foreground() -> Iterator[None]:
    """Around calls to another service, so that its failures are not reported as the local daemon's."""
    try:
        yield
    except KvpoolError as error:
        raise Failed(str(error)) from None


def confirm(question: str, socket: str | None, *, yes: bool) -> None:
    """Ask before blocks go that nobody has named one by one. Without a terminal only `yes` is one.

    The question names the gateway, if there is one. Raises `typer.Exit` or `Failed`: nothing was changed.
    """
    if yes:
        return
    if url := gateway(socket):
        question = f"At {url}: {question}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        complain(
            f"{question} There is no terminal to ask: repeat with --yes, or see with --dry-run"
        )
        raise typer.Exit(EXIT_USAGE)
    if not typer.confirm(question, err=True):
        raise Failed("nothing was changed")


def complain_of(reasons: Mapping[str, str], *, fatal: bool = True) -> None:
    """Print a line on stderr for each node or name, with its reason. If there are any, `fatal` ends the command."""
    for name, reason in reasons.items():
        complain(f"{name}: {reason}")
    if reasons and fatal:
        raise typer.Exit(EXIT_ERROR)


def complain(text: str) -> None:
    """Print a line for the user on stderr."""
    print(f"kvpool: {plain(text)}", file=sys.stderr)
