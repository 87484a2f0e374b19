"""Translation between an engine's paged KV and the pool's blocks, one package an engine.

`mooncake` has Mooncake Store's Python interface over the pool, for programs that were written for it. Plugins see the
pool only through `kvpool.client` and the frozen values of `kvpool.types`.
"""
