"""The processes that move bytes, and how the control process starts, orders and restarts them."""
