"""Layout: byte views of paged KV, cut into parts that do not depend on the number of ranks."""
