"""Contract suites and test doubles, public: for authors of tiers, transports and policies."""
