"""A transfer worker whose connections have no keys: to measure what keys cost."""

from kvpool.daemon.workers.transfer_worker import TransferWorker
from kvpool.daemon.workers.worker_main import run_worker
from kvpool.transfer.stream import Stream

if __name__ == "__main__":
    Stream.use_keys = lambda *_: None  # type: ignore[method-assign]
    run_worker(TransferWorker)
