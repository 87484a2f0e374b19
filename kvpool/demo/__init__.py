"""`kvpool demo`: a real daemon, a real router, and two engines that only simulate computing."""
