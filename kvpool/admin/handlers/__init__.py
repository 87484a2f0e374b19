"""The handlers of the REST interface, one module a subject."""
