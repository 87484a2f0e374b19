"""One node: its rules (`node`), its server (`server`) and the processes that move bytes (`mover`)."""
