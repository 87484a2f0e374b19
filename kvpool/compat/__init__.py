"""Other stores' Python interfaces over the pool, for programs that were written for them."""
