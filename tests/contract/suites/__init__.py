"""Contract suites: what every transport, tier, directory, membership and catalog keeps. A backend's tests inherit one."""
