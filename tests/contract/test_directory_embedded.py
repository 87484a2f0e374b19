"""The embedded directory keeps the contract."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvpool.placement.directory.base import Directory
from tests.contract.suites.directory import DirectoryContract
from tests.support.embedded_directory import EmbeddedDirectory


class TestEmbedded(DirectoryContract):
    @asynccontextmanager
    async def views(self) -> AsyncIterator[tuple[Directory, Directory]]:
        directory = EmbeddedDirectory()
        yield directory, directory
        await directory.close()

    async def lose(self, directory: Directory) -> None:
        assert isinstance(directory, EmbeddedDirectory)
        directory.lose()
