"""Storage of blocks: DRAM segments, slot allocation, eviction policies, and the tiers below memory."""
