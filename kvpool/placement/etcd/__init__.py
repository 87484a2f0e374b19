"""Membership on etcd v3: a small client over grpc.aio, a watch that survives, and the membership itself.

Needs the extra `kvpool[cluster]`.
"""
