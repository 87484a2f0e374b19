"""The HTTP gateway: REST, dashboard and metrics for operators, in a process beside a daemon."""
