"""A transfer worker whose connections have no keys, as those of protocol 7: to measure what keys cost."""

from kvpool.daemon.workers.transfer_worker import TransferWorker
from kvpool.daemon.workers.worker_main import run_worker
from kvpool.transfer import handshake

if __name__ == "__main__":
    handshake.KEYED_SINCE = 1 << 30
    run_worker("transfer", TransferWorker)
