"""A process's limit of file descriptors."""

import resource

import uvloop

from kvpool.net import raise_descriptor_limit
from kvpool.router import command
from kvpool.router.config import load


def test_as_many_as_may_be(monkeypatch):
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for raise_it in (raise_descriptor_limit, run_router):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1, most))
            raise_it(**({"monkeypatch": monkeypatch} if raise_it is run_router else {}))
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


def run_router(monkeypatch):
    monkeypatch.setattr(uvloop, "run", lambda main: main.close())
    command.run(*load(environ={}), lambda url, engines: None)
