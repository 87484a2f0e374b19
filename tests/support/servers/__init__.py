"""Real servers for tests, benches and `make cluster`: found or fetched, started in private folders."""
