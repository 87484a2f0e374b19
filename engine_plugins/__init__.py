"""Translation between an engine's paged KV and the pool's blocks, one package an engine.

Plugins see the pool only through `kvpool.client` and the frozen values of `kvpool.types`.
"""
