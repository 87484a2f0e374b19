"""kvpool: a cluster-wide KV cache pool for LLM serving.

Importing this package loads nothing heavy; the client is `kvpool.client.Client`.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
