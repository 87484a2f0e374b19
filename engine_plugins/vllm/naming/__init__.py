"""Naming: the facts that name a namespace, so that engines share only bytes that mean the same to both."""
