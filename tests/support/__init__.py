"""Servers, stand-ins and fault injection for the tests and benches."""
