"""What the operator's commands print, made from what the client's calls give.

`node` is `kvpool status`, `cluster` the tables of `nodes`, `namespaces` and `locate`, `drain` follows a
drain to its end. `naming` reads what operators type, `text` is what all of them print with.
"""
