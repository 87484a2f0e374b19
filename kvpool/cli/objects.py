"""`kvpool put`, `get`, `ls` and `rm`: objects by name, the same that programs of `mooncake.store` put and read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvpool.cli import base
from kvpool.cli.base import Session, argument, asks, option
from kvpool.errors import InvalidRequest

if TYPE_CHECKING:
    from kvpool.client import OperatorClient
    from kvpool.engine_plugins.mooncake.objects import Objects

OBJECTS = "Objects by name"
STDIO = "-"

ObjectName = Annotated[str, argument("The name of an object.", metavar="NAME")]
TenantId = Annotated[
    str,
    option(
        "The tenant_id that a program gave to mooncake.store: it divides a tenant's names.",
        metavar="ID",
    ),
]


@asks(panel=OBJECTS)
def put(
    at: Session,
    name: ObjectName,
    file: Annotated[str, argument("A file; - reads standard input.", metavar="FILE|-")] = STDIO,
    tenant_id: TenantId = "default",
) -> None:
    """Store a file as an object, in place of one of the same name. Exit status 1 if it is not stored.

    It has 1 GiB at most, and is evicted like any block when memory is needed.

    Example: kvpool put greeting hello.txt
    """
    from kvpool.cli.render.objects import check_name, check_stored, read_source
    from kvpool.cli.render.text import size_text

    key = check_name(name)
    data = read_source(None if file == STDIO else Path(file))
    with _objects(at, "put", tenant_id) as (_, objects):
        check_stored(objects, key, data)
    told = {"name": name, "bytes": len(data)}
    at.show(told, f"stored {name}, {size_text(len(data))}")


@asks(panel=OBJECTS)
def get(
    at: Session,
    name: ObjectName,
    file: Annotated[
        str | None,
        argument(
            "Where to write it; - or nothing: standard output. On a terminal nothing prints only its size.",
            metavar="FILE|-",
        ),
    ] = None,
    tenant_id: TenantId = "default",
) -> None:
    """Read an object, from whichever node has it. Exit status 1 if it is not there.

    Its bytes are compared with the checksum of what was put. A file is written whole or not at all.

    Example: kvpool get greeting > copy.txt
    """
    from kvpool.cli.render.objects import check_name, read_object, size_of, write_whole
    from kvpool.cli.render.text import size_text

    key = check_name(name)
    if at.as_json and file == STDIO:
        raise InvalidRequest("--json and the bytes would both go to standard output: name a file")
    with _objects(at, "get", tenant_id) as (_, objects):
        only_size = file is None and (at.as_json or sys.stdout.isatty())
        data = b"" if only_size else read_object(objects, key)
        nbytes = size_of(objects, key) if only_size else len(data)
    if only_size:
        text = f"{name} has {size_text(nbytes)}; `kvpool get NAME -` prints them"
    elif file is None or file == STDIO:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    else:
        write_whole(Path(file), data)
        text = f"wrote {size_text(nbytes)} to {file}"
    at.show({"name": name, "bytes": nbytes, "file": file}, text)


@asks(panel=OBJECTS)
def ls(
    at: Session,
    prefix: Annotated[str, argument("Only names that begin with this.", metavar="PREFIX")] = "",
    tier: Annotated[
        str, option("The tier: dram or ssd. Of blocks on ssd, names are read there.")
    ] = "dram",
    limit: Annotated[int, option("The most names to list.", min=1, max=10_000)] = 100,
    tenant_id: TenantId = "default",
) -> None:
    """List the objects whose blocks are on this node, in no order. For operators: other programs know their names.

    Example: kvpool ls --limit 20
    """
    from kvpool.cli.render.objects import list_objects, objects_view

    if tier not in ("dram", "ssd"):
        raise InvalidRequest(f"--tier {tier!r:.40}: must be dram or ssd")
    with _objects(at, "ls", tenant_id, verify=False) as (client, objects):
        found, more = list_objects(client, objects, tier, prefix, limit)
    shown = objects_view(found, prefix=prefix, tier=tier, more=more)
    at.show({"items": found, "more": more}, shown)


@asks(panel=OBJECTS)
def rm(
    at: Session,
    names: Annotated[list[str], argument("Names of objects.", metavar="NAME...")],
    tenant_id: TenantId = "default",
) -> None:
    """Remove objects from all nodes. Exit status 1 if one was not there, or a node did not answer.

    Example: kvpool rm greeting
    """
    from kvpool.cli.render.objects import check_name, remove

    keys = [check_name(name) for name in names]
    with _objects(at, "rm", tenant_id) as (_, objects):
        refused = remove(objects, keys)
    failures = {names[at]: reason for at, reason in refused.items()}
    gone = [name for name in names if name not in failures]
    if at.as_json or gone:
        removed = "\n".join(f"removed {name}" for name in gone)
        at.show({"removed": gone, "failed": failures}, removed)
    base.complain_of(failures)


@contextmanager
def _objects(
    at: Session, command: str, tenant_id: str, *, verify: bool = True
) -> Iterator[tuple[OperatorClient, Objects]]:
    from kvpool.engine_plugins.mooncake.objects import Objects

    base.only_here(command, at.socket)
    with base.daemon_client(at.socket, at.tenant) as client:
        objects = Objects(client, tenant_id, verify=verify)
        objects.spaces.look()
        yield client, objects
